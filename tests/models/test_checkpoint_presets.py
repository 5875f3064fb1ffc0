"""Presets: the published configs and their sizes."""

import subprocess
import sys

import pytest

import overspill
from overspill.core.errors import ConfigError
from overspill.models.checkpoint_presets import check_preset, summaries
from overspill.models.huggingface.skeleton import meta_model

SIZES = {row.name: row for row in summaries()}

# Published sizes in billions: the model cards of google/switch-* and facebook/nllb-moe-54b, Table 1
# of the Pre-gated MoE paper, Table I of the APTMoE paper (without embeddings, 51200 * d_model).
PUBLISHED = [
    ("switch-base-8", 0.619, 12, 8),
    ("switch-base-64", 3.8, 12, 64),
    ("switch-base-128", 7.4, 12, 128),
    ("switch-base-256", 14.7, 12, 256),
    ("switch-large-128", 26.4, 24, 128),
    ("switch-xxl", 395, 24, 128),
    ("nllb-moe-54b", 54.5, 12, 128),
    ("aptmoe-s-8", 4.5 + 0.05, 64, 8),
    ("aptmoe-s-16", 8.8 + 0.05, 64, 16),
    ("aptmoe-s-64", 34.6 + 0.05, 64, 64),
    ("aptmoe-m-8", 18.2 + 0.10, 64, 8),
    ("aptmoe-m-16", 35.4 + 0.10, 64, 16),
]


@pytest.mark.parametrize(("name", "billions", "blocks", "experts"), PUBLISHED)
def test_presets_have_the_published_sizes(
    name: str, billions: float, blocks: int, experts: int
) -> None:
    row = SIZES[name]
    assert row.parameters == pytest.approx(billions * 1e9, rel=0.02)
    assert row.bytes == 2 * row.parameters
    assert (row.moe_blocks, row.experts) == (blocks, experts)


@pytest.mark.parametrize(("name", "layers"), [("switch-base-8", 5), ("nllb-moe-54b", 4)])
def test_listed_sizes_are_those_of_the_model_of_transformers(name: str, layers: int) -> None:
    model = meta_model(overspill.preset_config(name, layers=layers, experts=3))
    whole = meta_model(overspill.preset_config(name, experts=3))
    sizes = [sum(p.numel() for p in each.parameters()) for each in (model, whole)]
    shape = SIZES[name]
    expert = sum(p.numel() for n, p in whole.named_parameters() if ".expert_0." in n)
    router = shape.moe_blocks * whole.config.d_model
    assert sizes[1] == shape.parameters - (shape.experts - 3) * (expert + router)
    n_moe = sum(n.endswith("router.classifier.weight") for n, _ in model.named_parameters())
    assert n_moe == {"switch-base-8": 4, "nllb-moe-54b": 2}[name]
    assert sizes[0] < sizes[1]


def test_configs_are_the_published_ones() -> None:
    base = overspill.preset_config("switch-base-256")
    expected = {
        "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_decoder_layers": 12,
        "num_heads": 12, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "num_experts": 256,
        "expert_capacity": 64, "dropout_rate": 0.1, "vocab_size": 32128, "router_bias": False,
        "dense_act_fn": "relu", "tie_word_embeddings": True, "decoder_start_token_id": 0,
        "router_jitter_noise": 0.01,
    }  # fmt: skip
    assert {name: getattr(base, name) for name in expected} == expected
    nllb = overspill.preset_config("nllb-moe-54b")
    expected = {
        "d_model": 2048, "encoder_ffn_dim": 8192, "decoder_ffn_dim": 8192, "encoder_layers": 24,
        "decoder_layers": 24, "encoder_attention_heads": 16, "num_experts": 128,
        "encoder_sparse_step": 4, "decoder_sparse_step": 4, "vocab_size": 256206,
        "second_expert_policy": "all", "expert_capacity": 64, "decoder_start_token_id": 2,
        "moe_token_dropout": 0.2, "encoder_layerdrop": 0.0, "max_position_embeddings": 1024,
    }  # fmt: skip
    assert {name: getattr(nllb, name) for name in expected} == expected


def test_changes_replace_fields() -> None:
    config = overspill.preset_config("switch-base-8", experts=4, dropout_rate=0.0, d_ff=64)
    assert (config.num_experts, config.dropout_rate, config.d_ff) == (4, 0.0, 64)


def test_bad_presets_are_named_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"'switch-base-9' .*did you mean switch-base-8"):
        overspill.preset_config("switch-base-9")
    with pytest.raises(ConfigError, match=r"'switch-xl'.*did you mean .*switch-xxl"):
        overspill.from_config("switch-xl", device="cpu")
    with pytest.raises(ConfigError, match=r"'dropout' .*did you mean dropout_rate\?"):
        overspill.preset_config("switch-base-8", dropout=0.0)
    with pytest.raises(ConfigError, match="'d_model' expected int, got str"):
        overspill.preset_config("switch-base-8", d_model="x")
    with pytest.raises(ConfigError, match=r"layers=3 leaves nllb-moe-54b .* at least 4"):
        check_preset("nllb-moe-54b", layers=3)
    with pytest.raises(ConfigError, match="experts=0"):
        check_preset("switch-large-128", experts=0)


def test_the_list_needs_no_torch() -> None:
    code = (
        "import sys; from overspill.cli.main import app; app(['create', '--list']); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in SIZES)

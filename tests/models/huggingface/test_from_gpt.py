"""The names and places of tensors against transformers' own model."""

import dataclasses

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from overspill.core.errors import ConfigError
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.models.huggingface.from_gpt import (
    check_exportable,
    mixtral_config,
    mixtral_tensors,
)

SHAPE = GPTConfig(
    vocab=320,
    n_layers=2,
    d_model=32,
    d_hidden=24,
    n_heads=2,
    n_experts=4,
    top_k=2,
    gated=True,
    max_seq=64,
    rope_theta=5000.0,
)


def converted(model: GPTMoE) -> dict[str, torch.Tensor]:
    source = model.state_dict()
    return {
        name: source[piece.source].reshape(-1)[piece.offset :][: piece.numel].view(piece.shape)
        for name, piece in mixtral_tensors(model.config).items()
    }


@pytest.mark.parametrize("tied", [True, False])
def test_each_element_of_the_model_is_used_once(tied: bool) -> None:
    model = GPTMoE(dataclasses.replace(SHAPE, tie_embeddings=tied))
    for number, tensor in enumerate(model.parameters()):
        start = number * 20_000  # every element its own number
        tensor.data = torch.arange(start, start + tensor.numel()).float().view_as(tensor)
    elements = torch.cat([tensor.reshape(-1) for tensor in converted(model).values()])
    assert elements.numel() == elements.unique().numel() == model.num_parameters()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False},
        {"top_k": 3},
        {"top_k": 1, "n_experts": 1},
        {"top_k": 4, "normalize_weights": False},
        {"n_heads": 4},
    ],
)
def test_logits_are_those_of_mixtral(changes: dict[str, int]) -> None:
    shape = dataclasses.replace(SHAPE, **changes)  # type: ignore[arg-type]
    check_exportable(shape)
    model = GPTMoE(shape)
    with torch.no_grad():
        for parameter in model.parameters():  # initial weights are too small to tell much
            parameter.add_(0.1 * torch.randn_like(parameter))
    config = MixtralConfig.from_dict(mixtral_config(shape, "float32", 256))
    theirs, loading = MixtralForCausalLM.from_pretrained(
        None, config=config, state_dict=converted(model), output_loading_info=True
    )
    assert not any(loading.values()), loading
    tokens = torch.randint(shape.vocab, (2, shape.max_seq))
    with torch.no_grad():
        expected = model.eval()(tokens).logits
        assert expected.std() > 0.1
        torch.testing.assert_close(theirs(tokens).logits, expected, rtol=1e-5, atol=1e-5)


def test_the_config_says_what_the_model_is() -> None:
    config = MixtralConfig.from_dict(mixtral_config(SHAPE, "bfloat16", None))
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert config.dtype is torch.bfloat16
    assert (config.max_position_embeddings, config.num_experts_per_tok) == (64, 2)
    assert config.tie_word_embeddings
    assert config.eos_token_id is config.pad_token_id is config.bos_token_id is None
    assert config.router_aux_loss_coef == pytest.approx(0.01 * 2 / 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gated": False}, r"GELU experts .* train with --gated"),
        ({"moe_every": 2}, r"moe_every=2.*--moe-every 1"),
        ({"top_k": 1}, r"top_k=1.*--top-k 2"),
        ({"normalize_weights": False}, r"normalize_weights=False.*normalize_weights=True"),
    ],
)
def test_what_mixtral_cannot_be_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_exportable(dataclasses.replace(SHAPE, **changes))  # type: ignore[arg-type]

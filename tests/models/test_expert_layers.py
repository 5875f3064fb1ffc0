"""Models that cannot be offloaded are refused with one line, and are left as they were."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.core.errors import ConfigError
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from tests.models.huggingface.families import make_model
from tests.models.huggingface.test_exactness import BY_NAME

CONFIG = GPTConfig(
    vocab=32, n_layers=2, d_model=16, d_hidden=16, n_heads=2, n_experts=4, top_k=2, max_seq=16
)
TOKENS = torch.arange(16).view(1, 16)


def gpt() -> Any:
    return GPTMoE(CONFIG, seed=1)


def mixtral() -> Any:
    return make_model(BY_NAME["mixtral"]).train()


def switch() -> Any:
    return make_model(BY_NAME["switch_transformers"]).train()


def offload(model: Any) -> Any:
    return overspill.offload(model, device="cpu", mode="host", slots=3, quiet=True, progress=False)


def _tie(first: nn.Module, second: nn.Module) -> None:
    name, parameter = next(iter(first.named_parameters()))
    setattr(second, name, parameter)


def _offload_part(model: Any) -> None:
    offload(model.blocks[1])


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "fp16 in training": (gpt, lambda m: m.half(), "float16 cannot be trained; give dtype="),
    "fp16 of transformers": (mixtral, lambda m: m.half(), "float16 cannot be trained; give dtype="),
    "fp64 in training": (gpt, lambda m: m.double(), "float64 cannot be trained; give dtype="),
    "a layer of another dtype": (
        gpt,
        lambda m: m.blocks[1].moe.bfloat16(),
        r"blocks\.1\.moe has experts of torch\.bfloat16, blocks\.0\.moe of torch\.float32; convert",
    ),
    "tied experts": (
        gpt,
        lambda m: _tie(m.blocks[0].moe, m.blocks[1].moe),
        r"blocks\.0\.moe and blocks\.1\.moe share their experts",
    ),
    "half of an expert frozen": (
        gpt,
        lambda m: m.blocks[1].moe.w_out.requires_grad_(False),
        r"blocks\.1\.moe .* some parameters are frozen .*freeze all",
    ),
    "half of an expert of transformers frozen": (
        mixtral,
        lambda m: m.model.layers[1].mlp.experts.down_proj.requires_grad_(False),
        r"layers\.1\.mlp\.experts .* some parameters are frozen .*freeze all",
    ),
    "no weights": (
        gpt,
        lambda m: m.to("meta"),
        r"embedding\.weight is on the meta device .*overspill\.load",
    ),
    "no weights of transformers": (
        switch,
        lambda m: m.to("meta"),
        r"shared\.weight is on the meta device .*overspill\.load",
    ),
    "experts without weights": (
        mixtral,
        lambda m: m.model.layers[1].mlp.experts.to("meta"),
        r"layers\.1\.mlp\.experts\.gate_up_proj is on the meta device .*overspill\.load",
    ),
    "a part offloaded": (gpt, _offload_part, "offloaded already; offload it once"),
    "offloaded": (gpt, offload, "offloaded already; offload it once"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_is_not_supported_is_refused_in_one_line(case: str) -> None:
    make, change, message = CASES[case]
    model = make()
    change(model)
    before = dict(model.named_parameters())
    with pytest.raises(ConfigError, match=message) as error:
        offload(model)
    assert "\n" not in str(error.value)
    assert all(before[name] is now for name, now in model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_inference_runs_in_other_data_types(dtype: torch.dtype) -> None:
    model = GPTMoE(CONFIG, seed=1, dtype=dtype).eval()

    def logits() -> Tensor:
        with torch.no_grad():
            result: Tensor = model(TOKENS).logits
            return result

    expected = logits()
    offload(model)
    torch.testing.assert_close(logits(), expected)
    model.overspill.close()


def test_a_layer_that_is_used_twice_is_offloaded_once() -> None:
    model = gpt()
    model.blocks[1].moe = model.blocks[0].moe
    with torch.no_grad():
        expected = model(TOKENS).logits
        offload(model)
        torch.testing.assert_close(model(TOKENS).logits, expected)
    model.overspill.close()


@pytest.mark.parametrize(
    ("family", "field"),
    [
        ("mixtral", "num_local_experts"),
        ("switch_transformers", "num_experts"),
        ("nllb-moe", "num_experts"),
    ],
)
def test_a_config_without_experts_names_its_field(family: str, field: str) -> None:
    config = make_model(BY_NAME[family]).config
    setattr(config, field, 0)
    with pytest.raises(ConfigError, match=f"has no experts: {field} is 0 in the config; set it"):
        overspill.from_config(config, device="cpu", quiet=True)

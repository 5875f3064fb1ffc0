"""Which models are computed by fused kernels, and how the others are computed."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overspill.models.gpt import GPTMoE
from overspill.serve.options import DecodingOptions
from overspill.serve.runners import PagedRunner
from overspill.simulate import routed_by
from tests.models.huggingface.families import Family, make_model, tiny
from tests.models.huggingface.oracle import offloaded
from tests.serve.decode.decoding import (
    BLOCKS,
    CPU,
    GATED,
    INTERPRETED,
    SIZE,
    Decoding,
    decoding,
    fused_runner,
    serve,
    small,
)
from tests.serve.models import PROMPTS, plain_gpt, plain_model
from tests.serve.requests import make_request

pytestmark = INTERPRETED


def is_read(model: Any) -> bool:
    from overspill.serve.decode.structure import read_decoder

    return read_decoder(model, 64) is not None


@pytest.fixture
def mixtral(tmp_path: Path) -> Iterator[Any]:
    with offloaded(plain_model("mixtral")[0], "gpu", tmp_path) as model:
        yield model


def test_models_with_hooks_are_not_read(mixtral: Any) -> None:
    assert is_read(mixtral)
    for module in (mixtral, mixtral.model.layers[0].self_attn.q_proj, mixtral.lm_head):
        for register in (module.register_forward_hook, module.register_forward_pre_hook):
            hook = register(lambda *_: None)
            assert not is_read(mixtral)
            hook.remove()
    assert is_read(mixtral)


def test_an_exported_run_with_gelu_experts_is_read(tmp_path: Path, steps: list[int]) -> None:
    plain, _ = plain_model("overspill_gpt")
    with decoding(plain, tmp_path, "host", prompts=PROMPTS[:2]) as made:
        made.step()
    assert steps == [2]


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_models_with_other_modules_are_not_read(mixtral: Any) -> None:
    attention, block = mixtral.model.layers[1].self_attn, mixtral.model.layers[1].mlp
    replaced: list[tuple[Any, str, nn.Module]] = [
        (attention, "q_proj", Scaled(32, 32, bias=False)),
        (attention, "o_proj", nn.Sequential(attention.o_proj)),
        (mixtral.model, "norm", nn.Identity()),
        (mixtral, "lm_head", Scaled(32, 96, bias=False)),
        (block, "gate", nn.Sequential(block.gate)),
    ]
    for owner, name, module in replaced:
        before = getattr(owner, name)
        setattr(owner, name, module)
        assert not is_read(mixtral), name
        setattr(owner, name, before)
    attention.forward = type(attention).forward.__get__(attention)
    assert not is_read(mixtral)
    del attention.forward
    assert is_read(mixtral)


def test_models_with_adapters_are_not_read(mixtral: Any) -> None:
    """Also if they are inside a model of the same class."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, mixtral)
    assert not is_read(mixtral)


class InTurn:
    """Each token has the next two experts, of five."""

    n_layers, n_experts, top_k = 3, 5, 2

    def __call__(self, layer: int, n_tokens: int, device: torch.device) -> Tensor:
        return (torch.arange(2 * n_tokens) + layer).view(-1, 2) % 5


def test_routing_that_is_replaced_is_followed(tmp_path: Path, steps: list[int]) -> None:
    prompts, found = small(PROMPTS[:2]), []
    with offloaded(plain_gpt(), "host", tmp_path) as model, routed_by(model, InTurn()):
        model.overspill.set_residents([2, 0, 5])
        for fused in (True, False):
            limits = CPU, BLOCKS, SIZE, 64, 2
            runner: PagedRunner
            if fused:
                runner = fused_runner(model, *limits, DecodingOptions(slots=3))
            else:
                runner = PagedRunner(model, *limits)
            requests = [make_request(prompt, 3) for prompt in prompts]
            serve(runner, requests).close()
            found.append([request.new_tokens for request in requests])
    assert found[0] == found[1]
    assert set(steps) == {2}


class Own(GPTMoE):
    def forward(self, *args: Any, **options: Any) -> Any:
        out = super().forward(*args, **options)
        return out._replace(logits=None if out.logits is None else -out.logits)


def test_models_of_a_class_of_the_user_are_not_read(tmp_path: Path) -> None:
    model = Own(GATED, checkpoint=False).eval()
    with offloaded(model, "gpu", tmp_path) as twin:
        assert not is_read(twin)


@pytest.mark.parametrize(("activation", "fused"), [("gelu", True), ("relu", True), ("tanh", False)])
def test_activations_that_kernels_have_are_read(
    activation: str,
    fused: bool,
    tmp_path: Path,
    steps: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "overspill")
    options = {"intermediate_size": 24, "hidden_act": activation}
    plain = make_model(Family("mixtral", lambda: tiny("mixtral", **options))).eval()
    with decoding(plain, tmp_path, "host", [2, 2], PROMPTS[:1]) as made:
        made.step()  # the CPU computes the other experts
        assert bool(made.runner.stats().get("experts_on_cpu")) is fused
    assert bool(steps) is fused
    assert ("kernels do not have the activation gated Tanh" in caplog.text) is not fused


def test_another_limit_of_the_activation_is_not_read(tmp_path: Path) -> None:
    with offloaded(plain_model("gpt_oss")[0], "gpu", tmp_path) as model:
        assert is_read(model)
        model.model.layers[0].mlp.experts.limit = 5.0
        assert not is_read(model)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("deepseek_v3", id="deepseek_v3, whose keys and values have different widths"),
        pytest.param("granitemoe_swa", marks=pytest.mark.slow),
        pytest.param("afmoe", marks=pytest.mark.slow),
        pytest.param("ernie4_5_moe", marks=pytest.mark.slow),
    ],
)
def test_other_families_are_computed_by_their_modules(
    name: str, tmp_path: Path, steps: list[int], module_steps: list[int]
) -> None:
    plain, _ = plain_model(name)
    with decoding(plain, tmp_path, "host", [1] * 2, PROMPTS[:1], slots=2) as made:
        for _ in range(3):
            made.step()
    assert not steps
    assert module_steps == [1, 1, 1]


def test_models_with_adapters_are_computed_by_their_modules(
    tmp_path: Path, steps: list[int], module_steps: list[int]
) -> None:
    peft = pytest.importorskip("peft")
    plain = copy.deepcopy(plain_model("mixtral")[0])
    with offloaded(plain, "host", tmp_path) as model:
        for each in (plain, model):
            config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
            with torch.random.fork_rng():
                torch.manual_seed(0)
                peft.inject_adapter_in_model(config, each)
        made = Decoding(plain, model, PROMPTS[:1], slots=1)
        made.two_steps()
        made.runner.close()
    assert (steps, module_steps) == ([], [1, 1])


def test_hooks_of_the_user_are_called_for_every_token(
    tmp_path: Path, steps: list[int], module_steps: list[int]
) -> None:
    """A graph would not call them: such a model is computed without."""
    plain, called = copy.deepcopy(plain_model("mixtral")[0]), []
    with offloaded(plain, "host", tmp_path) as model:
        for each in (plain, model):
            each.model.layers[0].mlp.register_forward_hook(lambda *args: 2 * args[2])
        model.lm_head.register_forward_pre_hook(lambda *_: called.append(1))
        made = Decoding(plain, model, PROMPTS[:1], slots=1)
        made.step()
        made.step()
        made.runner.close()
    assert (steps, module_steps) == ([], [])
    assert len(called) == 3

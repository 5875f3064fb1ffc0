"""Decoding with fused kernels, in Triton's interpreter, compared with the plain model."""

import copy
import importlib.util
import itertools
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill import Settings
from overspill.compute.decode import constants
from overspill.core.errors import EngineError, OrderError, OverspillError
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.plan.usage import Exchange
from overspill.serve.blocks import BlockPool
from overspill.serve.loop import ServingLoop
from overspill.serve.request import Request
from overspill.serve.runners import PagedRunner
from overspill.serve.scheduler import Scheduler, Work
from overspill.simulate import routed_by
from tests.models.huggingface.families import Family, make_model, tiny
from tests.models.huggingface.oracle import offloaded
from tests.moe.oracle import delays, threads_left
from tests.serve.models import PROMPTS, plain_generate, plain_gpt, plain_model
from tests.serve.requests import make_request

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed"
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py is for a GPU"),
]
CPU = torch.device("cpu")
QUICK = ["mixtral", "qwen3_moe", "gpt_oss"]
SLOW = ["qwen2_moe", "olmoe"]  # they differ from those in little
READ = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
GATED = GPTConfig(
    vocab=48, n_layers=2, d_model=16, d_hidden=20, n_heads=2, n_experts=4, top_k=2, gated=True,
    moe_every=2, max_seq=64, tie_embeddings=False, normalize_weights=False,
)  # fmt: skip
BLOCKS, SIZE = 20, 16


def count(kind: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that steps of this kind compute."""
    sizes: list[int] = []
    call = kind.__call__

    def counted(self: Any, batch: Any) -> Any:
        sizes.append(len(batch.tokens))
        return call(self, batch)

    monkeypatch.setattr(kind, "__call__", counted)
    return sizes


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches of fused steps. Few programs: the interpreter is slow."""
    from overspill.compute.decode import constants
    from overspill.serve.decode.step import DecodeStep
    from tests.triton_interpreter import without_overflow_checks

    without_overflow_checks(monkeypatch)
    for name in ("LARGE_TILE", "SMALL_TILE", "EXPERT_IN_TILE", "EXPERT_OUT_TILE"):
        monkeypatch.setattr(constants, name, constants.Tile(64, 64, 4))
    return count(DecodeStep, monkeypatch)


@pytest.fixture
def module_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches of steps through the modules of a model."""
    from overspill.serve.decode.module_step import ModuleStep

    return count(ModuleStep, monkeypatch)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert not threads_left()


class Decoding:
    """Requests of an offloaded model, which get the likeliest tokens of the plain one."""

    def __init__(
        self,
        plain: Any,
        model: Any,
        prompts: Sequence[list[int]] = PROMPTS[:3],
        slots: int = 0,
        mode: str = "auto",
    ) -> None:
        self.plain, self.model = plain, model
        limits = BLOCKS, SIZE, 64, 4
        self.runner = PagedRunner(model, CPU, *limits, fused=True, slots=slots, mode=mode)
        self._scheduler = Scheduler(BlockPool(BLOCKS, SIZE), 4, 64)
        self.requests = [make_request(prompt, 30) for prompt in prompts]
        for request in self.requests:
            self._scheduler.add(request)
        self.step()  # the prompts

    def step(self) -> list[Work]:
        """One batch, whose logits are those of the plain model."""
        batch = self._scheduler.next_batch()
        with torch.inference_mode():
            logits = self.runner.run(batch)
        self.check(logits)
        self._append(batch, logits)
        return batch

    def two_steps(self) -> None:
        """The second begins before the first one's tokens are known."""
        batch = self._scheduler.next_batch()
        with torch.inference_mode():
            first = self.runner.run(batch).clone()
            assert self._scheduler.reserve_next(self.requests)
            second = self.runner.continue_with(batch, first.argmax(-1))
        for logits in (first, second):
            assert logits is not None
            self.check(logits)
            self._append(batch, logits)

    def check(self, logits: Tensor) -> None:
        for request, row in zip(self.requests, logits, strict=True):
            with torch.no_grad():
                expected = self.plain(torch.tensor([request.tokens])).logits[0, -1]
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=2e-5)

    def _append(self, batch: Sequence[Work], logits: Tensor) -> None:
        for work, row in zip(batch, logits, strict=True):
            self._scheduler.computed(work)
            work.request.tokens.append(int(row.argmax()))


@contextmanager
def decoding(
    plain: Any,
    folder: Path,
    mode: str = "gpu",
    homes: Sequence[int] | None = None,
    prompts: Sequence[list[int]] = PROMPTS[:3],
    settings: Settings | None = None,
    slots: int = 0,
) -> Iterator[Decoding]:
    with offloaded(plain, mode, folder, settings) as model:
        if homes is not None:
            model.overspill.set_homes(homes)
        made = Decoding(plain, model, prompts, slots)
        try:
            yield made
        finally:
            made.runner.close()


def gpt(config: GPTConfig) -> GPTMoE:
    """Weights are large enough that routing and tokens vary."""
    model = GPTMoE(config, checkpoint=False, seed=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    return model


def small(prompts: Sequence[list[int]]) -> list[list[int]]:
    return [[token % 48 for token in prompt] for prompt in prompts]


@pytest.mark.parametrize("name", READ)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path, steps: list[int]) -> None:
    with decoding(plain_model(name)[0], tmp_path, prompts=PROMPTS[2:3]) as made:
        made.step()
    assert steps == [1]


@pytest.mark.parametrize(
    "name", ["mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in QUICK[1:] + SLOW)]
)
def test_several_requests_are_computed_together(
    name: str, tmp_path: Path, steps: list[int]
) -> None:
    with decoding(plain_model(name)[0], tmp_path) as made:
        made.step()
    assert steps == [4], "a batch of three is filled up"


@pytest.mark.parametrize("config", [None, GATED], ids=["gelu", "gated, with dense blocks"])
def test_logits_are_those_of_gpt_moe(
    config: GPTConfig | None, tmp_path: Path, steps: list[int]
) -> None:
    plain = plain_gpt() if config is None else gpt(config)
    with decoding(plain, tmp_path, prompts=small(PROMPTS[:3])) as made:
        made.step()
    with decoding(plain, tmp_path, prompts=small(PROMPTS[:1])) as made:
        made.step()
    assert steps == [4, 1]


@pytest.mark.parametrize(
    ("name", "homes"),
    [("mixtral", 0), ("qwen2_moe", 1), ("qwen3_moe", 3), ("gpt_oss", 0), ("gpt_oss", 1)],
)
def test_experts_may_be_in_host_memory(
    name: str, homes: int, tmp_path: Path, steps: list[int]
) -> None:
    plain, _ = plain_model(name)
    late = Settings(inject=delays(seed=3, longest=5e-4, only="cpu"))
    with decoding(plain, tmp_path, "host", [homes] * 2, PROMPTS[:1], late) as made:
        made.two_steps()
    assert steps == [1, 1]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_several_requests_may_miss_experts(name: str, tmp_path: Path, steps: list[int]) -> None:
    plain, _ = plain_model(name)
    with decoding(plain, tmp_path, "host", [1, 2]) as made:
        made.step()
    assert steps == [4]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_several_requests_may_read_experts_over_the_link(
    name: str, tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "SEVERAL", 2)
    plain, _ = plain_model(name)
    found = []
    for share in (0, 8, 16):
        monkeypatch.setattr(constants, "LINK_SHARE", share)
        with decoding(plain, tmp_path, "host", [1, 0]) as made:
            made.step()
            made.model.overspill.exchange_homes([Exchange(0, 0, 3)])
            made.step()
            found.append(made.runner.stats()["experts_on_cpu"])
    assert found[0] > found[1] > found[2] == 0
    assert steps == [4] * 6


@pytest.mark.parametrize("name", ["gpt", "mixtral"])
def test_the_first_prompt_may_have_one_token(name: str, tmp_path: Path, steps: list[int]) -> None:
    plain = plain_gpt() if name == "gpt" else plain_model(name)[0]
    with decoding(plain, tmp_path, "host", prompts=[[4]]) as made:
        assert not steps
        made.step()
    assert steps == [1]


def test_gpt_moe_may_miss_experts(tmp_path: Path, steps: list[int]) -> None:
    with decoding(plain_gpt(), tmp_path, "host", [0, 2, 5], small(PROMPTS[:1])) as made:
        made.two_steps()
    assert steps == [1, 1]


def test_experts_may_move_between_steps(tmp_path: Path, steps: list[int]) -> None:
    plain, _ = plain_model("mixtral")
    with decoding(plain, tmp_path, "host", [2, 2], PROMPTS[:1]) as made:
        engine = made.model.overspill
        for homes in ([4, 4], [0, 3], [4, 4]):
            made.step()
            engine.set_homes(homes)
        made.step()
        engine.set_homes([2, 2])
        engine.exchange_homes([Exchange(0, 0, 3), Exchange(1, 1, 2)])
        made.step()
    assert steps == [1] * 5


def test_modules_compute_experts_on_disk(tmp_path: Path, steps: list[int]) -> None:
    with decoding(plain_model("mixtral")[0], tmp_path, "disk", None, PROMPTS[:1]) as made:
        made.step()
        made.step()
    assert not steps


def test_modules_compute_if_the_device_cannot_access_pinned_memory(
    tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the second GPU of a machine."""
    from overspill.serve.decode import decode

    monkeypatch.setattr(decode, "can_map", lambda device: False)
    with decoding(plain_gpt(), tmp_path, "host", prompts=small(PROMPTS[:1])) as made:
        made.step()
        assert not steps
        made.model.overspill.set_homes([5, 5, 5])
        made.step()
        assert steps == [1]


# -- models that are not read ---------------------------------------------------------------------


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
        model.overspill.set_homes([2, 0, 5])
        for fused in (True, False):
            runner = PagedRunner(model, CPU, BLOCKS, SIZE, 64, 2, fused, 3)
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


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_other_activations_are_not_read(activation: str, tmp_path: Path, steps: list[int]) -> None:
    options = {"intermediate_size": 24, "hidden_act": activation}
    plain = make_model(Family("mixtral", lambda: tiny("mixtral", **options))).eval()
    with decoding(plain, tmp_path, prompts=PROMPTS[:1]) as made:
        made.step()
    assert not steps


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


@pytest.mark.parametrize(
    ("name", "slots"),
    [pytest.param("mixtral", 1, marks=pytest.mark.slow), ("mixtral", 3), ("gpt_oss", 3)],
)
def test_copies_of_experts_change_nothing(
    name: str, slots: int, tmp_path: Path, steps: list[int]
) -> None:
    with decoding(plain_model(name)[0], tmp_path, "host", [1, 0], PROMPTS[:1], None, slots) as made:
        for _ in range(2):
            made.two_steps()
        stats = made.runner.stats()
        assert stats["expert_slots"] == slots
        assert sum(stats["expert_hit_rate"]) > 0
    assert steps == [1] * 4


def test_copies_follow_weights_that_are_loaded(tmp_path: Path, steps: list[int]) -> None:
    """Of the last layer: keys and values of earlier tokens do not depend on them."""
    plain = copy.deepcopy(plain_model("mixtral")[0])
    with decoding(plain, tmp_path, "host", [0, 1], PROMPTS[:1], slots=8) as made:
        for _ in range(2):
            made.step()
        assert sum(made.runner.stats()["expert_hit_rate"]) > 0
        changed = {
            name: -1.5 * value
            for name, value in plain.state_dict().items()
            if "layers.1" in name and "experts" in name
        }
        assert changed
        for model in (plain, made.model):
            model.load_state_dict(changed, strict=False)
        made.step()
    assert steps == [1] * 3


def test_ctrl_c_loses_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with decoding(plain_gpt(), tmp_path, "host", prompts=small(PROMPTS[:1]), slots=3) as made:
        engine = made.model.overspill
        weights = engine.host_weights

        def interrupted(*asked: Any) -> Tensor | None:
            monkeypatch.setattr(engine, "host_weights", weights)
            signal.raise_signal(signal.SIGINT)
            return weights(*asked)

        monkeypatch.setattr(engine, "host_weights", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.step()
        for _ in range(2):
            made.step()
        assert sum(made.runner.stats()["expert_hit_rate"]) > 0


def test_a_step_after_a_failure_to_allocate_copies_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no copies now")

    with decoding(plain_gpt(), tmp_path, "host", prompts=small(PROMPTS[:1])) as made:
        with monkeypatch.context() as patch:
            patch.setattr(made.model.overspill, "gpu_use", fail)
            with pytest.raises(RuntimeError, match="no copies"):
                made.step()
        made.step()


# -- the model beside it --------------------------------------------------------------------------


def test_a_model_is_as_before_when_it_was_served(tmp_path: Path) -> None:
    """Queries, keys and values have become parts of one tensor."""
    plain, expected = plain_model("qwen2_moe")
    with offloaded(plain, "gpu", tmp_path) as model:
        Decoding(plain, model, PROMPTS[:1]).runner.close()
        assert plain_generate(model, PROMPTS[0]) == expected[0]
        for name, value in model.state_dict().items():
            assert torch.equal(value[...], plain.state_dict()[name]), name
        overspill.save(model, tmp_path / "saved")
        again = type(plain).from_pretrained(tmp_path / "saved").eval()
        assert plain_generate(again, PROMPTS[0]) == expected[0]
        changed = copy.deepcopy(plain)
        for each in (changed, model):
            with torch.no_grad():
                each.model.layers[0].self_attn.k_proj.weight.mul_(-1.5)
        made = Decoding(changed, model, PROMPTS[:1])
        made.step()
        with torch.no_grad():  # while it is served
            changed.model.layers[1].self_attn.q_proj.weight.mul_(-1.5)
            model.model.layers[1].self_attn.q_proj.weight.mul_(-1.5)
        made.step()
        made.runner.close()


def test_a_second_runner_of_a_model_is_refused_and_changes_nothing(
    tmp_path: Path, steps: list[int]
) -> None:
    plain, _ = plain_model("mixtral")
    with decoding(plain, tmp_path, prompts=PROMPTS[:1]) as made:
        weight = made.model.model.layers[0].self_attn.q_proj.weight
        address = weight.data_ptr()
        with pytest.raises(OrderError, match="this model is being served"):
            PagedRunner(made.model, CPU, BLOCKS, SIZE, 64, 4, fused=True)
        assert weight.data_ptr() == address
        made.step()
    assert steps == [1]


@pytest.mark.slow
def test_two_runners_may_serve_one_gpt_moe(tmp_path: Path, steps: list[int]) -> None:
    with decoding(plain_gpt(), tmp_path, "host", [2, 2, 2], small(PROMPTS[:1])) as made:
        other = Decoding(plain_gpt(), made.model, small(PROMPTS[1:2]))
        made.step()
        made.model.overspill.set_homes([1, 5, 0])
        made.step()
        other.step()
        made.model(torch.tensor([[1, 2, 3]]))  # and it may be used beside them
        made.step()
        other.runner.close()
    assert len(steps) == 5


def test_a_step_after_the_engine_was_closed_is_refused(tmp_path: Path) -> None:
    for mode, homes in (("gpu", None), ("host", [1, 1])):
        with decoding(plain_model("mixtral")[0], tmp_path, mode, homes, PROMPTS[:1]) as made:
            made.step()
            made.model.overspill.close()
            with pytest.raises(OverspillError, match="closed"):
                made.step()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads of Linux")
def test_a_runner_that_is_given_up_ends_its_threads(tmp_path: Path) -> None:
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    with offloaded(plain_gpt(), "host", tmp_path) as model:
        made = Decoding(plain_gpt(), model, small(PROMPTS[:1]))
        before = threads()
        made.step()
        assert threads() > before
        del made
        assert threads() == before


# -- through the serving loop ---------------------------------------------------------------------


def serve(runner: PagedRunner, requests: Sequence[Request]) -> ServingLoop:
    pool = BlockPool(BLOCKS, SIZE)
    loop = ServingLoop(runner, Scheduler(pool, 4, 64), ends=[])
    for request in requests:
        loop.add(request)
    loop.run_until(lambda: all(request.finished for request in requests))
    pool.check_conserved()
    assert pool.n_free == BLOCKS
    return loop


@pytest.mark.parametrize("homes", [[4, 4], [1, 2]], ids=["on the device", "some in host memory"])
def test_greedy_tokens_are_those_of_transformers(
    homes: list[int], tmp_path: Path, steps: list[int]
) -> None:
    plain, expected = plain_model("mixtral")
    with offloaded(plain, "host", tmp_path) as model:
        model.overspill.set_homes(homes)
        runner = PagedRunner(model, CPU, BLOCKS, SIZE, 64, 2, fused=True)
        requests = [make_request(PROMPTS[0], 4), make_request(PROMPTS[1], 2)]
        serve(runner, requests).close()
    assert [request.new_tokens for request in requests] == [expected[0][:4], expected[1][:2]]
    assert sorted(set(steps)) == [1, 2]


def test_a_batch_without_memory_to_begin_early_begins_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overspill.serve.decode.decode import Decode

    run, refused = Decode.run, []

    def fail(self: Decode, tokens: Any, *others: Any) -> Any:
        if isinstance(tokens, Tensor):
            refused.append(1)
            raise torch.OutOfMemoryError("injected")
        return run(self, tokens, *others)

    monkeypatch.setattr(Decode, "run", fail)
    plain, expected = plain_model("mixtral")
    with offloaded(plain, "gpu", tmp_path) as model:
        runner = PagedRunner(model, CPU, BLOCKS, SIZE, 64, 2, fused=True)
        made = make_request(PROMPTS[0], 4)
        serve(runner, [made]).close()
    assert refused
    assert made.new_tokens == expected[0][:4]


def test_a_failure_of_the_cpu_fails_its_requests(tmp_path: Path) -> None:
    """Also with the last token; the next request works."""
    calls = itertools.count()
    fails: set[int] = set()

    def inject(kind: str) -> None:
        if kind == "cpu" and next(calls) in fails:
            raise EngineError("injected")

    plain, expected = plain_model("mixtral")
    with offloaded(plain, "host", tmp_path, Settings(inject=inject)) as model:
        runner = PagedRunner(model, CPU, BLOCKS, SIZE, 64, 2, fused=True)
        made = make_request(PROMPTS[0], 2)
        serve(runner, [made])
        assert made.new_tokens == expected[0][:2]
        fails.add(next(calls) + 1)
        failed = make_request(PROMPTS[1], 2)
        serve(runner, [failed])
        assert str(failed.error) == "injected"
        again = make_request(PROMPTS[1], 2)
        serve(runner, [again])
        assert again.new_tokens == expected[1][:2]
        runner.close()

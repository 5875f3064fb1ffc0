"""Actions of users before, between and during steps in stages: they work, or are refused by
name."""

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.core.errors import ConfigError, NonFiniteError, OrderError
from overspill.moe.layer import MoE
from tests.interrupts import calls_of, interrupted, spread
from tests.models.huggingface.families import make_model
from tests.models.huggingface.oracle import ADAM, assert_same_weights, offloaded
from tests.models.stages.staged import (
    BLOCKS,
    MIXTRAL,
    assert_follows,
    micro_batches,
    train_plain,
    train_staged,
)
from tests.slow import slow_rows

BATCHES = micro_batches(2)


class Bench:
    """An offloaded model in stages, its optimizer, and the plain model."""

    def __init__(self, twin: Any, plain: Any) -> None:
        self.model, self.plain = twin, plain
        self.optimizer = overspill.AdamW(twin, max_grad_norm=1.0, **ADAM)
        self.stages = self.divide(3)

    def divide(self, n_stages: int) -> overspill.Stages:
        return overspill.Stages(self.model, n_stages, offload_activations=True, small_activation=0)

    def backward(self, loss: Callable[[int, Any], Tensor] | None = None) -> None:
        self.stages.backward(BATCHES, self.optimizer, loss)

    def assert_next_step_follows(self) -> None:
        """Check that the gradients of a step from the current weights equal the plain ones."""
        start = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.plain.load_state_dict(start)
        run = train_staged(self.stages, self.model, self.optimizer, [BATCHES])
        expected = train_plain(self.plain, [BATCHES], 1.0)
        for gradients in (run.gradients, expected.gradients):  # moments are of earlier steps too
            for name in [name for name in gradients if ".experts." in name]:
                del gradients[name]
        assert_follows(run, expected)
        self.model.overspill.check_conserved()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    plain = make_model(MIXTRAL)
    with offloaded(plain, "host", tmp_path_factory.mktemp("stages")) as twin:
        yield Bench(twin, plain)


@pytest.fixture(scope="module")
def refusing(made: Bench) -> Iterator[Bench]:
    """After all that is refused the model trains on."""
    yield made
    made.assert_next_step_follows()


@pytest.fixture
def bench(made: Bench) -> Iterator[Bench]:
    """After each test the model trains on."""
    yield made
    made.optimizer.zero_grad()
    made.assert_next_step_follows()


# -- between steps ----------------------------------------------------------------------------


def test_evaluation_and_generation_between_steps(bench: Bench) -> None:
    model = bench.model.eval()
    bench.plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        loss = bench.plain.eval()(**BATCHES[1]).loss
        assert model(**BATCHES[1]).loss.item() == pytest.approx(loss.item(), rel=1e-5)
        prompt = BATCHES[1]["input_ids"][:1]
        tokens = model.generate(prompt, max_new_tokens=4, do_sample=False)
        assert torch.equal(tokens, bench.plain.generate(prompt, max_new_tokens=4, do_sample=False))
    outputs: list[float] = []
    bench.stages.forward(BATCHES, lambda number, output: outputs.append(output.loss.item()))
    assert outputs[1] == pytest.approx(loss.item(), rel=1e-5)
    model.train()


def test_a_step_without_stages_between_others(bench: Bench) -> None:
    with bench.optimizer.accumulate():
        bench.model(**BATCHES[0]).loss.backward()
    bench.model(**BATCHES[1]).loss.backward()
    bench.optimizer.step()
    bench.optimizer.zero_grad()
    bench.assert_next_step_follows()


def test_several_calls_of_one_step_accumulate(bench: Bench) -> None:
    with bench.optimizer.accumulate():
        bench.backward()
    bench.backward()
    twice = {n: p.grad.clone() for n, p in bench.model.named_parameters() if p.grad is not None}
    bench.optimizer.zero_grad()
    bench.backward()
    for name, parameter in bench.model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(twice[name], 2 * parameter.grad, msg=name)


def test_stages_that_were_dropped_leave_the_model_as_it_was(bench: Bench) -> None:
    kind = type(make_model(MIXTRAL).model.layers[0])
    del bench.stages
    gc.collect()
    bench.model(**BATCHES[0]).loss.backward()
    bench.optimizer.step()
    bench.optimizer.zero_grad()
    bench.stages = bench.divide(BLOCKS)
    bench.assert_next_step_follows()
    bench.stages.close()
    assert {type(block) for block in bench.model.model.layers} == {kind}
    bench.stages = bench.divide(3)


def test_one_division_at_a_time(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="divided into stages already; close those first"):
        bench.divide(2)
    closed = bench.stages
    closed.close()
    bench.stages = bench.divide(2)
    closed.close()  # again: the new stages stay
    with pytest.raises(OrderError, match="these stages are closed"):
        closed.backward(BATCHES, bench.optimizer)
    assert [len(blocks) for blocks in bench.stages.blocks] == [2, 2]


# -- during a step ------------------------------------------------------------------------------


@pytest.mark.parametrize("at", slow_rows([0, 1], 0))
def test_an_exception_in_the_loss_drops_the_step(bench: Bench, at: int) -> None:
    def loss(number: int, output: Any) -> Tensor:
        if number == at:
            raise ValueError("of the user")
        found: Tensor = output.loss
        return found

    with pytest.raises(ValueError, match="of the user"):
        bench.backward(loss)


def test_a_loss_that_is_nan_updates_nothing(bench: Bench) -> None:
    start = {name: value.clone() for name, value in bench.model.state_dict().items()}
    bench.backward(lambda number, output: output.loss * float("nan"))
    with pytest.raises(NonFiniteError, match="nothing was updated"):
        bench.optimizer.step()
    now = bench.model.state_dict()
    assert all(torch.equal(now[name], value) for name, value in start.items())


@pytest.mark.parametrize(
    "count", [pytest.param(2, id="few"), pytest.param(300, id="many", marks=pytest.mark.slow)]
)
@pytest.mark.timeout(900)
def test_a_step_that_was_interrupted_anywhere_can_be_repeated(bench: Bench, count: int) -> None:
    bench.backward()
    expected = {n: p.grad.clone() for n, p in bench.model.named_parameters() if p.grad is not None}
    bench.optimizer.zero_grad()
    calls = calls_of(bench.backward)
    bench.optimizer.zero_grad()
    for at in spread(calls, count):
        interrupted(bench.backward, at)
        bench.optimizer.zero_grad()
        bench.backward()
        for name, parameter in bench.model.named_parameters():
            assert parameter.grad is None or torch.equal(parameter.grad, expected[name]), name
        bench.optimizer.zero_grad()


def test_another_thread_uses_the_whole_model(bench: Bench) -> None:
    """While a stage computes: from a hook in the middle of the last stage's forward."""
    losses: list[float] = []
    with torch.no_grad():
        expected = bench.model(**BATCHES[0]).loss.item()

    def evaluate() -> None:
        with torch.no_grad():
            losses.append(bench.model(**BATCHES[0]).loss.item())

    def hook(*_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join()

    handle = bench.model.model.layers[1].self_attn.register_forward_hook(hook)
    bench.backward()
    handle.remove()
    assert losses == [pytest.approx(expected, rel=1e-6)] * len(BATCHES)


def test_a_micro_batch_that_does_not_reach_the_model_adds_nothing(tmp_path: Path) -> None:
    """Also the last one, with whose backward gradients are complete otherwise."""
    plain = make_model(MIXTRAL)
    other = torch.ones((), requires_grad=True)
    with offloaded(plain, "host", tmp_path) as twin:
        optimizer = overspill.AdamW(twin, **ADAM)
        stages = overspill.Stages(twin, 2)
        stages.backward(BATCHES, optimizer, lambda n, output: other * 2 if n else output.loss)
        optimizer.step()
        train_plain(plain, [BATCHES[:1]])
        assert_same_weights(plain, twin, atol=1e-5)
    assert other.grad == 2


@pytest.mark.parametrize("offload", slow_rows([False, True], 0))
def test_hooks_on_blocks_change_what_passes_between_stages(tmp_path: Path, offload: bool) -> None:
    plain = make_model(MIXTRAL)
    with offloaded(plain, "host", tmp_path) as twin:
        for model in (plain, twin):
            for block in model.model.layers:
                block.register_forward_hook(lambda block, args, output: 0.5 * output + 0.1)
                # in place, as some models do
                block.register_forward_pre_hook(lambda block, args: (args[0].mul_(1.5),))
        stages = overspill.Stages(twin, 3, offload_activations=offload, small_activation=0)
        optimizer = overspill.AdamW(twin, max_grad_norm=1.0, **ADAM)
        run = train_staged(stages, twin, optimizer, [BATCHES])
        assert_follows(run, train_plain(plain, [BATCHES], 1.0))


def test_autocast_around_a_step(bench: Bench) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        bench.backward()
    staged = {n: p.grad.clone() for n, p in bench.model.named_parameters() if p.grad is not None}
    bench.optimizer.zero_grad()
    for number, batch in enumerate(BATCHES):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = bench.model(**batch).loss / len(BATCHES)
        with bench.optimizer.accumulate() if number == 0 else nullcontext():
            loss.backward()
    for name, parameter in bench.model.named_parameters():
        if parameter.grad is not None:
            difference = (staged[name] - parameter.grad).norm()
            assert difference <= 0.02 * parameter.grad.norm(), name  # some roundings of bf16


# -- refused by name ----------------------------------------------------------------------------


def test_other_micro_batches_are_refused(refusing: Bench) -> None:
    ids = BATCHES[0]["input_ids"]
    refused: list[tuple[Any, str]] = [
        ([], "at least one micro-batch"),
        (BATCHES[0], "one mapping; give a list"),
        ([BATCHES[0], ids], "micro-batch 1 is a Tensor"),
        ([{"input_ids": ids}], "no loss for micro-batch 0; put labels"),
    ]
    for given, message in refused:
        with pytest.raises(ConfigError, match=message):
            refusing.stages.backward(given, refusing.optimizer)


def test_other_losses_are_refused(bench: Bench) -> None:
    refused: list[tuple[Any, str]] = [
        (lambda n, output: None, "micro-batch 0 is a NoneType; return a tensor"),
        (lambda n, output: output.logits, r"has the shape \(1, 5, 96\)"),
        (lambda n, output: output.loss.detach(), "micro-batch 0 needs no gradient"),
    ]
    for loss, message in refused:
        with pytest.raises(ConfigError, match=message):
            bench.backward(loss)


def test_another_optimizer_is_refused(refusing: Bench) -> None:
    with pytest.raises(ConfigError, match=r"experts are trained; give backward\(\) their"):
        refusing.stages.backward(BATCHES)
    theirs: Any = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    with pytest.raises(ConfigError, match=r"SGD does not train experts; give the overspill\.AdamW"):
        refusing.stages.backward(BATCHES, theirs)


def test_more_stages_than_blocks_are_refused(bench: Bench) -> None:
    bench.stages.close()
    for count in (0, BLOCKS + 1):
        with pytest.raises(ConfigError, match=f"{count} stages.*blocks.*model has {BLOCKS}"):
            bench.divide(count)
    bench.stages = bench.divide(3)


def test_other_models_are_refused() -> None:
    plain = make_model(MIXTRAL)
    with pytest.raises(ConfigError, match=r"an offloaded model; call overspill\.offload"):
        overspill.Stages(plain, 2)
    layer: Any = nn.Sequential(MoE(d_model=8, d_hidden=8, n_experts=2, top_k=1, gated=False))
    overspill.offload(layer, mode="gpu", device="cpu", quiet=True, progress=False)
    with pytest.raises(ConfigError, match="or a GPT-MoE, and this is a Sequential"):
        overspill.Stages(layer, 1)
    layer.overspill.close()


def test_a_model_in_stages_is_not_copied(refusing: Bench) -> None:
    with pytest.raises(OrderError, match="an offloaded model cannot be copied"):
        copy.deepcopy(refusing.model)


@pytest.mark.parametrize("count", [0, BLOCKS + 1])
def test_a_number_of_stages_is_checked_before_memory_is_taken(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overspill.models.offload.Engine", None)
    monkeypatch.setattr("overspill.models.stages.division.measured_costs", None)
    model = make_model(MIXTRAL)
    with pytest.raises(ConfigError, match=f"{count} stages.*blocks.*model has"):
        overspill.offload(model, device="cpu", stages=count, quiet=True)

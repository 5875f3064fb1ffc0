"""Some random programs, from fixed seeds. `bench/fuzz.py` runs more of them."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from overspill.moe.gradients import ExpertGradients
from overspill.moe.layer_pass import Wave
from tests.fork_server import fork_server
from tests.fuzz import subject
from tests.fuzz.execute import execute
from tests.fuzz.program import Case, Op, Program, program_of
from tests.fuzz.run import Report, main, read_lines, shrink
from tests.slow import slow_rows

# The first are chosen: of 4,000 they have the most different pairs of settings, of settings and
# operations, of operations one after the other in each mode, and of faults and operations; as many
# as 48 programs that are not chosen. The others are long.
SEEDS = {
    "many pairs": [
        172, 293, 568, 705, 880, 944, 1247, 1417, 1880, 1881, 2121, 2382, 2599, 2634, 2929, 3027,
        3087, 3487, 3498, 3736, 3847,
    ],
    "long": [42_003, 42_004, 42_006, 42_013, 42_014],
}  # fmt: skip
IMPORTS = ["torch._dynamo", "transformers.models.mixtral.modeling_mixtral"]


@pytest.mark.parametrize("seeds", slow_rows(SEEDS.values(), 1), ids=SEEDS)
def test_random_programs_give_the_results_of_plain_pytorch(
    seeds: list[int], tmp_path: Path
) -> None:
    """In a process that ends if one of them hangs."""
    log, report = tmp_path / "log", Report()
    arguments = ["--seed", *map(str, seeds)]
    fork_server().preload(IMPORTS)
    code = fork_server().run(main, arguments, log=log)
    text = log.read_text()
    lines = [line for line in text.splitlines() if line.startswith("{")]
    unfinished = read_lines(lines, report, threading.Lock())
    assert unfinished is None, f"program {unfinished} did not end:\n{text[-6000:]}"
    assert code == 0, text[-6000:]
    assert not report.failures, "\n".join(map(str, report.failures))
    assert report.programs == len(seeds)


def test_a_seed_always_gives_the_same_program() -> None:
    assert program_of(7) == program_of(7)
    assert program_of(7) != program_of(8)


STEP = Program(
    0, Case(), (Op("evaluate"), Op("forward"), Op("evaluate"), Op("backward"), Op("step"))
)


@pytest.mark.parametrize("mode", slow_rows(["gpu", "host"], 1))
def test_a_wrong_update_is_found_and_its_program_shortened(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(0, Case(mode=mode, slots=None if mode == "gpu" else 2), STEP.ops)
    assert execute(program).failure is None
    monkeypatch.setitem(subject.ADAM, "weight_decay", 0.2)
    monkeypatch.setattr("tests.fuzz.oracle.ADAM", {**subject.ADAM, "weight_decay": 0.1})
    failure = execute(program).failure
    assert failure is not None
    assert "weight" in failure
    ops, _ = shrink(program, "cpu", failure)
    assert ops == [1, 3], "the end of a program steps by itself"


@pytest.mark.parametrize("mode", ["gpu", "host"])
def test_a_wrong_gradient_of_one_expert_is_found_in_bf16(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(dtype="bfloat16", mode=mode, slots=None if mode == "gpu" else 2)
    program = Program(0, case, STEP.ops)
    assert execute(program).failure is None
    add = ExpertGradients.add

    def wrong(
        self: ExpertGradients, layer: int, wave: Wave, dw: Sequence[Tensor], *args: Any, **more: Any
    ) -> None:
        if layer == 0 and wave.first == 0:
            for part in dw:
                part[0] *= 1.15
        add(self, layer, wave, dw, *args, **more)

    monkeypatch.setattr(ExpertGradients, "add", wrong)
    assert "w_in[0]" in str(execute(program).failure)


def test_an_error_without_a_rule_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: subject.Subject, op: Op) -> None:
        raise subject.OrderError("no")

    monkeypatch.setattr(subject.Subject, "zero_grad", refuse)
    program = Program(0, Case(mode="gpu", slots=None), (Op("zero_grad"),))
    assert "OrderError: no" in str(execute(program).failure)


def test_a_backward_after_autograd_grad_finds_host_slots() -> None:
    """After autograd.grad the GPU holds more experts than the host: the next backward uploads
    nothing, and its gradients must still get host slots. It hung."""
    settings = {"overlap_updates": False, "threads": 1}
    case = Case(n_layers=3, n_experts=5, mode="disk", slots=12, host_slots=5, settings=settings)
    program = Program(0, case, (Op("forward"), Op("grad"), Op("backward")))
    assert execute(program).failure is None


@pytest.mark.parametrize(("n_layers", "batches"), slow_rows([(2, (1, 3)), (3, (2, 1))], 1))
def test_a_first_gradient_finds_a_host_slot_when_copies_end_late(
    n_layers: int, batches: tuple[int, int]
) -> None:
    """Both host slots are held by updates that wait for kept gradients on disk. It hung, but not
    if gradients arrive at once."""
    case = Case(
        n_layers=n_layers, n_experts=5, top_k=1, mode="disk", slots=12, host_slots=2, late=1,
        settings={"threads": 1},
    )  # fmt: skip
    first, second = batches
    ops = (Op("forward", batch=first), Op("accumulate"))
    program = Program(0, case, (*ops, Op("forward", batch=second), Op("accumulate")))
    assert execute(program).failure is None

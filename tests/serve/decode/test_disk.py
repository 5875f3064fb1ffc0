"""Decoding steps whose experts are on disk: the CPU computes them in host memory."""

import copy
import errno
import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill import Settings
from overspill.core.errors import DiskError, OverspillError
from overspill.models.config import GPTConfig
from tests.moe.oracle import delays
from tests.serve.decode.decoding import INTERPRETED, Decoding, gpt, small
from tests.serve.models import PROMPTS
from tests.serve.test_failures import FailingJob, cut_weights

pytestmark = INTERPRETED
PROMPT = small(PROMPTS[:1])
CONFIG = GPTConfig(
    vocab=48, n_layers=3, d_model=16, d_hidden=24, n_heads=1, n_experts=12, top_k=2, max_seq=64
)


@contextmanager
def on_disk(
    folder: Path,
    prompts: list[list[int]] = PROMPT,
    settings: Settings | None = None,
    host_slots: int = 20,
    slots: int = 0,
    trained: bool = False,
    mode: str = "auto",
    level: int = 0,
) -> Iterator[Decoding]:
    """Experts on disk share all host slots, or half of them if they are `trained`."""
    plain = gpt(CONFIG)
    if level:
        overspill.pregate(plain, level)
    given: dict[str, Any] = {"mode": "disk", "slots": 3, "host_slots": host_slots, "disk": folder}
    model: Any = overspill.offload(
        copy.deepcopy(plain).train(trained),
        settings=settings,
        device="cpu",
        quiet=True,
        progress=False,
        **given,
    )
    made = Decoding(plain, model.eval(), prompts, slots, mode)
    try:
        yield made
    finally:
        made.runner.close()
        model.overspill.check_conserved()
        model.overspill.close()


@pytest.mark.slow
def test_logits_are_those_of_the_plain_model(tmp_path: Path, steps: list[int]) -> None:
    with on_disk(tmp_path) as made:
        assert made.model.overspill.memory.uses_disk
        for _ in range(2):
            made.two_steps()
        read = made.model.overspill.recorder.counters()["ssd read"]
        assert made.runner.stats()["experts_on_cpu"] > 0
    assert steps == [1] * 4
    assert read > 0


@pytest.mark.slow
def test_several_requests_with_late_reads(tmp_path: Path, steps: list[int]) -> None:
    late = Settings(inject=delays(seed=1, longest=2e-3, only="ssd read"))
    with on_disk(tmp_path, small(PROMPTS[:3]), late) as made:
        made.step()
        made.step()
    assert steps == [4, 4]


@pytest.mark.parametrize(
    ("mode", "level"),
    [
        pytest.param("on-demand", 0, marks=pytest.mark.slow),
        pytest.param("lookahead", 0, marks=pytest.mark.slow),
        ("prefetch-all", 1),
        ("pre-gated", 1),
        pytest.param("auto", 2, marks=pytest.mark.slow),
    ],
)
def test_experts_are_read_ahead_in_some_modes(
    mode: str, level: int, tmp_path: Path, steps: list[int]
) -> None:
    late = Settings(inject=delays(seed=2, longest=1e-3, only="ssd read"))
    prompts = small(PROMPTS[: 1 if mode in ("prefetch-all", "auto") else 2])
    with on_disk(tmp_path, prompts, late, mode=mode, level=level, host_slots=24) as made:
        before = made.model.overspill.recorder.counters()["ssd read"]
        made.step()
        made.step()
        assert made.model.overspill.recorder.counters()["ssd read"] > before
        made.model.overspill.flush()  # what nobody has waited for
    assert steps == [len(prompts)] * 2


def test_reads_ahead_begin_before_those_of_the_current_layer_have_ended(tmp_path: Path) -> None:
    with on_disk(tmp_path, mode="pre-gated", level=1, host_slots=14) as made:
        use_all_experts(made)
        recorder = made.model.overspill.recorder
        recorder.start()
        made.step()
        made.model.overspill.flush()  # of the one that reads
        spans = [span for span in recorder.spans() if span.row == "ssd read"]
    own = [span for span in spans if span.name.endswith("experts")]
    ahead = [span for span in spans if span.name.startswith("ahead")]
    assert any(one.start_ns < each.start_ns < one.end_ns for one in own for each in ahead)


@pytest.mark.slow
def test_experts_on_disk_may_have_copies_on_the_device(tmp_path: Path, steps: list[int]) -> None:
    with on_disk(tmp_path, host_slots=26, slots=6) as made:
        for _ in range(3):
            made.two_steps()
        assert sum(made.runner.stats()["expert_hit_rate"]) > 0
    assert steps == [1] * 6


def test_only_experts_that_a_step_needs_are_read(tmp_path: Path) -> None:
    with on_disk(tmp_path) as made:
        engine = made.model.overspill
        made.step()
        before = engine.recorder.counters()["ssd read"]
        on_cpu = made.runner.stats()["experts_on_cpu"]
        made.step()
        needed = made.runner.stats()["experts_on_cpu"] - on_cpu
        read = engine.recorder.counters()["ssd read"] - before
        assert read <= needed * engine.layout.weight_bytes


def test_modules_compute_if_a_step_does_not_fit_into_host_memory(
    tmp_path: Path, steps: list[int]
) -> None:
    with on_disk(tmp_path, host_slots=8) as made:
        made.step()
        made.step()
    assert not steps


def test_modules_compute_when_experts_that_left_the_device_have_taken_host_slots(
    tmp_path: Path, steps: list[int]
) -> None:
    """A step of four requests may need eight experts, besides two host slots for others."""
    with on_disk(tmp_path, host_slots=14, slots=6, trained=True) as made:
        engine = made.model.overspill
        engine.set_residents([11] * 3)
        assert engine.memory.cache_slots >= 10
        step(made)
        assert steps == [1]
        engine.set_residents([0] * 3)
        assert engine.memory.cache_slots < 10
        step(made)
        assert steps == [1]
        engine.set_residents([11] * 3)
        step(made)
        assert steps == [1, 1]


def test_the_thread_that_a_step_waits_for_collects_no_garbage(tmp_path: Path) -> None:
    """What ends there may wait for the device, and so for the step."""
    outermost: set[str] = set()

    def note(phase: str, info: dict[str, int]) -> None:
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
        outermost.add(frame.f_code.co_name)

    with on_disk(tmp_path) as made:
        use_all_experts(made)
        limits = gc.get_threshold()
        gc.callbacks.append(note)
        gc.set_threshold(6)
        try:
            step(made)
        finally:
            gc.set_threshold(*limits)
            gc.callbacks.remove(note)
    assert outermost
    assert not outermost & {"_fetch", "note"}, "native threads call the first, or nothing yet"
    assert gc.isenabled()


def test_weights_that_are_loaded_between_steps_are_written_to_disk(tmp_path: Path) -> None:
    """First all, so that no host slot is free; then others of the last layer: keys and values of
    earlier tokens do not depend on them."""
    with on_disk(tmp_path) as made:
        use_all_experts(made)
        made.model.load_state_dict(made.plain.state_dict())
        step(made)
        changed = {
            name: -1.5 * value
            for name, value in made.plain.state_dict().items()
            if "blocks.2.moe.w" in name
        }
        assert changed
        for model in (made.plain, made.model):
            model.load_state_dict(changed, strict=False)
        step(made)


def step(made: Decoding) -> None:
    batch = made._scheduler.next_batch()
    with torch.inference_mode():
        logits = made.runner.run(batch)
    made.runner.check()
    made.check(logits)
    made._append(batch, logits)


def use_all_experts(made: Decoding) -> None:
    """All have been in host memory, and few are."""
    with torch.no_grad():
        made.model(torch.arange(48)[None])


def test_a_read_that_fails_is_an_error_of_its_step_only(tmp_path: Path) -> None:
    fail = FailingJob("ssd read")
    with on_disk(tmp_path, settings=Settings(inject=fail)) as made:
        for _ in range(2):
            use_all_experts(made)
            fail.on = True
            with pytest.raises(DiskError, match="injected"):
                step(made)
            fail.on = False
            step(made)


def test_a_prompt_reads_what_could_not_be_read_ahead(tmp_path: Path) -> None:
    """It waits for an expert that is being read for a step, which fails then."""
    late: list[str] = []

    def fail(kind: str) -> None:
        if kind in late:
            late.remove(kind)
            time.sleep(0.2)
            raise OSError(errno.EIO, "injected")

    with on_disk(tmp_path, settings=Settings(inject=fail), host_slots=10) as made:
        engine = made.model.overspill
        use_all_experts(made)  # those of the last layer are in host memory
        engine.flush()
        late.append("ssd read")
        reads = engine.addresses.new_disk_reads()
        reads.learn()
        ((_, offset),) = reads.expect(0, [11])
        assert offset >= 0, "it is to be read"
        threading.Thread(target=reads.end_ahead, args=(0, 11, 0)).start()
        with torch.no_grad():
            found = made.model(torch.arange(48)[None]).logits
            torch.testing.assert_close(found, made.plain(torch.arange(48)[None]).logits)
        assert not late


@pytest.mark.parametrize("kind", ["upload", "ssd read"])
def test_a_pass_that_has_failed_fails_no_later_step(kind: str, tmp_path: Path) -> None:
    fail = FailingJob(kind)
    with on_disk(tmp_path, settings=Settings(inject=fail)) as made:
        fail.on = True
        with pytest.raises(OverspillError, match="injected"):
            use_all_experts(made)
        fail.on = False
        step(made)


def test_a_file_that_was_cut_is_a_disk_error(tmp_path: Path) -> None:
    with on_disk(tmp_path) as made:
        use_all_experts(made)
        cut_weights(tmp_path)
        for _ in range(2):
            with pytest.raises(DiskError, match=r"expert .*weights.* truncated .* load the model"):
                step(made)

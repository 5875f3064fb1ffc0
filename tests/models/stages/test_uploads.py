"""Numbers of uploads of experts, and tensors that wait in host memory."""

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import overspill
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from tests.models.huggingface.families import EXPERTS, HIDDEN, make_model
from tests.models.huggingface.oracle import ADAM
from tests.models.stages.staged import BLOCKS, MIXTRAL, Batch, micro_batches
from tests.slow import slow_rows

TOTAL = BLOCKS * EXPERTS
COUNT = 3


@pytest.fixture(scope="module")
def mixtral() -> Any:
    return make_model(MIXTRAL)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns the warnings of Overspill so far."""

    def found() -> list[str]:
        own = [each for each in caplog.records if each.name == "overspill"]
        return [each.getMessage() for each in own if each.levelno >= logging.WARNING]

    return found


@contextmanager
def with_slots(model: Any, slots: int) -> Iterator[Any]:
    twin = overspill.offload(
        copy.deepcopy(model), mode="host", slots=slots, device="cpu", quiet=True, progress=False
    )
    try:
        yield twin
    finally:
        twin.overspill.close()


def uploads_of_step(
    model: Any, stages: overspill.Stages | None, clip: float | None, batches: list[Batch]
) -> Counter[str]:
    """Return how often each expert is uploaded in a step after other steps."""
    optimizer, recorder = overspill.AdamW(model, max_grad_norm=clip, **ADAM), None
    for _ in range(2):
        if recorder is not None:
            recorder.start()
        if stages is not None:
            stages.backward(batches, optimizer)
        else:
            for batch in batches[:-1]:
                with optimizer.accumulate():
                    model(**batch).loss.backward()
            model(**batches[-1]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.overspill.flush()
        recorder = model.overspill.recorder
        recorder.stop()
        spans = [span for span in recorder.spans() if span.row == "upload"]
        recorder.clear()
    return Counter(" ".join(span.name.split()[:2]) for span in spans)


@pytest.mark.parametrize(
    ("n_stages", "slots"),
    # room for one stage, for two, and for one and a part of the next
    slow_rows([(4, 4), (4, 8), (2, 11)], 1),
)
def test_an_expert_is_uploaded_at_most_once_per_stage_pass(
    mixtral: Any, n_stages: int, slots: int, warnings: Callable[[], list[str]]
) -> None:
    batches = micro_batches(COUNT)
    with with_slots(mixtral, slots) as twin:
        counts = uploads_of_step(twin, overspill.Stages(twin, n_stages), 1.0, batches)
    assert sum(counts.values()) >= TOTAL  # the slots hold a part of them only
    assert max(counts.values()) <= 2, "once in forward and once in backward"
    assert not warnings()


def test_without_a_number_of_slots_two_stages_fit(warnings: Callable[[], list[str]]) -> None:
    """Of six layers each, while without stages there are slots for three layers."""
    config = GPTConfig(
        vocab=48, n_layers=12, d_model=16, d_hidden=24, n_heads=2, n_experts=2, top_k=1
    )
    found = []
    for n_stages in (None, 2, 6):
        model: Any = GPTMoE(config)
        given = {"mode": "host", "gpu_memory": "1GiB", "stages": n_stages}
        overspill.offload(model, device="cpu", quiet=True, progress=False, **given)  # type: ignore[arg-type]
        found.append(model.overspill.placement.slots)
        if n_stages is not None:
            tokens = torch.randint(48, (2, 9))
            batches = [{"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}] * 2
            overspill.Stages(model).backward(batches, overspill.AdamW(model, **ADAM))
        model.overspill.close()
    assert found == [3 * 2, 12 * 2, 2 * 2 * 2]
    assert not warnings()


def test_a_stage_that_does_not_fit_is_told_once(
    mixtral: Any, warnings: Callable[[], list[str]]
) -> None:
    with with_slots(mixtral, 7) as twin:
        stages = overspill.Stages(twin, 2)
        assert max(uploads_of_step(twin, stages, 1.0, micro_batches(1)).values()) <= 2
        assert not warnings(), "a single micro-batch needs each expert once"
        assert max(uploads_of_step(twin, stages, 1.0, micro_batches(COUNT)).values()) > 2
    (warning,) = warnings()
    assert "the experts of 2 of 2 stages do not fit in the slots on " in warning
    assert "; give more stages, or more slots or --gpu-memory" in warning


def test_more_stages_than_blocks_are_not_advised(
    mixtral: Any, warnings: Callable[[], list[str]]
) -> None:
    with with_slots(mixtral, 3) as twin:
        stages = overspill.Stages(twin, len(twin.model.layers))
        uploads_of_step(twin, stages, 1.0, micro_batches(COUNT))
    (warning,) = warnings()
    assert "; give more slots or --gpu-memory" in warning


@pytest.mark.slow
def test_stages_upload_less_than_micro_batches_one_after_another(mixtral: Any) -> None:
    """Also where experts are updated during backward, which changes what is on the device."""
    batches = micro_batches(COUNT)
    with with_slots(mixtral, 4) as twin:
        plain = uploads_of_step(twin, None, None, batches).total()
        staged = uploads_of_step(twin, overspill.Stages(twin, 4), None, batches).total()
    assert staged < 0.6 * plain


def test_experts_that_live_on_the_device_always_fit(
    mixtral: Any, warnings: Callable[[], list[str]]
) -> None:
    twin = overspill.offload(copy.deepcopy(mixtral), mode="gpu", device="cpu", quiet=True)
    overspill.Stages(twin, 1).backward(micro_batches(2), overspill.AdamW(twin, **ADAM))
    assert not warnings()
    twin.overspill.close()


@pytest.mark.parametrize("n_stages", [pytest.param(1, marks=pytest.mark.slow), 2, 4])
def test_one_activation_of_each_block_waits_in_host_memory(mixtral: Any, n_stages: int) -> None:
    """With gradient checkpointing: its input. The last stage's backward follows at once."""
    batches = micro_batches(COUNT)
    hidden = sum(batch["input_ids"].numel() for batch in batches) * HIDDEN * 4
    with with_slots(mixtral, TOTAL) as twin:
        twin.gradient_checkpointing_enable({"use_reentrant": False})
        stages = overspill.Stages(twin, n_stages, offload_activations=True, small_activation=0)
        twin.overspill.recorder.start()
        stages.backward(batches, overspill.AdamW(twin, **ADAM))
        copied: Counter[str] = Counter()
        for span in twin.overspill.recorder.spans():
            if span.row == "host copies":
                copied[span.name] += span.bytes
    borders = n_stages - 1
    assert copied["save"] == (BLOCKS - len(stages.blocks[-1])) * hidden
    assert copied["pass on"] == copied["pass back"] == borders * hidden
    assert copied["restore"] == copied["save"] + copied["pass on"] + copied["pass back"]


def test_small_activations_stay_on_the_device(mixtral: Any) -> None:
    batch = micro_batches(1)
    with with_slots(mixtral, TOTAL) as twin:
        stages = overspill.Stages(twin, 2, offload_activations=True)
        twin.overspill.recorder.start()
        stages.backward(batch, overspill.AdamW(twin, **ADAM))
        names = {s.name for s in twin.overspill.recorder.spans() if s.row == "host copies"}
    assert "save" not in names

"""A placement stays within its budgets, or an error names the flag and the fix."""

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from overspill.core.errors import BudgetError, ConfigError
from overspill.core.expert_map import ExpertMap
from overspill.core.sizes import parse_size
from overspill.plan.budget import PROCESS, BudgetRequest, ModelSizes, Placement, place
from overspill.plan.residents import spread_residents
from overspill.tiers.places import ExpertPlaces
from overspill.tiers.worker_sync import WorkerSync

MIB, GIB = 2**20, 2**30


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelSizes, BudgetRequest]:
    """Models of all sizes, and budgets around what they need."""
    weights = 4096 * draw(st.integers(1, 20_000))
    model = ModelSizes(
        n_layers=draw(st.integers(1, 40)),
        n_experts=draw(st.integers(1, 64)),
        weight_record=weights,
        state_record=weights * draw(st.integers(2, 5)),
        dense=draw(st.integers(1, 8 * GIB)),
        dense_states=draw(st.integers(0, 8 * GIB)),
        token_bytes=draw(st.integers(64, 200_000)),
        training=draw(st.booleans()),
        dense_buffers=draw(st.integers(1, 2 * GIB)),
        frozen=draw(st.booleans()),
    )
    if not model.trains_experts and draw(st.booleans()):  # packed in several ways
        less = [4096 * draw(st.integers(0, weights // 4096 - 1)) for _ in range(model.n_layers)]
        model = replace(model, smaller=tuple(less))
    share = st.floats(0.01, 1.5)
    all_records = model.experts * model.record
    request = BudgetRequest(
        gpu_memory=draw(st.sampled_from([model.dense + model.dense_states, model.dense_buffers]))
        + int(draw(share) * all_records)
        + 6 * weights
        + 256 * model.token_bytes,
        host_memory=PROCESS
        + draw(st.sampled_from([model.dense, 0]))
        + model.dense_states
        + int(draw(share) * 1.3 * all_records),
        disk_free=draw(st.none() | st.integers(0, 3 * all_records)),
        mode=draw(st.sampled_from(["auto", "gpu", "host", "disk"])),
        slots=draw(st.none() | st.integers(2, 300)),
        host_slots=draw(st.none() | st.integers(2, 300)),
        keep_gradients=draw(st.sampled_from([None, True, False])),
        residency=draw(st.booleans()),
        dense_states=draw(st.sampled_from(["auto", "gpu", "host"])),
        dense_weights=draw(st.sampled_from(["auto", "gpu", "host"])),
        can_map=True,
    )
    return model, request


def placed(model: ModelSizes, request: BudgetRequest) -> Placement:
    assume((request.dense_states, request.dense_weights) != ("gpu", "host"))  # is refused
    try:
        return place(model, request)
    except BudgetError:
        assume(False)
        raise


@given(cases())
def test_every_expert_is_placed_and_slots_are_enough(
    case: tuple[ModelSizes, BudgetRequest],
) -> None:
    model, request = case
    placement = placed(model, request)
    if request.mode != "auto":
        assert placement.mode == request.mode
    if placement.mode == "gpu":
        assert placement.residents == model.experts
        return
    assert placement.residents + placement.permanent_slots + placement.disk_slots == model.experts
    assert placement.residents == 0 or placement.fills
    assert placement.cache_slots >= min(2, placement.disk_slots)
    assert placement.slots <= max(2, model.experts)
    assert placement.slots >= min(2, model.experts), "one computes while another is uploaded"
    assert (placement.ring > 0) == model.trains_experts == placement.trains_experts
    assert placement.max_rows >= 1


@given(cases())
def test_a_placement_stays_within_its_budgets(case: tuple[ModelSizes, BudgetRequest]) -> None:
    model, request = case
    request = replace(request, slots=None, host_slots=None)  # these override the budgets
    placement = placed(model, request)
    # None: a placement with a disk reserves memory for kept gradients
    kept = request.keep_gradients or (request.keep_gradients is None and placement.mode == "disk")
    slot_bytes = model.record + (model.weight_record if model.trains_experts and kept else 0)
    assert placement.dense_states in (0, model.dense_states)
    dense = model.dense + model.dense_states - placement.dense_states
    if placement.dense_weights:
        assert (placement.dense_weights, placement.dense_states) == (
            model.dense,
            model.dense_states,
        )
        dense = model.dense_buffers
    residents = spread_residents(placement.residents, model.n_layers, model.n_experts)
    streamed = [model.n_experts - count for count in residents]
    permanent = [0] * model.n_layers
    if placement.mode == "gpu":
        assert dense + bytes_of(model, residents, slot_bytes) <= request.gpu_memory
        slots = ring = 0
    else:
        permanent = places_of(residents, model.n_experts, placement.permanent_slots)
        resident = bytes_of(model, residents, slot_bytes)
        on_gpu = dense + resident + placement.slots * model.weight_record
        assert on_gpu <= request.gpu_memory
        slots = placement.permanent_slots + placement.cache_slots
        ring = placement.ring * model.weight_record
    if slots or placement.dense_states or placement.dense_weights:
        own = bytes_of(model, permanent, slot_bytes)
        used = own + placement.cache_slots * slot_bytes + ring + placement.reserved
        assert used <= request.host_memory
    if placement.disk_slots:
        assert request.disk_free is not None
        spilled = [count - kept for count, kept in zip(streamed, permanent, strict=True)]
        assert sum(spilled) == placement.disk_slots
        own = bytes_of(model, spilled, slot_bytes)
        assert own + placement.spare_records * slot_bytes <= request.disk_free


def bytes_of(model: ModelSizes, counts: list[int], each: int) -> int:
    smaller = model.smaller or [0] * model.n_layers
    return sum(n * (each - less) for n, less in zip(counts, smaller, strict=True))


def places_of(residents: list[int], n_experts: int, permanent: int) -> list[int]:
    """The experts of each layer that the store keeps in host memory."""
    args = len(residents), ExpertMap.whole(n_experts), permanent, 1, residents, 0
    places = ExpertPlaces(WorkerSync(60.0), *args)
    found = [0] * len(residents)
    for entry in places.entries:
        found[entry.id.layer] += entry.host_slot is not None
    return found


@given(cases())
def test_auto_spills_no_further_than_it_must(case: tuple[ModelSizes, BudgetRequest]) -> None:
    model, request = case
    request = replace(request, mode="auto", slots=None, host_slots=None, keep_gradients=None)
    placement = placed(model, request)
    layer = model.n_experts * model.weight_record if model.trains_experts else 0
    dense = model.dense + model.dense_states - placement.dense_states
    if placement.dense_weights:
        dense = model.dense_buffers
    # a quarter of the device remains for activations
    experts = bytes_of(model, [model.n_experts] * model.n_layers, model.record)
    fits = dense + experts + layer <= 0.75 * request.gpu_memory
    assert (placement.mode == "gpu") == fits
    if placement.mode == "disk":
        # with a disk, memory for gradients that may be kept counts too
        with pytest.raises(BudgetError):
            place(model, replace(request, mode="host", keep_gradients=True))
        if request.residency:  # the GPU has no room for those that are on disk
            held = model.dense_buffers if placement.dense_weights else model.dense
            free = 0.75 * request.gpu_memory - held - placement.residents * model.record
            assert free < (placement.disk_slots + placement.slots + 2) * 2 * model.record


MOE_L_24 = ModelSizes(24, 24, 36 * MIB, 180 * MIB, GIB, 3 * GIB, 60_000, training=True)


@pytest.mark.parametrize("disk", [None, 200 * GIB])
def test_experts_that_host_memory_does_not_hold_start_on_the_gpu(disk: int | None) -> None:
    request = BudgetRequest(40 * GIB, 110 * GIB, disk, keep_gradients=False, residency=True)
    placement = place(MOE_L_24, request)
    assert (placement.mode, placement.disk_slots) == ("host", 0)
    assert 60 < placement.residents < 120


def test_those_that_neither_holds_are_on_disk_with_room_for_the_others() -> None:
    request = BudgetRequest(24 * GIB, 60 * GIB, 200 * GIB, keep_gradients=False, residency=True)
    placement = place(MOE_L_24, request)
    assert placement.mode == "disk"
    assert placement.residents > 30
    assert placement.spare_records == placement.residents


def test_slots_hold_the_stage_that_computes_and_the_next_one() -> None:
    """At least three layers, and at most a quarter of the budget."""
    request = BudgetRequest(40 * GIB, 200 * GIB, mode="host")
    slots = [place(replace(MOE_L_24, stage_layers=n), request).slots for n in (0, 1, 3, 4)]
    assert slots == [3 * 24, 3 * 24, 6 * 24, 8 * 24]
    most = place(replace(MOE_L_24, stage_layers=12), request).slots
    assert 8 * 24 < most <= 40 * GIB // 4 // (36 * MIB)


@pytest.mark.parametrize("given", [{"mode": "host"}, {"slots": 8}, {"gpu_experts": 0}])
def test_experts_stay_where_the_user_wants_them(given: dict[str, object]) -> None:
    request = BudgetRequest(40 * GIB, 200 * GIB, residency=True)
    assert place(MOE_L_24, request).fills
    assert not place(MOE_L_24, replace(request, **given)).fills  # type: ignore[arg-type]


def test_spare_host_memory_gives_more_gradient_buffers() -> None:
    enough = place(MOE_L_24, BudgetRequest(40 * GIB, 200 * GIB, keep_gradients=False))
    little = place(MOE_L_24, BudgetRequest(40 * GIB, 126 * GIB - 128 * MIB, keep_gradients=False))
    assert enough.ring == 2 * little.ring == MOE_L_24.experts // 3


def error_of(model: ModelSizes, request: BudgetRequest) -> str | None:
    try:
        place(model, request)
    except BudgetError as error:
        return str(error)
    return None


@given(cases(), st.integers(1, 2 * GIB), st.integers(1, 2 * GIB))
def test_the_suggested_size_is_enough(
    case: tuple[ModelSizes, BudgetRequest], gpu_memory: int, host_memory: int
) -> None:
    """An error names a flag and a size; given that size, it is not raised again."""
    model, request = case
    assume(model.experts > 1)
    assume((request.dense_states, request.dense_weights) != ("gpu", "host"))
    request = replace(request, slots=None, host_slots=None, disk_free=10**18, mode="disk")
    request = replace(request, gpu_memory=gpu_memory, host_memory=host_memory)
    fields = {"--gpu-memory": "gpu_memory", "--host-memory": "host_memory"}
    while (message := error_of(model, request)) is not None:
        match = re.search(r"(--[a-z-]+) .* give at least ([0-9.]+ [A-Za-z]+)", message)
        assert match, message
        assert match[1] in fields, f"the fix did not help: {message}"
        request = replace(request, **{fields.pop(match[1]): parse_size(match[2])})


@given(cases(), st.integers(1, 2 * GIB))
def test_host_mode_reports_what_it_needs(
    case: tuple[ModelSizes, BudgetRequest], host_memory: int
) -> None:
    model, request = case
    assume((request.dense_states, request.dense_weights) != ("gpu", "host"))
    request = replace(request, mode="host", slots=None, host_slots=None, host_memory=host_memory)
    message = error_of(model, request)
    assume(message is not None and "--gpu-memory" not in message)
    assert message is not None
    match = re.search(r"--host-memory .* need ([0-9.]+ [A-Za-z]+); .*--disk", message)
    assert match, message
    assert error_of(model, replace(request, host_memory=parse_size(match[1]))) is None


SMALL = ModelSizes(4, 8, 4 * MIB, 8 * MIB, 30 * MIB, 70 * MIB, token_bytes=1000, training=True)
AMPLE = BudgetRequest(gpu_memory=GIB, host_memory=8 * GIB, disk_free=100 * GIB)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (replace(AMPLE, gpu_memory=50 * MIB), r"--gpu-memory 50\.0 MiB .*dense.*100\.0 MiB"),
        (replace(AMPLE, gpu_memory=110 * MIB), r"--gpu-memory .*two experts.*24\.2 MiB"),
        (replace(AMPLE, slots=1), r"slots=1 .*give 2"),
        (replace(AMPLE, mode="gpu", gpu_memory=200 * MIB), r"--gpu-memory .*mode='auto' to spill"),
        (replace(AMPLE, mode="host", host_memory=GIB), r"--host-memory 1\.0 GiB .*--disk"),
        (replace(AMPLE, mode="disk", disk_free=None), r"--disk FOLDER"),
        (replace(AMPLE, mode="disk", host_memory=GIB), r"--host-memory .*give at least"),
        (replace(AMPLE, mode="disk", host_slots=1), r"^host_slots=1 .*give at least 2$"),
        (replace(AMPLE, mode="disk", host_slots=4, disk_free=GIB // 8), r"free.*--host-memory"),
    ],
)
def test_a_budget_that_is_too_small_names_flag_and_fix(asked: BudgetRequest, message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        place(SMALL, asked)


def test_without_training_a_budget_is_not_for_gradients() -> None:
    asked = replace(AMPLE, gpu_memory=110 * MIB)
    for served in (replace(SMALL, training=False), replace(SMALL, frozen=True)):
        with pytest.raises(BudgetError, match=r"and experts and activations 24\.2 MiB"):
            place(served, asked)


def test_an_unknown_mode_lists_the_modes() -> None:
    with pytest.raises(ConfigError, match="mode='ssd' must be one of 'auto', 'gpu', 'host'"):
        place(SMALL, replace(AMPLE, mode="ssd"))


def test_the_mode_follows_from_the_memory() -> None:
    assert place(SMALL, AMPLE).mode == "gpu"
    assert place(SMALL, replace(AMPLE, gpu_memory=300 * MIB)).mode == "host"
    tight = replace(AMPLE, gpu_memory=300 * MIB, host_memory=GIB + 300 * MIB)
    assert place(SMALL, tight).mode == "disk"
    with pytest.raises(BudgetError, match="--disk"):
        place(SMALL, replace(tight, disk_free=None))


def test_given_slots_imply_spilling() -> None:
    assert place(SMALL, replace(AMPLE, slots=5)).mode == "host"
    assert place(SMALL, replace(AMPLE, slots=5)).slots == 5
    placement = place(SMALL, replace(AMPLE, host_slots=6))
    assert placement.mode == "disk"
    assert placement.permanent_slots + placement.cache_slots == 6


def test_only_in_training_some_experts_of_a_model_on_disk_stay_in_host_memory() -> None:
    asked = replace(AMPLE, host_slots=6)
    trained = place(replace(SMALL, training=True), asked)
    assert trained.permanent_slots == trained.cache_slots == 3
    served = place(replace(SMALL, training=False), asked)
    assert (served.permanent_slots, served.cache_slots) == (0, 6)


def test_a_single_expert_can_be_spilled() -> None:
    one = replace(SMALL, n_layers=1, n_experts=1)
    assert place(one, replace(AMPLE, mode="host", slots=2)).slots == 1


EIGHT_A_LAYER = ModelSizes(4, 8, 1 << 20, 6 << 20, 4 << 20, 6 << 20, 1 << 10, training=True)
ROOMY = BudgetRequest(gpu_memory=1 << 30, host_memory=PROCESS + (1 << 30))


@pytest.mark.parametrize("residents", [-1, 33, 2.5])
def test_an_impossible_number_of_experts_on_the_gpu_is_refused(residents: int) -> None:
    with pytest.raises(ConfigError, match=f"gpu_experts={residents} must be .* from 0 to 32"):
        place(EIGHT_A_LAYER, replace(ROOMY, gpu_experts=residents))
    with pytest.raises(ConfigError, match=r"mode='gpu' keeps all 32 experts .*; give one of them"):
        place(EIGHT_A_LAYER, replace(ROOMY, mode="gpu", gpu_experts=3))


def test_experts_on_the_gpu_need_memory_there_and_none_elsewhere() -> None:
    assert place(EIGHT_A_LAYER, ROOMY).mode == "gpu"
    placement = place(EIGHT_A_LAYER, replace(ROOMY, gpu_experts=24))
    assert (placement.mode, placement.residents, placement.permanent_slots) == ("host", 24, 8)
    with pytest.raises(BudgetError, match=r"gpu_experts=24 168\.0 MiB"):
        place(EIGHT_A_LAYER, replace(ROOMY, gpu_memory=100 << 20, gpu_experts=24))
    # without residents, the others would be on disk
    small = replace(ROOMY, host_memory=PROCESS + (96 << 20), disk_free=1 << 40, gpu_experts=24)
    assert place(EIGHT_A_LAYER, small).mode == "host"
    assert place(EIGHT_A_LAYER, replace(small, gpu_experts=0)).mode == "disk"


def test_no_error_names_experts_on_the_gpu_that_were_not_asked_for() -> None:
    """Experts that host memory does not hold start on the GPU, if streaming has room there."""
    model = ModelSizes(4, 8, 64 * MIB, 40 * MIB, 101 * MIB, 0, token_bytes=MIB, training=True)
    asked = BudgetRequest(790 * MIB, PROCESS + 1800 * MIB, residency=True, keep_gradients=False)
    message = error_of(model, asked)
    assert message is not None
    assert "gpu_experts" not in message
    assert "--host-memory 2.8 GiB does not hold the experts, which need" in message
    asked = replace(asked, gpu_memory=1000 * MIB)
    message = error_of(model, asked)
    assert message is not None
    assert re.search(
        r"does not hold the 30 experts beyond --gpu-memory 1000\.0 MiB, which need .*; give a "
        r"--disk folder, or more host or GPU memory$",
        message,
    ), message
    with_disk = place(model, replace(asked, gpu_memory=790 * MIB, disk_free=100 * GIB))
    assert (with_disk.mode, with_disk.residents) == ("disk", 0)


MAPPED = replace(AMPLE, can_map=True, host_memory=2 * GIB)


def test_dense_optimizer_states_leave_the_gpu_if_its_budget_is_small() -> None:
    """Above a third of the budget."""
    assert place(SMALL, replace(MAPPED, gpu_memory=301 * MIB)).dense_states == 0
    placement = place(SMALL, replace(MAPPED, gpu_memory=299 * MIB))
    assert (placement.mode, placement.dense_states) == ("host", 70 * MIB)
    assert place(SMALL, replace(MAPPED, gpu_memory=80 * MIB)).dense_states == 70 * MIB
    assert place(SMALL, replace(MAPPED, dense_states="host")).dense_states == 70 * MIB
    kept = replace(MAPPED, gpu_memory=200 * MIB, dense_states="gpu")
    assert place(SMALL, kept).dense_states == 0


def test_if_all_experts_live_on_the_gpu_so_do_dense_optimizer_states() -> None:
    tiny = replace(SMALL, n_layers=1, n_experts=2)  # the dense part is most of it
    placement = place(tiny, replace(MAPPED, gpu_memory=200 * MIB))
    assert (placement.mode, placement.dense_states) == ("gpu", 0)


def test_no_expert_goes_to_disk_so_that_dense_optimizer_states_can_leave_the_gpu() -> None:
    full = replace(MAPPED, gpu_memory=200 * MIB, keep_gradients=False, disk_free=None)
    full = replace(full, host_memory=PROCESS + (32 * 12 + 5 * 4 + 69) * MIB)  # experts and buffers
    assert place(SMALL, full).dense_states == 0
    assert place(SMALL, replace(full, disk_free=GIB)).dense_states == 0
    more = replace(full, host_memory=full.host_memory + MIB)
    assert place(SMALL, more).dense_states == 70 * MIB
    # where they do not fit on the GPU
    placement = place(SMALL, replace(full, gpu_memory=80 * MIB, disk_free=GIB))
    assert (placement.mode, placement.dense_states) == ("disk", 70 * MIB)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            replace(MAPPED, gpu_memory=50 * MIB, dense_weights="gpu"),
            r"30\.0 MiB \(beside 70\.0 MiB of optimizer states in host memory\) .* 67\.9 MiB$",
        ),
        (
            replace(MAPPED, gpu_memory=50 * MIB, can_map=False),
            r"100\.0 MiB \(its optimizer .* on the first GPU only\) .* give at least 155\.4 MiB$",
        ),
        (
            replace(MAPPED, gpu_memory=50 * MIB, dense_states="gpu"),
            r"needs 100\.0 MiB and .* give at least 155\.4 MiB$",
        ),
        (
            replace(MAPPED, gpu_memory=80 * MIB, host_memory=GIB, disk_free=None),
            r"does not hold the experts and dense optimizer states, which need 1\.5 GiB;",
        ),
        (
            replace(MAPPED, mode="gpu", dense_states="host", host_memory=GIB),
            r"--host-memory 1\.0 GiB does not hold the dense optimizer .* at least 1\.1 GiB$",
        ),
    ],
)
def test_dense_optimizer_states_are_part_of_what_an_error_asks_for(
    asked: BudgetRequest, message: str
) -> None:
    with pytest.raises(BudgetError, match=message):
        place(SMALL, asked)


def test_dense_optimizer_states_that_cannot_be_on_the_host_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"first GPU only.*CUDA_VISIBLE_DEVICES"):
        place(SMALL, replace(AMPLE, dense_states="host"))
    with pytest.raises(ConfigError, match="dense_states='disk' must be one of 'auto', 'gpu'"):
        place(SMALL, replace(AMPLE, dense_states="disk"))


# dense: weights and gradients 30 MiB, optimizer states 70 MiB, buffers 8 MiB
STREAMED = replace(SMALL, dense_buffers=8 * MIB)


def test_dense_weights_leave_the_gpu_only_if_its_budget_does_not_hold_them() -> None:
    least = replace(MAPPED, gpu_memory=30 * MIB + 24 * MIB + 256_000)  # and two experts
    assert place(STREAMED, least).dense_weights == 0
    placement = place(STREAMED, replace(least, gpu_memory=least.gpu_memory - 1))
    assert (placement.dense_weights, placement.dense_states) == (30 * MIB, 70 * MIB)
    assert placement.reserved == PROCESS + 100 * MIB
    placement = place(STREAMED, replace(MAPPED, dense_weights="host"))
    assert (placement.dense_weights, placement.dense_states) == (30 * MIB, 70 * MIB)
    frozen = replace(STREAMED, training=False, dense_states=0)
    placement = place(frozen, replace(MAPPED, gpu_memory=40 * MIB))
    assert (placement.dense_weights, placement.dense_states) == (30 * MIB, 0)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            replace(MAPPED, gpu_memory=30 * MIB),
            r"8\.0 MiB \(beside 100\.0 MiB of weights and optimizer states in host memory\) and .*"
            r"at least 40\.4 MiB$",
        ),
        (replace(MAPPED, gpu_memory=50 * MIB, dense_weights="gpu"), r"needs 30\.0 MiB"),
        (replace(MAPPED, gpu_memory=50 * MIB, dense_states="gpu"), r"needs 100\.0 MiB and"),
        (
            replace(MAPPED, dense_weights="host", mode="host", host_memory=GIB),
            r"the experts and dense weights and optimizer states, which need 1\.5 GiB; .*--disk",
        ),
        (
            replace(MAPPED, dense_weights="host", mode="gpu", host_memory=GIB),
            r"--host-memory .* hold the dense weights and optimizer states; .* at least 1\.1 GiB$",
        ),
    ],
)
def test_dense_weights_are_part_of_what_an_error_asks_for(
    asked: BudgetRequest, message: str
) -> None:
    with pytest.raises(BudgetError, match=message):
        place(STREAMED, asked)


def test_dense_weights_that_cannot_be_on_the_host_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"dense_weights='host' is .* first GPU only"):
        place(STREAMED, replace(AMPLE, dense_weights="host"))
    with pytest.raises(ConfigError, match="dense_weights='disk' must be one of 'auto', 'gpu'"):
        place(STREAMED, replace(AMPLE, dense_weights="disk"))
    with pytest.raises(ConfigError, match=r"needs the optimizer states there.*dense_states='gpu'"):
        place(STREAMED, replace(MAPPED, dense_weights="host", dense_states="gpu"))


def test_frozen_experts_need_their_weights_alone() -> None:
    """Qwen3-30B-A3B in bf16: 54 GiB of experts, 331 GiB with an fp32 master and fp32 moments."""
    weights = 3 * 2048 * 768 * 2
    model = ModelSizes(48, 128, weights, 5 * weights, GIB, 0, 10_000, training=True)
    request = BudgetRequest(gpu_memory=24 * GIB, host_memory=55 * GIB, mode="host")
    with pytest.raises(BudgetError, match=r"does not hold the experts, which need 33\d\.\d+ GiB"):
        place(model, request)
    frozen = place(replace(model, frozen=True), request)
    assert (frozen.permanent_slots, frozen.ring, frozen.training) == (48 * 128, 0, True)
    with pytest.raises(BudgetError, match=r"which need 55\.0+ GiB"):
        place(replace(model, frozen=True), replace(request, host_memory=54 * GIB))


def test_packed_experts_of_several_sizes_need_their_own_bytes() -> None:
    model = ModelSizes(
        32, 64, 6 * MIB, 0, GIB, 0, 10_000, training=False, smaller=(2 * MIB, 0) * 16
    )  # 10 GiB, in records of one size 12 GiB
    on_gpu = BudgetRequest(gpu_memory=15 * GIB, host_memory=4 * GIB)
    assert place(model, on_gpu).mode == "gpu"
    in_host = BudgetRequest(gpu_memory=4 * GIB, host_memory=11 * GIB)
    assert place(model, in_host).permanent_slots == model.experts
    with pytest.raises(BudgetError, match=r"does not hold the experts, which need 11\.0+ GiB"):
        place(model, replace(in_host, host_memory=11 * GIB - 4096))
    # slots that experts on disk share have the largest size
    on_disk = replace(in_host, host_memory=7 * GIB, disk_free=10 * GIB)
    placement = place(model, on_disk)
    assert (placement.permanent_slots, placement.cache_slots) == (0, 1024)
    with pytest.raises(BudgetError, match=r"2048 spilled experts need 10\.0+ GiB"):
        place(model, replace(on_disk, disk_free=10 * GIB - 4096))
    trained = place(replace(model, training=True, frozen=True), on_disk)
    assert trained.cache_slots == 128
    assert trained.permanent_slots > 1024 - 128

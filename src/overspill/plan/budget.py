"""Turns memory budgets into a placement: what goes to the compute device, host memory and disk."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from overspill.core.errors import BudgetError, ConfigError
from overspill.core.options import check_options
from overspill.core.sizes import format_size
from overspill.plan.limits import HostSlots, PlanOptions
from overspill.plan.residents import spread_among, spread_residents

PROCESS = 1 << 30
"""Host memory reserved for the process itself: the interpreter, libraries, data."""
_MIN_WAVE_ROWS = 256
"""Token rows of a wave below which kernel launches dominate."""
_DENSE_SHARE = 1 / 3
"""Share of the GPU budget above which the dense part has its optimizer states in host memory:
activations, whose size is known only when a batch runs, need memory too."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model in bytes, by the parts that are placed separately."""

    n_layers: int
    n_experts: int
    weight_record: int  # of the largest, if their sizes differ by layer
    state_record: int
    dense: int  # weights and gradients of everything that is not an expert
    dense_states: int  # its optimizer states
    token_bytes: int  # activations of one token row inside an expert, forward and backward
    training: bool
    dense_buffers: int = 0  # GPU memory for the dense part if its weights are in host memory
    dense_on_host: str = "dense optimizer states"  # what `dense_states` are
    frozen: bool = False  # no expert is trained
    stage_layers: int = 0  # MoE layers of the largest pipeline stage; 0: the model has no stages
    # by how much the weight records of each layer are smaller than the largest; empty: by nothing
    smaller: tuple[int, ...] = ()

    def bytes_of(self, counts: Sequence[int], each: int) -> int:
        """Bytes of so many experts of each layer, of which one with the largest record needs
        `each`."""
        saved = zip(counts, self.smaller, strict=True) if self.smaller else ()
        return sum(counts) * each - sum(count * less for count, less in saved)

    def residents(self, count: int) -> list[int]:
        """The number of experts of each layer, if `count` of all are resident."""
        return spread_residents(count, self.n_layers, self.n_experts)

    def streamed(self, residents: int) -> list[int]:
        """The number of experts of each layer that are not resident, if `residents` of all are."""
        return [self.n_experts - count for count in self.residents(residents)]

    @property
    def experts(self) -> int:
        return self.n_layers * self.n_experts

    @property
    def trains_experts(self) -> bool:
        """Whether experts have gradients and optimizer states."""
        return self.training and not self.frozen

    @property
    def record(self) -> int:
        return self.weight_record + (self.state_record if self.trains_experts else 0)


@dataclass(frozen=True)
class BudgetRequest(PlanOptions, HostSlots):
    """The budgets in bytes, and the options that override them where they are not None."""

    gpu_memory: int
    host_memory: int
    disk_free: int | None = None  # None: no disk folder was given
    # whether experts may move to the GPU until the budget is used, unless something is overridden
    residency: bool = False
    can_map: bool = False  # kernels of the device can use pinned host memory
    gpu_text: str | None = None  # the budgets as the user has written them, for error messages
    host_text: str | None = None

    @property
    def gpu_words(self) -> str:
        return self.gpu_text or format_size(self.gpu_memory)

    @property
    def host_words(self) -> str:
        return self.host_text or format_size(self.host_memory)


@dataclass(frozen=True)
class Placement:
    """The place of everything. `residents` experts live on the compute device; the others pass
    through its `slots`, which are not allocated if there are none."""

    mode: str
    residents: int
    slots: int
    permanent_slots: int  # host slots that hold the same expert for the whole run
    cache_slots: int  # host slots shared by the experts on disk
    disk_slots: int  # experts on disk
    ring: int  # gradient buffers
    max_rows: int  # token rows of a wave
    host_memory: int  # the budget for all host memory
    training: bool = True  # passes have a backward
    trains_experts: bool = True  # memory for gradients and optimizer states of experts is planned
    fills: bool = False  # experts move to the compute device until its budget is used
    spare_records: int = 0  # further disk slots, for experts that leave the compute device
    # host memory for the optimizer states of the dense part; 0: they are on the compute device
    dense_states: int = 0
    dense_weights: int = 0  # the same for its weights and gradients
    gpu_memory: int = 0  # the budget for the compute device

    @property
    def reserved(self) -> int:
        """Host memory that is not for experts."""
        return PROCESS + self.dense_states + self.dense_weights


def place(model: ModelSizes, request: BudgetRequest) -> Placement:
    """The placement for `request`. If none fits, raises BudgetError with flag, need and fix."""
    _check(request)
    residents = _residents(model, request)
    if request.dense_weights == "host" or (
        _may_move_weights(request) and _free(model, request, residents) < _floor(model)
    ):
        return _place_without_dense(model, request, residents)
    if request.dense_states == "host":
        return _place(model, request, residents)
    states_on_gpu = replace(model, dense=model.dense + model.dense_states, dense_states=0)
    if request.dense_states == "gpu" or request.mode == "gpu" or not request.can_map:
        return _place(states_on_gpu, request, residents)
    if _free(states_on_gpu, request, residents) < _floor(model):
        return _place(model, request, residents)
    on_gpu = _place(states_on_gpu, request, residents)
    if on_gpu.mode == "gpu" or states_on_gpu.dense <= _DENSE_SHARE * request.gpu_memory:
        return on_gpu
    try:
        on_host = _place(model, request, residents)
    except BudgetError:
        return on_gpu
    return on_host if on_host.mode == on_gpu.mode else on_gpu  # no expert goes to disk for it


def _may_move_weights(request: BudgetRequest) -> bool:
    free_to = request.dense_weights == "auto" and request.dense_states != "gpu"
    return free_to and request.mode != "gpu" and request.can_map


def _place_without_dense(model: ModelSizes, request: BudgetRequest, residents: int) -> Placement:
    """Weights, gradients and optimizer states of the dense part are in host memory."""
    streamed = replace(
        model,
        dense=model.dense_buffers,
        dense_states=model.dense + model.dense_states,
        dense_on_host="dense weights" + (" and optimizer states" if model.dense_states else ""),
    )
    placement = _place(streamed, request, residents)
    return replace(placement, dense_states=model.dense_states, dense_weights=model.dense)


def _check(request: BudgetRequest) -> None:
    check_options(request, PlanOptions)
    given = {"dense_states": request.dense_states, "dense_weights": request.dense_weights}
    for name, where in given.items():
        if where == "host" and not request.can_map:
            raise ConfigError(
                f"{name}='host' is supported on the first GPU only; make this GPU the first one "
                f"with CUDA_VISIBLE_DEVICES, or use {name}='gpu'"
            )
    if tuple(given.values()) == ("gpu", "host"):
        raise ConfigError(
            "dense_weights='host' needs the optimizer states there too; leave out "
            "dense_states='gpu', or use dense_weights='gpu'"
        )


def _floor(model: ModelSizes) -> int:
    """Two experts, their gradients, the same amount in transfer to the host, and some tokens."""
    return 6 * model.weight_record + _MIN_WAVE_ROWS * model.token_bytes


def _free(model: ModelSizes, request: BudgetRequest, residents: int) -> int:
    """GPU memory beside the dense part and `residents` experts."""
    each = _slot_bytes(model, request.keep_gradients is True)
    resident = model.bytes_of(model.residents(residents), each)
    return request.gpu_memory - model.dense - resident


def _too_small(model: ModelSizes, request: BudgetRequest, residents: int) -> BudgetError:
    need = request.gpu_memory - _free(model, request, residents) + _floor(model)
    dense = f"the dense part of this model needs {format_size(model.dense)}"
    if model.dense_states:
        what = model.dense_on_host.removeprefix("dense ")
        dense += f" (beside {format_size(model.dense_states)} of {what} in host memory)"
    elif request.dense_states == "auto" and request.mode != "gpu" and not request.can_map:
        dense += " (its optimizer states can be in host memory on the first GPU only)"
    if residents:
        each = _slot_bytes(model, request.keep_gradients is True)
        resident = model.bytes_of(model.residents(residents), each)
        dense += f", gpu_experts={residents} {format_size(resident)}"
    what = "two experts with their gradients" if model.trains_experts else "experts and activations"
    return BudgetError(
        f"--gpu-memory {request.gpu_words} is too small: {dense} and {what} "
        f"{format_size(_floor(model))}; give at least {format_size(need * 1.25, up=True)}"
    )


def _place(model: ModelSizes, request: BudgetRequest, residents: int) -> Placement:
    """All of `model.dense` is on the GPU, `model.dense_states` in host memory."""
    mode = request.mode if request.mode != "auto" else _choose_mode(model, request, residents)
    fills = _may_fill(request) and mode != "gpu"
    if fills:
        residents = _residents_beyond_host(model, request)
        mode = _choose_mode(model, request, residents)
    free = _free(model, request, residents)
    if free < _floor(model):
        raise _too_small(model, request, residents)
    max_rows = max(_MIN_WAVE_ROWS, free // 8 // model.token_bytes)
    if mode == "gpu":
        _check_gpu(model, request)
        residents = model.experts
    count, host_memory = model.experts - residents, request.host_memory  # experts that are streamed
    slots = _slots(model, request, free)
    ring = _least_ring(model, count)
    on_host = Placement(
        "host", residents, slots, count, 0, 0, ring, max_rows, host_memory, model.training,
        model.trains_experts, fills, dense_states=model.dense_states,
        gpu_memory=request.gpu_memory,
    )  # fmt: skip
    if count == 0:
        if model.dense_states and on_host.reserved > host_memory:
            raise BudgetError(
                f"--host-memory {request.host_words} does not hold the "
                f"{model.dense_on_host}; give at least {format_size(on_host.reserved, up=True)}"
            )
        return replace(on_host, mode="gpu")
    if mode == "disk":
        return _on_disk(model, request, on_host, count)
    slot_bytes = _slot_bytes(model, request.keep_gradients is True)
    in_host = _most_in_host(model, _free_host(model, request, ring), slot_bytes, residents)
    if request.host_slots is None and in_host < count:
        experts = model.bytes_of(model.streamed(residents), slot_bytes)
        need = experts + ring * model.weight_record + on_host.reserved
        what, more = "the experts", "host memory"
        if fills and residents:
            what = f"the {count} experts beyond --gpu-memory {request.gpu_words}"
            more = "host or GPU memory"
        what += f" and {model.dense_on_host}" if model.dense_states else ""
        raise BudgetError(
            f"--host-memory {request.host_words} does not hold {what}, which "
            f"need {format_size(need, up=True)}; give a --disk folder, or more {more}"
        )
    return replace(on_host, ring=_ring(model, request, count))


def _least_ring(model: ModelSizes, count: int) -> int:
    """Gradient buffers that updates of `count` streamed experts need at least."""
    return min(model.experts, max(4, count // 6)) if model.trains_experts else 0


def _ring(model: ModelSizes, request: BudgetRequest, count: int) -> int:
    """Gradient buffers: with up to a third of the gradients waiting in them, the update threads
    have work until the next backward begins, and a backward does not wait for them."""
    least = _least_ring(model, count)
    # memory that is not needed for anything else, kept gradients included
    kept = count * _slot_bytes(model, request.keep_gradients is not False)
    free = request.host_memory - PROCESS - model.dense_states - kept
    spare = free // model.weight_record
    return max(least, min(2 * least, spare))


def _may_fill(request: BudgetRequest) -> bool:
    given = request.slots, request.host_slots, request.gpu_experts
    return request.residency and request.mode == "auto" and all(n is None for n in given)


def _residents_beyond_host(model: ModelSizes, request: BudgetRequest) -> int:
    """Experts that start on the GPU because host memory does not hold them: as many as are missing
    there, if a quarter of the GPU's budget remains for activations, and what streaming needs."""
    slot_bytes = _planned_slot_bytes(model, request)
    missing = 0
    while missing < model.experts:  # with fewer streamed experts the ring is smaller
        ring = _least_ring(model, model.experts - missing)
        free = _free_host(model, request, ring)
        short = model.experts - missing - _most_in_host(model, free, slot_bytes, missing)
        if short <= 0:
            break
        missing += short
    slots = _slots(model, request, request.gpu_memory - model.dense) * model.weight_record
    kept = max(request.gpu_memory // 4 + slots, _floor(model))
    free = request.gpu_memory - model.dense - kept
    return _most_fitting(model, free, slot_bytes, missing, model.residents)


def _residents(model: ModelSizes, request: BudgetRequest) -> int:
    """Experts that are asked to live on the GPU, if not all of them do by the mode."""
    residents = request.gpu_experts
    if residents is None:
        return 0
    if not isinstance(residents, int) or not 0 <= residents <= model.experts:
        raise ConfigError(
            f"gpu_experts={residents} must be a number of experts from 0 to {model.experts}"
        )
    if request.mode == "gpu" and residents < model.experts:
        raise ConfigError(
            f"mode='gpu' keeps all {model.experts} experts on the GPU, gpu_experts={residents} "
            "does not; give one of them"
        )
    return 0 if request.mode == "gpu" else residents


def _slot_bytes(model: ModelSizes, keep: bool) -> int:
    """Bytes of one expert in host memory or on disk, with its gradient if that may be kept."""
    return model.record + (model.weight_record if keep and model.trains_experts else 0)


def _planned_slot_bytes(model: ModelSizes, request: BudgetRequest) -> int:
    """If a disk is given, memory for gradients is reserved unless they are known not to be kept."""
    has_disk, keep = request.disk_free is not None, request.keep_gradients
    return _slot_bytes(model, has_disk if keep is None else keep)


def _gpu_need(model: ModelSizes, request: BudgetRequest) -> int:
    layer_gradients = model.n_experts * model.weight_record if model.trains_experts else 0
    expert_bytes = _slot_bytes(model, request.keep_gradients is True)
    experts = model.bytes_of([model.n_experts] * model.n_layers, expert_bytes)
    return model.dense + experts + layer_gradients


def _check_gpu(model: ModelSizes, request: BudgetRequest) -> None:
    need = _gpu_need(model, request)
    if need > request.gpu_memory:
        raise BudgetError(
            f"mode='gpu' needs {format_size(need)}, --gpu-memory is "
            f"{request.gpu_words}; use mode='auto' to spill"
        )


def _choose_mode(model: ModelSizes, request: BudgetRequest, residents: int) -> str:
    if request.host_slots is None:
        # a quarter of the budget remains for activations
        overridden = request.slots is not None or request.gpu_experts is not None
        if not overridden and _gpu_need(model, request) <= 0.75 * request.gpu_memory:
            return "gpu"
        ring = _least_ring(model, model.experts - residents)
        free, slot_bytes = _free_host(model, request, ring), _planned_slot_bytes(model, request)
        if _most_in_host(model, free, slot_bytes, residents) == model.experts - residents:
            return "host"
    return "host" if request.disk_free is None else "disk"


def _slots(model: ModelSizes, request: BudgetRequest, free: int) -> int:
    if request.slots is not None:
        if request.slots < 2:
            raise BudgetError(
                f"slots={request.slots} (--slots) is too few: one expert computes while another "
                "loads; give 2"
            )
        return min(request.slots, model.experts)
    # the link cannot use more than three layers ahead, or with stages more than the stage that
    # computes and the next one; the rest of the budget is for activations
    layers = max(3, 2 * model.stage_layers)
    fitting = int(0.25 * free) // model.weight_record
    return max(2, min(fitting, layers * model.n_experts, model.experts))


def _free_host(model: ModelSizes, request: BudgetRequest, ring: int) -> int:
    """Host memory for experts."""
    free = request.host_memory - PROCESS - model.dense_states - ring * model.weight_record
    return max(0, free)


def _most_in_host(model: ModelSizes, free: int, each: int, residents: int) -> int:
    """The most experts, beside `residents`, that can always stay in `free` bytes of host memory."""
    streamed = model.streamed(residents)
    return _most_fitting(model, free, each, sum(streamed), lambda n: spread_among(n, streamed))


def _most_fitting(
    model: ModelSizes, free: int, each: int, most: int, spread: Callable[[int], list[int]]
) -> int:
    """The most experts, up to `most`, that fit into `free` bytes. `spread` divides a number of
    them among the layers."""
    numbers = range(1, most + 1)
    return bisect_right(numbers, free, key=lambda n: model.bytes_of(spread(n), each))


def _on_disk(
    model: ModelSizes, request: BudgetRequest, on_host: Placement, count: int
) -> Placement:
    """`count` experts are streamed."""
    if request.disk_free is None:
        raise BudgetError("mode='disk' needs a folder; give --disk FOLDER on a fast local SSD")
    slot_bytes = _slot_bytes(model, request.keep_gradients is not False)
    residents = on_host.residents
    free, slots = _free_host(model, request, on_host.ring), request.host_slots
    if slots is None:
        slots = _most_in_host(model, free, slot_bytes, residents)
        if slots < count:  # slots that experts share have the size of the largest
            slots = free // slot_bytes
    slots = min(slots, count)
    if slots < min(2, count):
        if request.host_slots is not None:
            raise BudgetError(
                f"host_slots={request.host_slots} (--host-slots) is too few for experts on disk; "
                "give at least 2"
            )
        least = on_host.reserved + on_host.ring * model.weight_record + 4 * slot_bytes
        states = f" and {model.dense_on_host}" if model.dense_states else ""
        raise BudgetError(
            f"--host-memory {request.host_words} holds fewer than two experts of "
            f"{format_size(slot_bytes)} beside the process{states}; give at least "
            f"{format_size(least, up=True)}"
        )
    # A training step uses all experts in turn: a cache of two layers is enough, and experts in all
    # other host slots are never read. Tokens that are generated use some experts more than others.
    cache = slots
    if model.training:
        cache = min(slots, max(2, 2 * model.n_experts), max(2, slots // 2))
    if slots == count:
        cache = 0
    permanent = slots - cache
    if permanent and request.host_slots is None:
        permanent = _most_in_host(model, free - cache * slot_bytes, slot_bytes, residents)
        cache = min(cache, count - permanent)
    spilled, streamed = count - permanent, model.streamed(residents)
    in_host = model.bytes_of(spread_among(permanent, streamed), slot_bytes)
    need = model.bytes_of(streamed, slot_bytes) - in_host
    if need > request.disk_free:
        raise BudgetError(
            f"the disk has {format_size(request.disk_free)} free, {spilled} spilled experts need "
            f"{format_size(need)}; free some space or raise --host-memory"
        )
    spare_records = on_host.residents if on_host.fills else 0
    if need + spare_records * slot_bytes > request.disk_free:
        spare_records = 0
    return replace(
        on_host,
        mode="disk",
        permanent_slots=permanent,
        cache_slots=cache,
        disk_slots=spilled,
        spare_records=spare_records,
    )

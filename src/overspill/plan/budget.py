"""From budgets to a placement: what fits on the compute device, in host memory, on disk."""

from dataclasses import dataclass

from overspill.core.errors import BudgetError, ConfigError
from overspill.core.sizes import format_size

MODES = ("auto", "gpu", "host", "disk")
PROCESS = 1 << 30
"""Host memory left to the process itself: the interpreter, libraries, data."""
_FEWEST_ROWS = 256
"""Rows of a wave below which kernels are mostly launches."""


@dataclass(frozen=True)
class ModelSizes:
    """The bytes of a model, by what can be placed apart."""

    n_layers: int
    n_experts: int
    weight_record: int
    state_record: int
    dense: int  # weights, gradients and optimizer states of everything that is not an expert
    token_bytes: int  # activations of one token row inside an expert, forward and backward
    training: bool
    trained: bool = True  # the experts are trained, not frozen

    @property
    def experts(self) -> int:
        return self.n_layers * self.n_experts

    @property
    def record(self) -> int:
        return self.weight_record + (self.state_record if self.training else 0)


@dataclass(frozen=True)
class Wish:
    """What the user asked for; None means: what the machine has."""

    gpu_memory: int
    host_memory: int
    disk_free: int | None = None  # None: no disk folder was given
    mode: str = "auto"
    slots: int | None = None
    host_slots: int | None = None
    resident_share: float = 0.25
    # whether gradients will have to wait, for clipping or accumulation; None: not known yet
    keep_gradients: bool | None = None


@dataclass(frozen=True)
class Placement:
    """Where everything goes. GPU `slots` = `banked` streaming slots + `resident` slots."""

    mode: str
    slots: int
    resident: int
    home_slots: int
    cache_slots: int
    disk_slots: int
    ring: int  # gradient buffers
    max_rows: int  # rows of a wave
    host_memory: int  # the budget all of this keeps within
    training: bool = True  # memory for optimizer states is planned

    @property
    def banked(self) -> int:
        return self.slots - self.resident


def place(model: ModelSizes, wish: Wish) -> Placement:
    """The placement for `wish`; BudgetError naming flag, need and fix if none fits."""
    if wish.mode not in MODES:
        raise ConfigError(f"mode={wish.mode!r} is not one of {', '.join(MODES)}")
    free = wish.gpu_memory - model.dense
    # two experts, their gradients, as much again on its way to the host, and some tokens
    floor = 6 * model.weight_record + _FEWEST_ROWS * model.token_bytes
    if free < floor:
        raise BudgetError(
            f"--gpu-memory {format_size(wish.gpu_memory)} is too small: the dense part of this "
            f"model needs {format_size(model.dense)} and two experts with their gradients "
            f"{format_size(floor)}; give at least "
            f"{format_size((model.dense + floor) * 1.25, up=True)}"
        )
    max_rows = max(_FEWEST_ROWS, free // 8 // model.token_bytes)
    mode = wish.mode if wish.mode != "auto" else _choose_mode(model, wish)
    if mode == "gpu":
        return _on_gpu(model, wish, max_rows)
    slots = _slots(model, wish, free)
    # residents are chosen after training steps: without these the slots would stay empty
    share = wish.resident_share if model.training and model.trained else 0.0
    resident = max(0, min(int(slots * share), slots - 2))
    ring = min(model.experts, max(4, model.experts // 6)) if model.training else 0
    if mode == "host":
        row = _row(model, wish.keep_gradients is True)
        if wish.host_slots is None and _host_slots(model, wish, ring, row) < model.experts:
            need = model.experts * row + ring * model.weight_record + PROCESS
            raise BudgetError(
                f"--host-memory {format_size(wish.host_memory)} does not hold the experts, which "
                f"need {format_size(need, up=True)}; give a --disk folder, or more host memory"
            )
        return Placement(
            "host",
            slots,
            resident,
            model.experts,
            0,
            0,
            ring,
            max_rows,
            wish.host_memory,
            model.training,
        )
    return _on_disk(model, wish, slots, resident, ring, max_rows)


def _row(model: ModelSizes, keep: bool) -> int:
    """Bytes of one expert in host memory or on disk, with its gradient if that may have to wait."""
    return model.record + (model.weight_record if keep and model.training else 0)


def _gpu_need(model: ModelSizes, wish: Wish) -> int:
    layer_gradients = model.n_experts * model.weight_record if model.training else 0
    return model.dense + model.experts * _row(model, wish.keep_gradients is True) + layer_gradients


def _choose_mode(model: ModelSizes, wish: Wish) -> str:
    # a quarter of the budget stays for activations
    if (
        wish.slots is None
        and wish.host_slots is None
        and _gpu_need(model, wish) <= 0.75 * wish.gpu_memory
    ):
        return "gpu"
    ring = max(4, model.experts // 6) if model.training else 0
    # where a disk is given, gradients that may have to wait count before they are known to
    keep = wish.disk_free is not None if wish.keep_gradients is None else wish.keep_gradients
    if (
        wish.host_slots is None
        and _host_slots(model, wish, ring, _row(model, keep)) >= model.experts
    ):
        return "host"
    if wish.disk_free is not None:
        return "disk"
    return "host"


def _on_gpu(model: ModelSizes, wish: Wish, max_rows: int) -> Placement:
    need = _gpu_need(model, wish)
    if need > wish.gpu_memory:
        raise BudgetError(
            f"mode='gpu' needs {format_size(need)}, --gpu-memory is "
            f"{format_size(wish.gpu_memory)}; use mode='auto' to spill"
        )
    return Placement(
        "gpu",
        model.experts,
        model.experts,
        0,
        0,
        0,
        0,
        max_rows,
        wish.host_memory,
        model.training,
    )


def _slots(model: ModelSizes, wish: Wish, free: int) -> int:
    if wish.slots is not None:
        if wish.slots < 2:
            raise BudgetError(
                f"slots={wish.slots} is too few: one expert computes while another loads; give 2"
            )
        return min(wish.slots, model.experts)
    # four layers ahead is more than the link can use; the rest of the budget is for activations
    fitting = int(0.25 * free) // model.weight_record
    return max(2, min(fitting, 4 * model.n_experts, model.experts))


def _host_slots(model: ModelSizes, wish: Wish, ring: int, row: int) -> int:
    free = wish.host_memory - PROCESS - ring * model.weight_record
    return max(0, free) // row


def _on_disk(
    model: ModelSizes, wish: Wish, slots: int, resident: int, ring: int, max_rows: int
) -> Placement:
    if wish.disk_free is None:
        raise BudgetError("mode='disk' needs a folder; give --disk FOLDER on a fast local SSD")
    row = _row(model, wish.keep_gradients is not False)  # room for gradients unless none will wait
    rows = wish.host_slots
    if rows is None:
        rows = _host_slots(model, wish, ring, row)
    rows = min(rows, model.experts)
    if rows < min(2, model.experts):
        raise BudgetError(
            f"--host-memory {format_size(wish.host_memory)} holds fewer than two experts of "
            f"{format_size(row)} beside the process; give at least "
            f"{format_size(PROCESS + ring * model.weight_record + 4 * row, up=True)}"
        )
    # two layers pass through the cache; the rest lives in host memory for good
    cache = min(rows, max(2, 2 * model.n_experts), max(2, rows // 2))
    home = 0 if rows < model.experts and rows <= cache else min(rows - cache, model.experts)
    if rows >= model.experts:
        home, cache = model.experts, 0
    spilled = model.experts - home
    need = spilled * row
    if need > wish.disk_free:
        raise BudgetError(
            f"the disk has {format_size(wish.disk_free)} free, {spilled} spilled experts need "
            f"{format_size(need)}; free some space or raise --host-memory"
        )
    return Placement(
        "disk",
        slots,
        resident,
        home,
        cache,
        spilled,
        ring,
        max_rows,
        wish.host_memory,
        model.training,
    )

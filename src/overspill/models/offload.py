"""`overspill.offload`: hands the experts of a model to an engine, in place."""

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from overspill.core.errors import BudgetError, ConfigError
from overspill.core.expert_map import ExpertMap
from overspill.core.experts import ExpertId, ExpertShape
from overspill.core.sizes import format_size, parse_size
from overspill.hardware.machine import available_memory, disk_free
from overspill.models.progress_bar import TerminalProgress
from overspill.models.share import share_costs
from overspill.moe.engine import Engine
from overspill.moe.layer import MoE
from overspill.moe.placeholder import ExpertPlaceholder
from overspill.moe.resident.engine import ResidentEngine
from overspill.moe.settings import Settings
from overspill.moe.streaming.engine import StreamingEngine
from overspill.plan.budget import ModelSizes, Placement, Wish, place
from overspill.tiers.layout import RecordLayout
from overspill.tiers.slab import Progress
from overspill.tiers.ssd import check_folder
from overspill.trace.recorder import Recorder

_log = logging.getLogger("overspill")
Size = str | int | None
_HOST_SHARE = 0.95
"""Of the free host memory, what is taken when no budget is given: the system keeps some."""


class ExpertLayer(Protocol):
    """A Mixture-of-Experts layer whose experts can be given away."""

    shape: ExpertShape
    n_experts: int

    @property
    def experts(self) -> ExpertPlaceholder:
        """Once they are."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def engine(self) -> Engine | None: ...

    def expert_parameters(self) -> Sequence[nn.Parameter]:
        """Those that will be released."""

    def fill(self, index: int, record: Tensor, device: torch.device) -> None:
        """Puts the weights of an expert into its flat record; what must be drawn at random is
        drawn on `device`."""

    def give_away(self, engine: Engine, layer: int) -> None:
        """Releases the parameters; a placeholder stays."""


@dataclass(frozen=True)
class Budgets:
    """What `offload` was asked for, as it was asked."""

    gpu_memory: Size = None
    host_memory: Size = None
    disk: str | Path | None = None
    device: str | torch.device | None = None
    mode: str = "auto"
    slots: int | None = None
    host_slots: int | None = None
    settings: Settings = field(default_factory=Settings)
    state_dtype: torch.dtype = torch.float32
    keep_gradients: bool | None = None

    @property
    def folder(self) -> Path | None:
        return None if self.disk is None else Path(self.disk)

    def wish(self, device: torch.device) -> Wish:
        wish = _wish(device, self.gpu_memory, self.host_memory, self.folder)
        return replace(
            wish,
            mode=self.mode,
            slots=self.slots,
            host_slots=self.host_slots,
            resident_share=self.settings.resident_share,
            keep_gradients=self.keep_gradients,
        )


def offload(
    model: nn.Module,
    gpu_memory: Size = None,
    host_memory: Size = None,
    disk: str | Path | None = None,
    device: str | torch.device | None = None,
    mode: str = "auto",
    slots: int | None = None,
    host_slots: int | None = None,
    *,
    settings: Settings | None = None,
    state_dtype: torch.dtype = torch.float32,
    keep_gradients: bool | None = None,
    progress: bool | Progress = True,
    quiet: bool = False,
) -> nn.Module:
    """Moves the model to the compute device and its experts to where the budgets allow.

    `model` is a `GPTMoE` or a Mixture-of-Experts model of Hugging Face transformers. `gpu_memory`,
    `host_memory` and the folder `disk` are budgets for all that the process keeps there; left out,
    they are what the machine has free (95% of the host memory, no disk). `mode`, `slots` (experts
    on the compute device) and `host_slots` (experts in host memory in front of the disk) override
    what the budgets would give.
    `state_dtype` is that of the moments; `keep_gradients` says whether room is planned for
    gradients that wait (for clipping or accumulation; left out: if there is room). The model is
    changed in place and returned; `model.overspill` is its engine. In training mode memory for
    optimizer states is planned; call `model.eval()` first to offload for inference.
    """
    budgets = Budgets(
        gpu_memory,
        host_memory,
        disk,
        device,
        mode,
        slots,
        host_slots,
        settings or Settings(),
        state_dtype,
        keep_gradients,
    )
    if hasattr(model, "set_experts_implementation"):  # without importing transformers
        from overspill.models.huggingface.adapt import adapt, find_experts

        found = find_experts(model)
        hand_over(model, found, budgets, progress, quiet)
        adapt(model, found)
        return model
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not layers:
        raise ConfigError("the model has no Mixture-of-Experts layer that Overspill knows")
    return hand_over(model, layers, budgets, progress, quiet)


class Filler(Protocol):
    """Fills all records at once, from somewhere else than the model."""

    def __call__(self, engine: Engine, progress: Progress | None) -> None: ...


def hand_over(
    model: nn.Module,
    layers: Sequence[ExpertLayer],
    budgets: Budgets,
    progress: bool | Progress = True,
    quiet: bool = False,
    filler: Filler | None = None,
) -> nn.Module:
    """Gives the experts of `layers` to a new engine, `model.overspill`, and moves the rest to the
    compute device. Without `filler` the layers' own weights are taken, layer by layer."""
    if layers[0].engine is not None:
        raise ConfigError("the model is offloaded already; offload it once")
    where = compute_device(budgets.device)
    layout = RecordLayout(layers[0].shape, layers[0].dtype, budgets.state_dtype)
    wish = budgets.wish(where)
    sizes = _sizes(model, layers, layout)
    placement = place(sizes, wish)
    show = _shown(progress)
    try:
        engine = _engine(layers, layout, where, placement, budgets, show)
        try:
            if filler is not None:
                filler(engine, show)
            else:
                _fill(engine, layers, show)
            for number, layer in enumerate(layers):
                layer.give_away(engine, number)
            model.to(where)
        except BaseException:
            engine.close()
            raise
    finally:
        if isinstance(show, TerminalProgress):
            show.stop()
    if where.type == "cuda":
        torch.cuda.empty_cache()
        # the budget is hard: the allocator refuses to go past it
        total = torch.cuda.get_device_properties(where).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, wish.gpu_memory / total), where)
    _close_with(engine, layers)
    model.overspill = engine  # type: ignore[assignment]
    if not quiet:
        print(engine.describe(), file=sys.stderr)
    return model


def compute_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, with its number; left out, the GPU if there is one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device={str(device)!r}: there is no CUDA GPU here; use device='cpu'"
            )
        index = torch.cuda.current_device() if found.index is None else found.index
        found = torch.device("cuda", index)
    return found


def _sizes(model: nn.Module, layers: Sequence[ExpertLayer], layout: RecordLayout) -> ModelSizes:
    experts = {id(p) for layer in layers for p in layer.expert_parameters()}
    training = model.training
    dense = 0
    for parameter in model.parameters():
        if id(parameter) not in experts:
            # weight and gradient, both moments, and the low bits of a bf16 master
            low = 2 if parameter.dtype == torch.bfloat16 else 0
            moments = 2 * layout.state_dtype.itemsize
            each = 2 * parameter.itemsize + moments + low if training else parameter.itemsize
            dense += parameter.numel() * each
    shape = layout.shape
    row = (2 * shape.in_rows + 2 * shape.d_hidden + 3 * shape.d_model) * layout.dtype.itemsize
    return ModelSizes(
        len(layers),
        layers[0].n_experts,
        layout.weight_bytes,
        layout.state_bytes,
        dense,
        row,
        training,
        trained=any(p.requires_grad for layer in layers for p in layer.expert_parameters()),
    )


def _wish(
    device: torch.device,
    gpu_memory: Size,
    host_memory: Size,
    disk: Path | None,
) -> Wish:
    """The budgets, from the arguments or from what the machine has."""
    available = available_memory()
    if host_memory is None:
        host = int(available * _HOST_SHARE)
    else:
        host = parse_size(host_memory, "--host-memory")
    if host > available:
        raise BudgetError(
            f"--host-memory {format_size(host)} is not there: this machine has "
            f"{format_size(available)} available; lower it or give a --disk folder"
        )
    if gpu_memory is not None:
        gpu = parse_size(gpu_memory, "--gpu-memory")
    elif device.type == "cuda":
        # what this process holds already will be part of the budget too
        gpu = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    else:
        gpu = available // 2  # the CPU computes: half of the memory stands for the device's
    if device.type == "cuda" and gpu > torch.cuda.get_device_properties(device).total_memory:
        total = torch.cuda.get_device_properties(device).total_memory
        raise BudgetError(
            f"--gpu-memory {format_size(gpu)} is not there: the GPU has {format_size(total)}"
        )
    if disk is not None:
        check_folder(disk, need=0)  # also where everything fits without it
    free = None if disk is None else disk_free(disk)
    return Wish(gpu, host, free)


def _engine(
    layers: Sequence[ExpertLayer],
    layout: RecordLayout,
    device: torch.device,
    placement: Placement,
    budgets: Budgets,
    progress: Progress | None,
) -> Engine:
    common = (
        len(layers),
        ExpertMap.whole(layers[0].n_experts),
        layout,
        device,
        placement,
        budgets.settings,
        Recorder(device=device),
    )
    if placement.mode == "gpu":
        _log.info("all experts compute on %s: they fit there", device)
        return ResidentEngine(*common)
    costs = share_costs(layout, device, budgets.settings, progress)
    return StreamingEngine(*common, disk=budgets.folder, progress=progress, costs=costs)


def _fill(engine: Engine, layers: Sequence[ExpertLayer], progress: Progress | None) -> None:
    """Puts every expert's own weights into its record and releases them layer by layer."""
    tell = counted(engine, progress)

    def fill(expert: ExpertId, record: Tensor) -> None:
        layers[expert.layer].fill(expert.index, record, engine.device)
        tell()
        if expert.index == engine.n_experts - 1:
            for parameter in layers[expert.layer].expert_parameters():
                parameter.data = parameter.data.new_empty(0)

    engine.records.fill(fill)


def counted(engine: Engine, progress: Progress | None) -> Callable[[], None]:
    """What to call after each expert that was filled."""
    done, lock = 0, threading.Lock()

    def tell() -> None:
        nonlocal done
        with lock:
            done += engine.layout.weight_bytes
            if progress is not None:
                progress("filling the store", done, engine.records.weights_bytes)

    return tell


class _Keeper:
    """Held by the placeholders of all layers: when it goes, nobody can use the experts any more."""


def _close_with(engine: Engine, layers: Sequence[ExpertLayer]) -> None:
    """Ends the engine's threads when the model and its optimizer are gone, or at exit."""
    keeper = _Keeper()
    for layer in layers:
        layer.experts.keeper = keeper
    weakref.finalize(keeper, _close, engine)


def _close(engine: Engine) -> None:
    """The collector may run in one of the engine's own threads, which holds what `close` waits
    for."""
    if threading.current_thread().name.startswith("overspill-"):
        threading.Thread(target=engine.close, name="close", daemon=True).start()
    else:
        engine.close()


def _shown(progress: bool | Progress) -> Progress | None:
    """A progress bar on a terminal, the caller's own function, or nothing."""
    if not isinstance(progress, bool):
        return progress
    return TerminalProgress() if progress and sys.stderr.isatty() else None

"""`overspill.offload`: hands the experts of a model to an engine, in place."""

import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from overspill.core.errors import BudgetError, ConfigError
from overspill.core.experts import ExpertId
from overspill.core.sizes import format_size, parse_size
from overspill.hardware.machine import available_memory, disk_free
from overspill.models.progress_bar import TerminalProgress
from overspill.moe.engine import Engine, Settings
from overspill.moe.layer import MoE
from overspill.moe.resident import ResidentEngine
from overspill.moe.streaming import StreamingEngine
from overspill.plan.budget import ModelSizes, Placement, Wish, place
from overspill.tiers.layout import RecordLayout
from overspill.tiers.slab import Progress
from overspill.tiers.ssd import check_folder
from overspill.trace.recorder import Recorder

Size = str | int | None


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

    `gpu_memory`, `host_memory` and the folder `disk` are budgets for all that the process keeps
    there; left out, they are what the machine has (no disk). `mode`, `slots` (experts on the
    compute device) and `host_slots` (experts in host memory in front of the disk) override what
    the budgets would give. `state_dtype` is that of the moments; `keep_gradients` says whether
    room is planned for gradients that wait (for clipping or accumulation; left out: if there is
    room). The model is changed in place and returned; `model.overspill` is its engine. In training
    mode memory for optimizer states is planned; call `model.eval()` first to offload for inference.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not layers:
        raise ConfigError("the model has no Mixture-of-Experts layer that Overspill knows")
    if layers[0].engine is not None:
        raise ConfigError("the model is offloaded already; offload it once")
    settings = settings or Settings()
    where = _device(device)
    layout = RecordLayout(layers[0].shape, layers[0].dtype, state_dtype)
    sizes = _sizes(model, layers, layout)
    folder = None if disk is None else Path(disk)
    wish = _wish(where, gpu_memory, host_memory, folder)
    wish = replace(
        wish,
        mode=mode,
        slots=slots,
        host_slots=host_slots,
        pin_share=settings.pin_share,
        keep_gradients=keep_gradients,
    )
    placement = place(sizes, wish)
    show = _shown(progress)
    try:
        engine = _engine(layers, layout, where, placement, settings, folder, show)
        try:
            _fill(engine, layers, show)
        except BaseException:
            engine.close()
            raise
    finally:
        if isinstance(show, TerminalProgress):
            show.stop()
    model.to(where)
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


def _device(device: str | torch.device | None) -> torch.device:
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


def _sizes(model: nn.Module, layers: list[MoE], layout: RecordLayout) -> ModelSizes:
    experts = {id(p) for layer in layers for p in (layer.w_in, layer.w_out)}
    training = model.training
    dense = 0
    for parameter in model.parameters():
        if id(parameter) not in experts:
            # weight and gradient, both moments, and the low bits of a bf16 master
            low = 2 if parameter.dtype == torch.bfloat16 else 0
            each = 2 * parameter.itemsize + 8 + low if training else parameter.itemsize
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
    )


def _wish(
    device: torch.device,
    gpu_memory: Size,
    host_memory: Size,
    disk: Path | None,
) -> Wish:
    """The budgets, from the arguments or from what the machine has."""
    available = available_memory()
    host = available if host_memory is None else parse_size(host_memory, "--host-memory")
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
    layers: list[MoE],
    layout: RecordLayout,
    device: torch.device,
    placement: Placement,
    settings: Settings,
    disk: Path | None,
    progress: Progress | None,
) -> Engine:
    common = (
        len(layers),
        layers[0].n_experts,
        layout,
        device,
        placement,
        settings,
        Recorder(device=device),
    )
    if placement.mode == "gpu":
        return ResidentEngine(*common)
    return StreamingEngine(*common, disk=disk, progress=progress)


def _fill(engine: Engine, layers: list[MoE], progress: Progress | None) -> None:
    """Puts every expert's weights into its record and releases the parameters as it goes."""
    done, total = 0, len(layers) * engine.n_experts
    scratch = torch.empty(engine.shape.numel, dtype=engine.dtype, device=engine.device)
    for number, layer in enumerate(layers):
        for index in range(engine.n_experts):
            engine.write_weights(ExpertId(number, index), _filler(layer, index, scratch))
            done += 1
            if progress is not None:
                size = engine.layout.weight_bytes
                progress("filling the store", done * size, total * size)
        layer.give_away(engine, number)


class _Keeper:
    """Held by the placeholders of all layers: when it goes, nobody can use the experts any more."""


def _close_with(engine: Engine, layers: list[MoE]) -> None:
    """Ends the engine's threads when the model and its optimizer are gone, or at exit."""
    keeper = _Keeper()
    for layer in layers:
        layer.experts.keeper = keeper
    weakref.finalize(keeper, engine.close)


def _filler(layer: MoE, index: int, scratch: Tensor) -> Callable[[Tensor], None]:
    def from_parameters(record: Tensor) -> None:
        cut = layer.shape.in_numel
        record[:cut].copy_(layer.w_in[index].detach().reshape(-1))
        record[cut:].copy_(layer.w_out[index].detach().reshape(-1))

    def from_scratch(record: Tensor) -> None:
        layer.init_expert(index, scratch)  # drawn on the compute device, which is quick
        record.copy_(scratch)

    return from_scratch if layer.w_in.is_meta else from_parameters


def _shown(progress: bool | Progress) -> Progress | None:
    """A progress bar on a terminal, the caller's own function, or nothing."""
    if not isinstance(progress, bool):
        return progress
    return TerminalProgress() if progress and sys.stderr.isatty() else None

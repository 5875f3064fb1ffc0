"""Warnings before a run begins: days of work for a CPU, and experts on the root file system."""

import time
from collections.abc import Iterator

import torch

from overspill.core.sizes import format_size
from overspill.hardware.machine import cpu_threads, disk_free, is_on_root
from overspill.train.run_spec import RunSpec

_LONG_S = 12 * 3600
_UPDATES_PER_CORE = 0.33e9
"""Parameters that a core updates in a second, as measured by bench/adam.py without a limit of
memory bandwidth."""
_SLOWEST = 1e8
"""Operations in a second that any CPU exceeds."""
_SIZE, _ROUNDS = 512, 3


def warnings_before(spec: RunSpec) -> Iterator[str]:
    """Warnings for the user before memory is allocated and files are written."""
    folder = spec.budgets.folder
    # a folder whose parent does not exist is an error a moment later
    if folder is not None and folder.absolute().parent.exists() and is_on_root(folder):
        yield (
            f"warning: --disk {folder} is on the root file system, with "
            f"{format_size(disk_free(folder))} free: if experts go there, they share it with the "
            "system; a folder on another local SSD is faster and cannot fill it"
        )
    # a rate is not measured if the run is short at any: some CPUs take a second for it in bf16
    if spec.device.type == "cpu" and any(_long_run(spec, _SLOWEST)):
        yield from _long_run(spec, matrix_rate(spec.dtype))


def _long_run(spec: RunSpec, rate: float) -> Iterator[str]:
    """The warning for a long run on a CPU that computes `rate` operations in a second."""
    size, trained = spec.model_size(), spec.config.trains_experts
    tokens = spec.config.sequences_per_step * spec.seq_len
    # forward, forward again in backward, and the gradients of inputs and of weights
    operations = (8 if trained else 6) * size.active * tokens
    updated = size.dense + size.experts if trained else 0
    threads = cpu_threads(spec.config.memory.threads)
    step = operations / rate + updated / (_UPDATES_PER_CORE * threads)
    seconds = spec.steps * step
    if seconds >= _LONG_S:
        yield (
            f"warning: on this CPU the run takes {_duration(seconds)} or more: {spec.steps:,} "
            f"steps of {tokens:,} tokens through {size.active / 1e9:.1f} B active parameters, at "
            f"{rate / 1e9:,.0f} G operations per second; a GPU, a smaller model, or fewer --steps "
            "or tokens make it shorter"
        )


def matrix_rate(dtype: torch.dtype) -> float:
    """Operations per second in a product of matrices on the CPU, measured in some milliseconds."""
    a, b = (torch.ones(_SIZE, _SIZE, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(_ROUNDS + 1):  # the first one starts the threads
        began = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - began)
    return float(2 * _SIZE**3 / min(times[1:]))


def _duration(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.0f} hours" if hours < 48 else f"{hours / 24:,.0f} days"

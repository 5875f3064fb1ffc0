"""Measurements as tables for a terminal."""

from typing import TYPE_CHECKING

from overspill.hardware.profile import ExpertCosts, MachineProfile
from overspill.probe.comparison import comparisons

if TYPE_CHECKING:
    from rich.table import Table

_KERNELS = {
    "none": "no working C++ compiler: no CPU experts, and a slower optimizer",
    "generic": "no AVX2: CPU experts run plain C++ (slower)",
    "avx2": "no AVX-512: CPU experts use AVX2",
    "avx512": "no AMX: CPU experts use AVX-512",
}


def lacking(cores: int, kernel: str, gpu: bool) -> list[str]:
    """One line for each missing feature, with its consequence."""
    lines = []
    if not gpu:
        lines.append("no GPU: the CPU takes its place, and loads are copies within host memory")
    if cores == 1:
        lines.append("one core: background threads share it with the main thread")
    if kernel in _KERNELS:
        lines.append(_KERNELS[kernel])
    return lines


def limits_table(limits: MachineProfile, gpu: bool) -> "Table":
    table = _table("", "measured", title="The machine")
    cores = f"{limits.cores} core{'s' * (limits.cores > 1)}"
    table.add_row(f"host memory, read by {cores}", _gb(limits.host_read))
    table.add_row(
        "copies from host to GPU" if gpu else "copies within host memory", _gb(limits.link)
    )
    table.add_row("CPU kernels", limits.kernel)
    return table


def costs_table(costs: ExpertCosts) -> "Table":
    """Table of CPU and GPU times by tokens, and which is faster; backward is that of frozen
    experts."""
    heads = [
        f"{first}\n{second}"
        for name in ("forward", "backward")
        for first, second in ((name, "CPU"), ("", "GPU"), ("", "faster"))
    ]
    title = "One expert, ms: on the CPU, or a load and then the GPU"
    table = _table("tokens", "load", *heads, title=title)
    for tokens in costs.cpu_forward.tokens:
        cells = [_ms(costs.load)]
        for one in comparisons(costs):
            faster = "CPU" if one.cpu_is_faster(tokens) else "GPU"
            cells += [_ms(one.cpu(tokens)), _ms(one.gpu(tokens)), faster]
        table.add_row(str(tokens), *cells)
    return table


def costs_lines(costs: ExpertCosts) -> list[str]:
    """Lines with the costs of an expert that do not depend on its tokens."""
    most = costs.cpu_forward.tokens[-1]
    lines = [f"{one.name}: {_up_to(one.crossing(most), most)}" for one in comparisons(costs)]
    lines.append(
        f"load {_ms(costs.load)} ms, {_ms(costs.load_beside)} while the CPU computes; "
        f"during loads the CPU takes {costs.cpu_beside:.2f} times as long"
    )
    lines.append(f"round trip of tokens to the CPU {_ms(costs.round_trip)} ms")
    return lines


def _up_to(crossing: int, most: int) -> str:
    if crossing == 0:
        return "load and GPU are faster even at 1 token"
    if crossing == most:
        return f"the CPU is faster up to {most} tokens, the most that was measured"
    return f"the CPU is faster up to {crossing} token{'s' * (crossing > 1)}"


def _table(*heads: str, title: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(heads[0], no_wrap=True)
    for head in heads[1:]:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"

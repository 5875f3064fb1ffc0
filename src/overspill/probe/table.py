"""What was measured, as tables for a terminal."""

from typing import TYPE_CHECKING

from overspill.core.sizes import format_size
from overspill.hardware.profile import ExpertCosts, MachineProfile
from overspill.probe.affinity import contests

if TYPE_CHECKING:
    from rich.table import Table

_KERNELS = {
    "torch": "no C++ compiler or none that works: CPU experts run as torch operations (slower)",
    "generic": "no AVX2: CPU experts run plain C++ (slower)",
    "avx2": "no AVX-512: CPU experts run on AVX2",
    "avx512": "no AMX: CPU experts run on AVX-512",
}


def lacking(cores: int, kernel: str, gpu: bool) -> list[str]:
    """What this machine does not have and what happens instead, a line each."""
    lines = []
    if not gpu:
        lines.append("no GPU: the CPU stands for it, and loads are copies within host memory")
    if cores == 1:
        lines.append("one core: what would run beside the main thread shares it")
    if kernel in _KERNELS:
        lines.append(_KERNELS[kernel])
    return lines


def limits_table(limits: MachineProfile) -> "Table":
    """The machine, whatever runs on it."""
    table = _table("", "measured", title="The machine")
    beside = "–"
    if limits.host_read_beside is not None and limits.upload_beside is not None:
        beside = f"{_gb(limits.host_read_beside)} beside uploads of {_gb(limits.upload_beside)}"
    table.add_row(
        f"host memory, read by {limits.cores} core{'s' * (limits.cores > 1)}", _gb(limits.host_read)
    )
    table.add_row("the same while uploads go on", beside)
    matrix = "no GPU" if limits.matrix is None else _tflops(limits.matrix)
    table.add_row("bf16 matrix product, GPU", matrix)
    if limits.matrix_cpu is not None:
        table.add_row("bf16 matrix product, CPU", _tflops(limits.matrix_cpu))
    if limits.ssd_read is None or limits.ssd_write is None:
        disk = "not asked: give --disk FOLDER"
    else:
        disk = f"{_gb(limits.ssd_read)} read, {_gb(limits.ssd_write)} written"
    table.add_row("disk, direct I/O", disk)
    table.add_row("CPU kernels", limits.kernel)
    return table


def transfers_table(limits: MachineProfile, gpu: bool) -> "Table":
    heads = ("bytes a copy", "up", "down", "up, both at once", "down, both at once")
    title = "Host and GPU, GB/s" if gpu else "Copies within host memory, GB/s"
    table = _table(*heads, title=title)
    for row in limits.transfers:
        rates = (row.up, row.down, row.up_both, row.down_both)
        table.add_row(format_size(row.size), *(f"{rate / 1e9:.1f}" for rate in rates))
    return table


def costs_table(costs: ExpertCosts) -> "Table":
    """Each way through an expert, by tokens, and who wins; `frozen` and `train` are backward."""
    heads = [
        f"{first}\n{second}"
        for name in ("forward", "frozen", "train")
        for first, second in ((name, "CPU"), ("", "GPU"), ("", "wins"))
    ]
    title = "One expert, ms: on the CPU where it lies, or a load and then the GPU"
    table = _table("tokens", "load", *heads, title=title, padding=0)
    for tokens in costs.cpu_forward.tokens:
        cells = [_ms(costs.load)]
        for way in contests(costs):
            winner = "CPU" if way.cpu_wins(tokens) else "GPU"
            cells += [_ms(way.cpu(tokens)), _ms(way.gpu(tokens)), winner]
        table.add_row(str(tokens), *cells)
    return table


def costs_lines(costs: ExpertCosts) -> list[str]:
    """The rest of what is known of an expert."""
    most = costs.cpu_forward.tokens[-1]
    lines = [f"{way.name}: {_up_to(way.cpu_wins_up_to(most), most)}" for way in contests(costs)]
    lines.append(
        f"load {_ms(costs.load)} ms, {_ms(costs.load_beside)} while the CPU computes; "
        f"the CPU takes {costs.cpu_beside:.2f} times as long while loads go on"
    )
    lines.append(f"AdamW {_ms(costs.update)} ms, {_ms(costs.update_beside)} while loads go on")
    lines.append(f"tokens to the CPU and back {_ms(costs.round_trip)} ms")
    return lines


def _up_to(wins: int, most: int) -> str:
    if wins == 0:
        return "load and GPU are faster even at 1 token"
    if wins == most:
        return f"the CPU is faster up to {most} tokens, the most that was measured"
    return f"the CPU is faster up to {wins} token{'s' * (wins > 1)}"


def _table(*heads: str, title: str, padding: int = 1) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, padding, 0, 0))
    table.add_column(heads[0], no_wrap=True)
    for head in heads[1:]:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"


def _tflops(rate: float) -> str:
    return f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GFLOP/s"

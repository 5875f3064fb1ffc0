"""Measurements of Overspill and of a peer as metrics and as the rows of a table."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from peers.measurement import Measurement, Work
from record import Metric, metric


class Comparison(NamedTuple):
    """Overspill's work beside the peer's work it is compared with."""

    ours: Work
    theirs: Work

    @property
    def key(self) -> str:
        gpu = "_gpu" if self.ours.mode == "gpu" else ""
        return f"{self.ours.batch}{gpu}{'_clip' if self.ours.clip else ''}"

    def label(self, seq: int) -> str:
        text = f"{self.ours.batch}×{seq} tokens a step"
        if self.ours.mode == "gpu":
            return f"{text}, everything on the GPU, no clipping"
        return f"{text}, {'both clip' if self.ours.clip else 'only the peer clips'}"


class Compared(NamedTuple):
    """Measurements of a comparison. Measurements at the same index are a pair."""

    comparison: Comparison
    ours: list[Measurement]
    theirs: list[Measurement]

    @property
    def ratio(self) -> Metric:
        """How many times as fast Overspill is, over the pairs."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return metric([one.speed / other.speed for one, other in pairs], "×")


def comparisons(batches: Sequence[int]) -> Iterator[Comparison]:
    """All that can be compared, the headline first."""
    for batch in batches:
        for clip in (True, False):
            yield Comparison(Work("offload", batch, clip), Work("offload", batch, True))
    on_gpu = Work("gpu", batches[0], False)
    yield Comparison(on_gpu, on_gpu)


def compare(measured: Sequence[Measurement], comparison: Comparison, peer: str) -> Compared:
    """The pairs of one comparison: both sides in the same round of the same run."""
    found = {(one.side, one.work, one.run, one.round): one for one in measured}
    ours, theirs = [], []
    for (side, work, run, number), one in found.items():
        other = found.get((peer, comparison.theirs, run, number))
        if side == "overspill" and work == comparison.ours and other is not None:
            ours.append(one)
            theirs.append(other)
    return Compared(comparison, ours, theirs)


def _speed(measured: Sequence[Measurement]) -> Metric:
    return metric([speed for one in measured for speed in one.speeds], "tokens/s")


def _gib(sizes: Sequence[int]) -> Metric:
    return metric([size / 2**30 for size in sizes], "GiB")


def metrics_of(compared: Sequence[Compared], peer: str) -> dict[str, Metric]:
    """Ratios first, then the speed and the memory of each side."""
    metrics = {f"ratio_{one.comparison.key}": one.ratio for one in compared}
    for one in compared:
        key = one.comparison.key
        sides = {f"overspill_{key}": one.ours, f"{peer}_{key}": one.theirs}
        for name, measured in sides.items():
            metrics[f"{name}_tokens_per_second"] = _speed(measured)
            metrics[f"{name}_gpu_memory"] = _gib([each.gpu_bytes for each in measured])
            metrics[f"{name}_host_memory"] = _gib([each.host_bytes for each in measured])
    return metrics


def table_of(compared: Sequence[Compared], seq: int, name: str) -> list[dict[str, Any]]:
    """A row for each comparison; memory is the highest of all pairs."""
    rows = []
    for one in compared:
        row: dict[str, Any] = {"work": one.comparison.label(seq)}
        row["times as fast (low–high)"] = _spread(one.ratio)
        for side, measured in (("Overspill", one.ours), (name, one.theirs)):
            row[f"{side}, tokens/s"] = round(_speed(measured).median)
        for side, measured in (("Overspill", one.ours), (name, one.theirs)):
            gpu = _gib([each.gpu_bytes for each in measured]).high
            host = _gib([each.host_bytes for each in measured]).high
            row[f"{side}, GPU + host memory"] = f"{gpu:.1f} + {host:.0f} GiB"
        rows.append(row)
    return rows


def _spread(ratio: Metric) -> str:
    text = f"{ratio.median:.2f}"
    return text if ratio.low == ratio.high else f"{text} ({ratio.low:.2f}–{ratio.high:.2f})"

"""Restoring, in backward, the token rows that forward has received from other ranks (T_DI), where
experts are streamed: equation 10 of MPipeMoE with uploads of experts and downloads of their
gradients.

A link between the device and host memory carries uploads, downloads and copies of rows, each
direction by itself; and the exchange too, unless ranks have a faster connection. The activations
between the matrices of an expert (T_M) are computed again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from overspill.core.experts import ExpertShape
from overspill.plan.reuse import Restore, Speeds

_GAIN = 1.02  # below, memory is not spent on a prediction


@dataclass(frozen=True)
class StreamedLayer:
    """One layer on the rank with most token rows."""

    shape: ExpertShape
    itemsize: int
    rows: int
    uploads: int
    """Bytes of experts that forward uploads, and backward again."""
    downloads: int
    """Bytes of gradients that backward downloads."""
    shared_link: bool
    """Whether the exchange uses the link of the uploads."""

    @property
    def row_bytes(self) -> int:
        return self.rows * self.shape.d_model * self.itemsize


class _PassWork(NamedTuple):
    """The work of one pass: matrix products, rows exchanged, bytes to and from the device."""

    products: float
    exchanges: int
    up: int
    down: int


def _passes(restore: Restore, layer: StreamedLayer) -> tuple[_PassWork, _PassWork]:
    first = layer.shape.in_rows // layer.shape.d_hidden
    copied = layer.row_bytes * (restore is Restore.OFFLOAD)
    again = restore is Restore.REPEAT
    forward = _PassWork(first + 1, 2, layer.uploads, copied)
    return forward, _PassWork(3 * first + 2, 2 + again, layer.uploads + copied, layer.downloads)


def seconds(restore: Restore, layer: StreamedLayer, speeds: Speeds) -> float:
    """Forward and backward: the slowest of compute, exchange and both directions of the link in
    each. Streams slow each other down while both are busy, as in `reuse.cost`."""
    by_compute = 1 / speeds.exchange_beside_compute - 1
    by_copies = max(0.0, 1 / speeds.exchange_beside_all - 1 - by_compute)
    by_others = 1 / speeds.copy_beside_all - 1
    product = 2 * layer.rows * layer.shape.d_model * layer.shape.d_hidden / speeds.compute
    total = 0.0
    for work in _passes(restore, layer):
        compute = work.products * product
        exchanged = work.exchanges * layer.row_bytes
        exchange = exchanged / speeds.exchange
        crossing = exchanged * layer.shared_link
        ways = [(size + crossing) / speeds.copy for size in (work.up, work.down)]
        slowed = by_compute * min(compute, exchange) + by_copies * min(max(ways), exchange)
        ways = [way + by_others * min(way, max(compute, exchange)) for way in ways]
        total += max(compute, exchange + slowed, *ways)
    return total


def cheapest_restore(
    layer: StreamedLayer,
    speeds: Speeds,
    among: Sequence[Restore] = (Restore.REPEAT, Restore.KEEP),
) -> Restore:
    """The fastest by prediction; sending again, which needs no memory, unless another is faster."""
    best = min(among, key=lambda restore: seconds(restore, layer, speeds))
    gain = seconds(Restore.REPEAT, layer, speeds) / max(1e-12, seconds(best, layer, speeds))
    return best if gain > _GAIN else Restore.REPEAT

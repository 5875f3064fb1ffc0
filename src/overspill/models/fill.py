"""Fills the records of an engine with the weights of experts."""

import threading
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from overspill.core.experts import ExpertId
from overspill.core.interrupt import DeferredInterrupt
from overspill.models.expert_layers import ExpertLayer
from overspill.models.ranks import checksum, digest
from overspill.moe.engine import Engine
from overspill.tiers.layout import LowRanks, WeightFormat
from overspill.tiers.slab import Progress

_READERS = 8
"""Reader threads: enough to keep an NVMe disk busy."""
_BUFFERS = 3 << 29
"""Largest number of bytes of experts in buffers at once, if they cannot be read into place."""


class ExpertSource(Protocol):
    """Source of the weights of experts other than the model."""

    @property
    def format(self) -> WeightFormat | None:
        """Format of the packed weights that `fill` writes; None: they are plain."""

    @property
    def ranks(self) -> LowRanks:
        """Ranks of the low-rank matrices that `fill` writes behind the weights."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes that `fill` needs besides a record."""

    def fill(self, expert: ExpertId, record: Tensor) -> None: ...


def fill_experts(
    engine: Engine,
    layers: Sequence[ExpertLayer],
    source: ExpertSource | None,
    progress: Progress | None,
    interrupt: DeferredInterrupt,
) -> None:
    """Fills the records of all experts, from the layers or from `source`."""
    done, lock = 0, threading.Lock()
    replicas = None if engine.ranks is None else engine.ranks.replicas
    checksums: dict[ExpertId, int] = {}

    def fill(expert: ExpertId, record: Tensor) -> None:
        nonlocal done
        interrupt.check()
        if source is not None:
            source.fill(ExpertId(engine.layer_map.own[expert.layer], expert.index), record)
        else:
            layers[expert.layer].fill(expert.index, record, engine.device)
        if replicas is not None:
            checksums[expert] = checksum(record)
        with lock:
            done += engine.layout.weight_bytes_in(expert.layer)
            if progress is not None:
                progress("filling the store", done, engine.records.weights_bytes)

    if source is None:
        engine.records.fill(fill)
    else:
        placement = engine.placement  # a buffer on the way to the disk or the device
        staged = placement.mode != "host" or placement.residents > 0
        buffers = engine.layout.weight_bytes * int(staged) + source.buffer_bytes
        engine.records.fill(fill, reader_threads(buffers), on_host=True)
    if replicas is not None:
        weights = digest(sorted(checksums.items()))
        replicas.check_same({"a digest of the experts that several nodes hold": weights})


def reader_threads(buffers: int, most: int = _BUFFERS) -> int:
    """Return the number of threads that read experts, if each needs `buffers` bytes and all
    together may have `most`."""
    return _READERS if buffers == 0 else max(1, min(_READERS, most // buffers))

"""Addresses of the weights of experts, for decoding steps, whose kernels read them in place."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from overspill.core.experts import ExpertId
from overspill.core.interrupt import DeferredInterrupt
from overspill.moe.pooled_experts import PooledExperts
from overspill.moe.residents.memory import Residents
from overspill.plan.eviction import NextUse
from overspill.tiers.entry import Part, Reader
from overspill.tiers.replicas import Replica
from overspill.tiers.store import ExpertStore
from overspill.trace.recorder import Recorder
from overspill.transfer.disk_reads import DiskReads
from overspill.transfer.streams import Inject


class Addresses:
    """Experts are named by their ids. Addresses are valid until experts move."""

    def __init__(
        self,
        store: ExpertStore,
        residents: Residents,
        compute: PooledExperts,
        recorder: Recorder,
        inject: Inject | None,
    ) -> None:
        self._store, self._residents, self._compute = store, residents, compute
        self._recorder, self._inject = recorder, inject
        self._places = store.places
        self._n_experts = store.places.experts.n_global

    @property
    def resident(self) -> list[tuple[int, ...]]:
        """The experts of each layer that live on the compute device."""
        pairs = zip(self._places.maps, self._places.residents, strict=True)
        return [experts.local_ids[:count] for experts, count in pairs]

    def device_addresses(self) -> list[list[int | None]]:
        """The address of each resident expert; None for the others."""
        found: list[list[int | None]] = []
        for layer, ids in enumerate(self.resident):
            weights = self._residents[layer].weights
            row: list[int | None] = [None] * self._n_experts
            for position, expert in enumerate(ids):
                row[expert] = weights[position].data_ptr()
            found.append(row)
        return found

    def host_addresses(self) -> list[list[int]]:
        """The address of each expert in host memory; 0 for the others. Not with experts on disk,
        whose slots change at any time: see `new_disk_reads`."""
        assert not self._places.disk_slots
        found = []
        for layer, experts in enumerate(self._places.maps):
            row = [0] * self._n_experts
            for expert, entry in zip(
                experts.local_ids, self._places.layer_entries(layer), strict=True
            ):
                if entry.host_slot is not None:
                    row[expert] = self._store.host(entry, Part.WEIGHTS).data_ptr()
            found.append(row)
        return found

    def host_weights(self, layer: int, expert: int, copy: Reader) -> Tensor | None:
        """The flat weights of an expert in host memory, which stay there until `copy` is done; None
        if they are on disk, or if another copy is being made of them."""
        entry = self._places.entry(ExpertId(layer, expert))
        if not self._store.begin_copy(entry, copy):
            return None
        return self._store.memory.layout.weights(self._store.host(entry, Part.WEIGHTS), layer)

    def version(self, layer: int, expert: int) -> tuple[int, int]:
        """The number of an expert's entry, and the version of its weights."""
        entry = self._places.entry(ExpertId(layer, expert))
        return entry.number, entry.version

    @contextmanager
    def lent(self, replicas: Mapping[int, Replica]) -> Iterator[None]:
        """Within it, uploads read these replicas, by the numbers of their entries, instead of host
        memory. Afterwards no further copy of them begins: see `wait_for_uploads`."""
        streaming = self._compute.streaming
        if streaming is None or not replicas:
            yield
            return
        try:
            streaming.lend(replicas)
            yield
        finally:
            with DeferredInterrupt():
                streaming.lend({})

    def wait_for_uploads(self, stream: torch.cuda.Stream | None) -> None:
        """Makes a stream wait for all uploads that have begun; without one, the caller."""
        if self._compute.streaming is not None:
            self._compute.streaming.compute.wait_for_uploads(stream)

    def new_disk_reads(self) -> DiskReads:
        """Bring experts of disk into host memory for decoding steps."""
        policies = [NextUse(1, self._n_experts) for _ in range(self._places.n_layers)]
        return DiskReads(self._store, policies, self._recorder, self._inject)

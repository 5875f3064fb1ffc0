"""Moves experts to the compute device and away from it: as the user asks, to use its memory and to
make room there, and as experts are used."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakSet

import torch

from overspill.core.errors import BudgetError, ConfigError, DiskError, OrderError
from overspill.core.interrupt import DeferredInterrupt
from overspill.core.sizes import format_size
from overspill.moe.device_memory import DeviceMemory
from overspill.moe.layer_pass import LayerPass
from overspill.moe.memory_limit import MEMORY_LIMITS, MemoryUser
from overspill.moe.pooled_experts import PooledExperts
from overspill.moe.records import ExpertRecords
from overspill.moe.residency import BytesEach, Residency
from overspill.moe.residents.memory import Residents
from overspill.moe.training_step import TrainingStep
from overspill.plan.budget import Placement
from overspill.plan.residents import DeviceShare, spread_residents
from overspill.plan.usage import Swap, swaps
from overspill.tiers.resident_changes import ResidentChanges
from overspill.tiers.store import ExpertStore

_log = logging.getLogger("overspill")
_SWAPPED_BYTES = 1 << 30  # of experts that are swapped before one pass


class ExpertMoves:
    """Moves experts to the device and away from it, between steps. Its methods are called under the
    engine's lock."""

    def __init__(
        self,
        store: ExpertStore,
        residents: Residents,
        records: ExpertRecords,
        placement: Placement,
        training: TrainingStep | None,
        compute: PooledExperts,
    ) -> None:
        self._store = store
        self._sync = store.sync
        self._places = store.places
        self._residents = residents
        self._changes = ResidentChanges(store)
        self._records = records
        self._placement = placement
        self._training = training
        self._gradients = None if training is None else training.gradients.memory
        self._compute = compute
        self._user: MemoryUser | None = None
        self._residency: Residency | None = None
        self.holders: WeakSet[object] = WeakSet()
        """Objects that keep experts from moving by themselves, either to use memory or to follow
        usage."""
        self.total = len(store.places.entries)
        self.most_sums = self.total
        """The most gradients that are accumulated at a time."""
        self.count = 0
        """The number of times that experts have moved."""
        self._stream_if_needed(sum(store.places.residents))

    def _stream_if_needed(self, resident: int) -> None:
        """Start streaming if not all experts are resident: the others need slots and threads."""
        if resident < self.total:
            self._compute.start_streaming(None if self._gradients is None else self._gradients.keep)

    def wait(self) -> None:
        """Wait until every transfer and update has ended."""
        if self._compute.streaming is not None:
            self._compute.streaming.wait()
        self._residents.wait()

    # -- as the user asks -----------------------------------------------------------------------

    def set_residents(self, counts: Sequence[int]) -> None:
        """Set the number of resident experts of each layer. Raises BudgetError if host memory and
        disk have no room for experts that leave the device."""
        counts, n_local = list(counts), self._places.experts.n_local
        if len(counts) != self._places.n_layers or not all(0 <= n <= n_local for n in counts):
            raise ConfigError(
                f"residents={counts} must be {self._places.n_layers} numbers from 0 to {n_local}"
            )
        with self._change():
            before = list(self._places.residents)
            if self._training is not None:
                self._training.gradients.residents.residents_changed()
            self._stream_if_needed(sum(counts))
            leaving = [
                entry
                for layer, (old, new) in enumerate(zip(before, counts, strict=True))
                for entry in self._places.layer_entries(layer)[new:old]
            ]
            if leaving:
                self._changes.empty_cache()
                self._extend_host(self._changes.missing_slots(leaving))
            for layer, count in enumerate(counts):  # first those that leave: they make room
                if count < before[layer]:
                    self._records.move_to_host(layer, count)
            for layer, count in enumerate(counts):
                if count > before[layer]:
                    self._records.move_to_device(layer, count)

    def swap(self, swaps: Sequence[Swap]) -> None:
        """Swap resident experts and streamed ones of the same layer, before experts have optimizer
        states."""
        if not swaps:
            return
        with self._change():
            self._check_swaps(swaps)
            streaming = self._compute.streaming
            assert streaming is not None
            for swap in swaps:
                self._records.swap(*swap)
                with self._sync.lock:
                    streaming.compute.cursor.counts_ahead.swap(*swap)

    def _check_swaps(self, swaps: Sequence[Swap]) -> None:
        if self._residents.has_states:
            raise OrderError("experts with optimizer states cannot be swapped; use set_residents")
        residents, n_local = self._places.residents, self._places.experts.n_local
        for layer, resident, streamed in swaps:
            known = 0 <= layer < len(residents)
            if not known or not 0 <= resident < residents[layer] <= streamed < n_local:
                raise ConfigError(
                    f"positions {resident} and {streamed} of layer {layer} cannot be swapped: "
                    f"of {n_local} positions the first {residents} of each layer are resident"
                )

    @contextmanager
    def _change(self) -> Iterator[None]:
        # what is allocated here outlives an inference mode of the caller
        with DeferredInterrupt(), torch.inference_mode(False), torch.no_grad():
            if self._training is not None:
                self._training.states.check_empty("the residents of experts cannot be changed")
            if (streaming := self._compute.streaming) is not None:
                streaming.recover()
                streaming.stop_uploads()
            self.wait()
            try:
                yield
            finally:  # also after an interrupt
                self.count += 1
                self._places.recount_slots()
                self._residents.wait()  # the next pass may use another stream
                if (streaming := self._compute.streaming) is not None:
                    streaming.residents_changed()

    def _extend_host(self, missing: int) -> None:
        if missing == 0:
            return
        size = sum(map(self._store.memory.size, self._store.memory.slabs))
        need = missing * size + self.host_bytes + self._placement.reserved
        if need > self._placement.host_memory:
            raise BudgetError(
                f"{missing} experts that leave {self._residents.device} need --host-memory "
                f"{format_size(need, up=True)}, it is {format_size(self._placement.host_memory)}; "
                f"raise it{'' if self._places.disk_slots else ', or give a --disk folder'}"
            )
        self._changes.extend_host(missing)

    @property
    def host_bytes(self) -> int:
        """Host memory of the experts and of what streams them."""
        streaming = self._compute.streaming
        return self._store.memory.host_bytes if streaming is None else streaming.host_bytes

    # -- to use the memory of the device ----------------------------------------------------------

    def fill_memory(self, memory: DeviceMemory, budget: int, user: MemoryUser) -> None:
        """Let as many experts live on the device as `budget` allows, from now on. `user` is the
        model among those that share the device."""
        planned = sum(self._places.residents) == self._placement.residents  # with their states
        if self._gradients is not None:
            self._gradients.may_use_host = True
        size = self._resident_bytes(self._placement.trains_experts, False) if planned else 0
        self._user = user
        self._residency = Residency(memory, budget, self, size)

    @property
    def fills_memory(self) -> bool:
        return self._residency is not None

    def shrink(self) -> None:
        """Move experts that are too many away from the device, for another model, if not in the
        middle of a step."""
        in_step = self._training is not None and self._training.states.has_gradients
        if self._residency is not None and not in_step:
            self._residency.shrink()

    def reserve(self, keep: bool) -> None:
        """Reserve memory of the device for states of resident experts, and with `keep` for kept
        gradients."""
        if self._residency is None or self._training is None or self._training.states.has_gradients:
            return
        gradients = self._training.gradients.memory
        if gradients.keep is not None and gradients.keep != keep and not gradients.accumulates:
            self._residency.begin_again()
        keep = keep or gradients.are_kept
        on_device = keep and not gradients.uses_host(keep)
        self._residency.reserve(self._resident_bytes(states=True, keep=on_device))

    @property
    def share(self) -> DeviceShare:
        """Resident experts, and gradients there."""
        gradients = 0 if self._gradients is None else self._gradients.on_device
        return DeviceShare(sum(self._places.residents), gradients)

    def set_share(self, share: DeviceShare) -> None:
        assert self._user is not None, "the residency that calls this was made for a user"
        with MEMORY_LIMITS.moving(self._user), torch.inference_mode(False):  # memory outlives it
            if self._gradients is not None and self._gradients.on_device != share.gradients:
                self._gradients.set_on_device(0)  # first: it makes room
            if share.experts != sum(self._places.residents):
                n_layers, n_local = self._places.n_layers, self._places.experts.n_local
                self.set_residents(spread_residents(share.experts, n_layers, n_local))
            if self._gradients is not None:
                self._gradients.set_on_device(share.gradients)

    def bytes_each(self) -> BytesEach:
        weights, gradients = self._weight_bytes, self._gradients
        if gradients is None:
            return BytesEach(self._resident_bytes(self._residents.has_states, False))
        in_host = gradients.uses_host(gradients.are_kept)
        return BytesEach(
            self._resident_bytes(self._residents.has_states, gradients.are_kept and not in_host),
            weights if gradients.accumulates else 0,
            weights if in_host else 0,
        )

    @property
    def _weight_bytes(self) -> int:
        """Bytes of a weight record; the mean of all layers, over which residents are spread."""
        sizes = self._store.weight_bytes
        return -(-sum(sizes) // len(sizes))

    def _resident_bytes(self, states: bool, keep: bool) -> int:
        """Bytes of a resident expert: its record, its kept gradient, and its share of the gradients
        of a layer while they are made."""
        layout = self._store.memory.layout
        weights = self._weight_bytes
        if not states:
            return weights
        kept = weights if keep else 0
        return weights + layout.state_bytes + kept + -(-2 * weights // self._places.n_layers)

    # -- before a pass ----------------------------------------------------------------------------

    def before_pass(self, layer_pass: LayerPass, tokens: int, follow_usage: bool) -> None:
        """Move experts before a pass through the model that begins a step."""
        if len(self.holders):
            return
        training = self._training
        if training is not None:
            # the memory of the optimizer is not allocated yet
            expected = layer_pass.trained and not training.optimizer.has_states
            if expected or training.states.has_gradients:
                return
        try:
            if self._residency is not None:
                self._residency.before_pass(tokens, layer_pass.training)
            # trained experts are all used in every step, by the optimizer
            trained = training is not None and layer_pass.trained
            if follow_usage and not trained and not self._residents.has_states:
                self._follow_usage()
        except DiskError as error:  # a move only saves time; the pass may not need these experts
            if training is not None:
                raise
            _log.warning("experts stay where they are: %s", error)

    def _follow_usage(self) -> None:
        """Make the experts with the most token rows of the last forward resident."""
        if (streaming := self._compute.streaming) is None:
            return
        with self._sync.lock:
            n_local = self._places.experts.n_local  # not experts of other ranks
            counts = streaming.compute.cursor.last_counts()
            rows = [None if own is None else own[:n_local] for own in counts]
            most = max(1, _SWAPPED_BYTES // self._store.memory.layout.weight_bytes)
            found = swaps(rows, self._places.residents, most)
        if not found:
            return
        try:
            self.swap(found)
        except torch.OutOfMemoryError:  # two records need memory meanwhile; others stay in place
            _log.info("there is no GPU memory left to swap experts by their usage")
        else:
            _log.info("%d experts moved to the GPU in place of less used ones", len(found))

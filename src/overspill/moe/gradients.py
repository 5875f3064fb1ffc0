"""The gradients of all experts: each goes where its expert is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from overspill.compute.cpu_kernel import WeightGradient
from overspill.core.errors import NonFiniteError
from overspill.moe.layer_pass import Wave
from overspill.moe.replicas import KeptGradients, add_replicas
from overspill.moe.residents.gradients import ResidentGradients
from overspill.moe.residents.host_gradients import HostGradients
from overspill.moe.residents.memory import Residents
from overspill.moe.streaming.gradients import StreamingGradients
from overspill.optim.arguments import AdamHyper
from overspill.optim.gradient_norm import total_of_squares
from overspill.parallel.ranks import Ranks
from overspill.plan.residents import spread_among
from overspill.tiers.entry import Part
from overspill.tiers.store import ExpertStore
from overspill.transfer.streams import StreamEvent


class ExpertGradients:
    """Takes the gradients of experts and updates the experts with them: those resident on the
    compute device there, streamed ones by the CPU. `TrainingStep` decides when a gradient is
    complete and passes the numbers of the update (`AdamHyper`) then.
    """

    def __init__(
        self,
        residents: Residents,
        store: ExpertStore,
        threads: int,
        streaming: Callable[[], StreamingGradients | None],
        reserve: Callable[[bool], None],
    ) -> None:
        """`streaming` gives None if all experts are resident for good. `reserve` is
        called before memory for states, and for gradients that are kept, is allocated there."""
        n_local = store.experts.n_local
        self.of_residents = ResidentGradients(residents, n_local, threads, self._host)
        self._device = residents.device
        self._may_use_host = False
        self._store = store
        self._streaming = streaming
        self._reserve = reserve
        self.keep: bool | None = None
        """Whether the optimizer keeps gradients until `step()`; None: there is none yet."""
        self.accumulates = False
        """Whether a step had gradients of several backward passes."""

    @property
    def are_kept(self) -> bool:
        """Whether gradients wait for others or for `step()`."""
        return self.accumulates or self.keep is True

    def allow_host(self) -> None:
        """Gradients of resident experts may wait for the global norm in host memory."""
        self._may_use_host = True

    def uses_host(self, keep: bool) -> bool:
        """Whether gradients of resident experts are kept in host memory if the optimizer keeps
        gradients: if each of them has a host slot, and nothing is added to them."""
        store = self._store
        has_slots = store.host_slots >= len(store.entries) and not store.disk_slots
        return keep and self._may_use_host and has_slots and not self.accumulates

    @property
    def on_device(self) -> int:
        """Gradients that have memory on the device beside the experts' own: kept ones of experts
        resident if others of them are kept in host memory, else sums of streamed experts."""
        if self._host() is not None:
            return sum(self.of_residents.on_device)
        streaming = self._streaming()
        return 0 if streaming is None else len(streaming.on_device)

    def set_on_device(self, count: int) -> None:
        """Between steps."""
        if self._host() is not None:
            self.of_residents.keep_on_device(spread_among(count, self._store.residents))
        elif (streaming := self._streaming()) is not None:
            streaming.on_device.resize(count)

    def _host(self) -> HostGradients | None:
        streaming = self._streaming()
        if streaming is None or not self.uses_host(self.keep is True):
            return None
        return streaming.of_residents

    def attach(self, state_dtype: torch.dtype, keep: bool) -> None:
        """Allocates the optimizer states once, and with `keep` memory for kept gradients."""
        self._store.lifetime.check()
        if Part.STATES not in self._store.memory.slabs:
            self._store.memory.set_state_dtype(state_dtype)
            self._store.allocate(Part.STATES)
        self._reserve(keep)
        before, self.keep = self.keep, keep
        try:
            self.of_residents.attach(state_dtype, keep)
        except BaseException:
            self.keep = before
            raise
        if (streaming := self._streaming()) is not None:
            streaming.attach(keep)

    def reset_states(self) -> None:
        """Sets all optimizer states to zero."""
        if Part.STATES not in self._store.memory.slabs:
            return
        self.of_residents.reset_states()
        if (streaming := self._streaming()) is not None:
            streaming.reset_states()

    def expect_more(self) -> None:
        """Before the first gradients of a step that further ones will be added to."""
        if not self.accumulates:
            self.accumulates = True
            self._reserve(True)

    def begin_backward(self, shared: Mapping[int, tuple[int, ...]]) -> None:
        """Before the gradients of a layer. `shared` are the ranks that compute each expert which
        its owner does not compute alone."""
        if (streaming := self._streaming()) is not None:
            streaming.begin_backward(shared)

    def add(
        self,
        layer: int,
        wave: Wave,
        dw: Sequence[Tensor],
        hyper: AdamHyper | None,
        more: bool = False,
    ) -> None:
        """Takes the gradients of a wave, [n, ...] for each tensor of a record. With `hyper` they
        complete the step's gradient and the experts may be updated now; without, they are kept,
        and with `more` others are expected to be added before `complete_layer`."""
        streaming = self._streaming()
        with self._all_or_nothing():
            if streaming is None or wave.first < self._store.residents[layer]:
                self.of_residents.add(layer, wave, dw, hyper)
            else:
                streaming.add(layer, wave, dw, hyper, more)

    def place(
        self, layer: int, rows: Mapping[int, int], updates: bool, more: bool
    ) -> dict[int, WeightGradient]:
        """Where the CPU leaves the gradients of streamed experts with these token rows, by
        position. `updates`: they will complete the step's gradient, and the experts may be updated
        then; `more` as in `add`."""
        streaming = self._streaming()
        assert streaming is not None
        return streaming.place(layer, rows, updates, more)

    def add_formed(self, end: StreamEvent, hyper: AdamHyper | None) -> None:
        """Takes these gradients, which are complete at `end`; `hyper` as in `add`."""
        streaming = self._streaming()
        assert streaming is not None
        streaming.add_formed(end, hyper)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """A gradient that is not finite ends the step for all experts."""
        try:
            yield
        except NonFiniteError:
            self.discard()
            raise

    def collect(self, layer: int, hyper: AdamHyper | None) -> None:
        """After the gradients of a backward: other ranks have computed some for the experts of
        this one. With `hyper` they complete the step's gradient."""
        if (streaming := self._streaming()) is not None:
            streaming.collect(layer, hyper)

    def wait_readers(self) -> None:
        """Blocks until nothing reads weights in host memory."""
        if (streaming := self._streaming()) is not None:
            streaming.wait_readers()

    def complete_layer(
        self, layer: int, counts: Sequence[int] | None, hyper: AdamHyper | None
    ) -> None:
        """The layer's gradient is complete. `counts` are the token rows of the backward that
        completed it; None if none did. With `hyper` all experts that this backward did not update
        are updated now, with their kept gradient or by decay; without, in `end_step`."""
        with self._all_or_nothing():
            self.of_residents.complete_layer(layer, hyper)
            if (streaming := self._streaming()) is not None:
                streaming.complete_layer(layer, counts, hyper)

    @property
    def has_updated(self) -> bool:
        """Whether experts were updated, or will be, since the last `end_step` or `discard`."""
        streaming = self._streaming()
        return self.of_residents.has_updated or (streaming is not None and streaming.has_updated)

    def add_replicas(self, replicas: Ranks) -> None:
        """Adds the kept gradients of other nodes, expert by expert; waits for them."""
        parts: list[KeptGradients] = [self.of_residents]
        if (streaming := self._streaming()) is not None:
            parts.append(streaming)
        store = self._store
        experts = [
            (entry.number, parts[store.position(entry) >= store.residents[entry.id.layer]])
            for entry in sorted(store.entries, key=lambda entry: entry.id)
        ]
        add_replicas(replicas, experts, self._device)

    def sum_of_squares(self) -> float:
        """Sum of squares of all kept gradients; waits for them."""
        self._store.lifetime.check()
        squares = self.of_residents.squares()
        if (streaming := self._streaming()) is not None:
            squares = squares | streaming.squares()
        id_of = self._store.id_of
        return total_of_squares({id_of(number): square for number, square in squares.items()})

    def end_step(self, kept: Mapping[int, AdamHyper]) -> None:
        """Updates the experts of the layers in `kept` with their kept gradients and ends the step.
        Raises NonFiniteError if a gradient was not finite."""
        with self._all_or_nothing():
            self.of_residents.check_finite(kept)
            try:  # first: the CPU begins while updates on the device are queued
                if (streaming := self._streaming()) is not None:
                    streaming.end_step(kept)
            finally:
                self.of_residents.end_step(kept)

    def discard(self, layer: int | None = None) -> None:
        """Drops the kept gradients of a layer, or all; the experts stay as they are."""
        self.of_residents.discard(layer)
        if (streaming := self._streaming()) is not None:
            streaming.discard(layer)

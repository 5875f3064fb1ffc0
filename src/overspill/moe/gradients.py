"""The gradients of all experts: each goes where its expert is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from overspill.core.errors import NonFiniteError
from overspill.moe.gradient_memory import GradientMemory
from overspill.moe.gradient_sink import GradientSink
from overspill.moe.layer_pass import Wave
from overspill.moe.residents.gradients import ResidentGradients
from overspill.moe.residents.memory import Residents
from overspill.moe.streaming.gradients import StreamingGradients
from overspill.optim.arguments import AdamHyper
from overspill.optim.gradient_norm import total_of_squares
from overspill.parallel.ranks import Ranks
from overspill.tiers.entry import Part
from overspill.tiers.store import ExpertStore

_PIECE = 1 << 24  # elements of replicas that are added up at once, in float32


class ExpertGradients(GradientSink):
    """Sink of the gradients of all experts, made of two: those resident on the compute device are
    updated there, streamed ones by the CPU. `TrainingStep` decides when a gradient is complete and
    passes the numbers of the update (`AdamHyper`) then.
    """

    def __init__(
        self,
        residents: Residents,
        store: ExpertStore,
        threads: int,
        streaming: Callable[[], StreamingGradients | None],
        reserve: Callable[[bool], None],
    ) -> None:
        """`streaming` gives None if all experts are resident for good. `reserve` is called before
        memory for states, and for gradients that are kept, is allocated on the device."""
        n_local = store.places.experts.n_local
        self.residents = ResidentGradients(residents, n_local, threads, lambda: self.memory.host())
        self.memory = GradientMemory(store.places, self.residents, streaming)
        self._resident_memory = residents
        self._store = store
        self._places = store.places
        self._streaming = streaming
        self._reserve = reserve

    @property
    def streamed(self) -> StreamingGradients:
        """The sink of streamed experts; only if there are some."""
        streaming = self._streaming()
        assert streaming is not None, "all experts are resident"
        return streaming

    @property
    def _sinks(self) -> list[GradientSink]:
        """The sink of resident experts, then that of streamed ones if there are some."""
        streaming = self._streaming()
        return [self.residents] if streaming is None else [self.residents, streaming]

    def _sink(self, layer: int, position: int) -> GradientSink:
        return self.residents if position < self._places.residents[layer] else self.streamed

    # -- memory -------------------------------------------------------------------------------

    def attach(self, state_dtype: torch.dtype, keep: bool) -> None:
        """Allocate the optimizer states once, and with `keep` memory for kept gradients."""
        self._store.lifetime.check()
        if Part.STATES not in self._store.memory.slabs:
            self._store.memory.set_state_dtype(state_dtype)
            self._store.allocate(Part.STATES)
        self._reserve(keep)
        before, self.memory.keep = self.memory.keep, keep
        try:
            self._resident_memory.allocate_states(state_dtype)
            self.allocate(keep)
        except BaseException:
            self.memory.keep = before
            raise

    def allocate(self, keep: bool) -> None:
        for sink in self._sinks:
            sink.allocate(keep)

    def reset_states(self) -> None:
        if Part.STATES in self._store.memory.slabs:
            for sink in self._sinks:
                sink.reset_states()

    def expect_more(self) -> None:
        """Before the first gradients of a step that further ones will be added to."""
        if not self.memory.accumulates:
            self.memory.accumulates = True
            self._reserve(True)

    # -- a backward ---------------------------------------------------------------------------

    def begin_backward(self, shared: Mapping[int, tuple[int, ...]]) -> None:
        for sink in self._sinks:
            sink.begin_backward(shared)

    def add(
        self,
        layer: int,
        wave: Wave,
        dw: Sequence[Tensor],
        hyper: AdamHyper | None,
        more: bool = False,
    ) -> None:
        with self._all_or_nothing():
            self._sink(layer, wave.first).add(layer, wave, dw, hyper, more)

    def collect(self, layer: int, hyper: AdamHyper | None) -> None:
        for sink in self._sinks:
            sink.collect(layer, hyper)

    def complete(self, layer: int, counts: Sequence[int] | None, hyper: AdamHyper | None) -> None:
        with self._all_or_nothing():
            for sink in self._sinks:
                sink.complete(layer, counts, hyper)

    def wait_readers(self) -> None:
        for sink in self._sinks:
            sink.wait_readers()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """A gradient that is not finite ends the step for all experts."""
        try:
            yield
        except NonFiniteError:
            self.discard()
            raise

    # -- the end of a step --------------------------------------------------------------------

    @property
    def has_updated(self) -> bool:
        return any(sink.has_updated for sink in self._sinks)

    def kept(self) -> set[int]:
        return {number for sink in self._sinks for number in sink.kept()}

    def change_kept(self, number: int, change: Callable[[Tensor], None]) -> None:
        entry = self._places.entries[number]
        sink = self._sink(entry.id.layer, self._places.position(entry))
        sink.change_kept(number, change)

    def add_replicas(self, replicas: Ranks) -> None:
        """Replace the kept gradient of each expert by its sum over the nodes that hold the expert:
        the same bits on all. An expert that no replica has a gradient of gets none. Entered by all
        replicas, whose experts are the same; waits for them."""
        kept, entries = self.kept(), sorted(self._places.entries, key=lambda entry: entry.id)
        has = replicas.largest([entry.number in kept for entry in entries])
        for found, entry in zip(has, entries, strict=True):
            if found:
                add = partial(_add_replicas, replicas, self._resident_memory.device)
                self.change_kept(entry.number, add)

    def squares(self) -> dict[int, float]:
        return {n: square for sink in self._sinks for n, square in sink.squares().items()}

    def sum_of_squares(self) -> float:
        """Return the sum of squares of all kept gradients; waits for them."""
        self._store.lifetime.check()
        id_of = self._places.id_of
        return total_of_squares({id_of(n): square for n, square in self.squares().items()})

    def check(self, kept: Mapping[int, AdamHyper]) -> None:
        with self._all_or_nothing():
            for sink in self._sinks:
                sink.check(kept)

    def step(self, kept: Mapping[int, AdamHyper]) -> None:
        with self._all_or_nothing(), ExitStack() as sinks:
            # each ends its step, whatever the others raise. The last begins: the CPU has work while
            # updates on the device are queued
            for sink in self._sinks:
                sinks.callback(sink.step, kept)

    def discard(self, layer: int | None = None) -> None:
        for sink in self._sinks:
            sink.discard(layer)


def _add_replicas(replicas: Ranks, device: torch.device, gradient: Tensor) -> None:
    for piece in gradient.split(_PIECE):
        # on the compute device, wherever it is kept: replicas may keep it in different places
        total = replicas.total(piece.to(device, torch.float32, copy=True))
        piece.copy_(total)

"""The gradients of all experts: each goes where its expert has its home."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from overspill.core.errors import NonFiniteError
from overspill.moe.gradient_sink import GradientSink
from overspill.moe.homes.gradients import HomeGradients
from overspill.moe.homes.memory import DeviceHomes
from overspill.moe.layer_pass import Wave
from overspill.moe.streaming.gradients import StreamingGradients
from overspill.optim.gradient_norm import total_of_squares
from overspill.optim.kernel import AdamHyper
from overspill.tiers.entry import Part
from overspill.tiers.store import ExpertStore


class ExpertGradients(GradientSink):
    """Experts at home on the compute device are updated there, streamed ones by the CPU."""

    def __init__(
        self,
        homes: DeviceHomes,
        store: ExpertStore,
        threads: int,
        streaming: Callable[[], StreamingGradients | None],
        make_room: Callable[[bool], None],
    ) -> None:
        """`streaming` gives None while all experts are at home on the device. `make_room` is called
        before memory for states, and for gradients that are kept, is allocated there."""
        n_local = store.experts.n_local
        self._homes = HomeGradients(homes, n_local, threads)
        self._store = store
        self._streaming = streaming
        self._make_room = make_room
        self.keep: bool | None = None
        """Whether the optimizer keeps gradients until `step()`; None: there is none yet."""
        self.accumulates = False
        """Whether a step had gradients of several backward passes."""

    def _streamed_updated(self) -> bool:
        streaming = self._streaming()
        return streaming is not None and streaming.has_updated

    def attach(self, state_dtype: torch.dtype, keep: bool) -> None:
        self._store.lifetime.check()
        if Part.STATES not in self._store.slabs:
            self._store.set_state_dtype(state_dtype)
            self._store.allocate(Part.STATES)
        self._make_room(keep)
        self._homes.attach(state_dtype, keep)
        self.keep = keep
        if (streaming := self._streaming()) is not None:
            streaming.attach(keep)

    def reset_states(self) -> None:
        self._homes.reset_states()
        if (streaming := self._streaming()) is not None:
            streaming.reset_states()

    def expect_more(self) -> None:
        if not self.accumulates:
            self.accumulates = True
            self._make_room(True)

    def add(
        self,
        layer: int,
        wave: Wave,
        dw: Sequence[Tensor],
        hyper: AdamHyper | None,
        more: bool = False,
    ) -> None:
        streaming = self._streaming()
        with self._all_or_nothing():
            if streaming is None or wave.first < self._store.homes[layer]:
                self._homes.add(layer, wave, dw, hyper)
            else:
                streaming.add(layer, wave, dw, hyper, more)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """A gradient that is not finite ends the step for all experts."""
        try:
            yield
        except NonFiniteError:
            self.discard()
            raise

    def complete_layer(
        self, layer: int, counts: Sequence[int] | None, hyper: AdamHyper | None
    ) -> None:
        with self._all_or_nothing():
            self._homes.complete_layer(layer, hyper)
            if (streaming := self._streaming()) is not None:
                streaming.complete_layer(layer, counts, hyper)

    @property
    def has_updated(self) -> bool:
        return self._homes.has_updated or self._streamed_updated()

    def sum_of_squares(self) -> float:
        self._store.lifetime.check()
        squares = self._homes.squares()
        if (streaming := self._streaming()) is not None:
            squares = squares | streaming.squares()
        id_of = self._store.id_of
        return total_of_squares({id_of(number): square for number, square in squares.items()})

    def end_step(self, kept: Mapping[int, AdamHyper]) -> None:
        with self._all_or_nothing():
            self._homes.end_step(kept)
            if (streaming := self._streaming()) is not None:
                streaming.end_step(kept)

    def discard(self, layer: int | None = None) -> None:
        self._homes.discard(layer)
        if (streaming := self._streaming()) is not None:
            streaming.discard(layer)

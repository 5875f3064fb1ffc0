"""Gradients of experts that their owners do not compute alone, on their way through outboxes."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from overspill.core.experts import ExpertId
from overspill.optim.arguments import AdamHyper
from overspill.optim.updates import Update
from overspill.tiers.entry import Entry
from overspill.tiers.places import ExpertPlaces
from overspill.transfer.outboxes import GradientPart, Outboxes
from overspill.transfer.streams import StreamEvent, all_of


class SharedGradients:
    """Parts of gradients in the outboxes of ranks: places for those of this rank, and updates of
    its own experts with those of all. `StreamingGradients` copies gradients and submits the
    updates."""

    def __init__(self, outboxes: Outboxes | None, places: ExpertPlaces) -> None:
        """Without `outboxes` nothing is shared."""
        self._outboxes = outboxes
        self._places = places
        self._collected: list[Sequence[GradientPart]] = []  # parts of this step's gradients
        self.updated: set[int] = set()
        """Experts that were updated with such parts in this step."""

    def begin(self, shared: Mapping[int, tuple[int, ...]]) -> None:
        """Prepare for the gradients of a layer, see `GradientSink.begin_backward`."""
        if self._outboxes is not None:
            self._outboxes.begin(shared)

    def slots(self, wave: Mapping[int, Entry]) -> dict[int, GradientPart]:
        """Return the place of the gradient of each shared expert of a wave, by its offset there."""
        if (outboxes := self._outboxes) is None:
            return {}
        found = {offset: outboxes.own_part(entry.id.index) for offset, entry in wave.items()}
        return {offset: part for offset, part in found.items() if part is not None}

    def publication(self, entry: Entry, part: GradientPart, arrived: StreamEvent) -> Update:
        """Return the task that publishes a gradient in its slot to the owner."""
        assert self._outboxes is not None
        return Update(entry, arrived, then=functools.partial(self._outboxes.publish, part))

    def updates(
        self,
        layer: int,
        hyper: AdamHyper | None,
        take_kept: Callable[[Entry], StreamEvent | None],
    ) -> Iterator[Update]:
        """Yield the updates of shared experts of this rank, after the gradients of a layer; without
        `hyper` tasks that add to their kept gradients. `take_kept` returns when the kept gradient
        of an expert has arrived."""
        if (outboxes := self._outboxes) is None:
            return
        for expert, parts in outboxes.owned():
            entry = self._places.entry(ExpertId(layer, expert))
            kept, arrived = take_kept(entry), outboxes.arrival(parts)
            self._collected.append(parts)
            if hyper is not None:
                self.updated.add(entry.number)
            yield Update(
                entry,
                arrived if kept is None else all_of([arrived, kept]),
                accumulate=kept is not None,
                hyper=hyper,
                parts=parts,
                then=functools.partial(outboxes.take, parts),
            )

    def are_finite(self) -> bool:
        """Return whether all parts of this step's gradients are finite; waits for them. Updates
        know it of parts that were taken already."""
        if (outboxes := self._outboxes) is None:
            return True
        parts = [p for parts in self._collected for p in parts if not outboxes.was_taken(p)]
        outboxes.wait_arrived(parts)
        return all(math.isfinite(part.square.item()) for part in parts)

    def forget(self) -> None:
        """Forget the parts of a step, at its end."""
        self._collected.clear()
        self.updated.clear()

    def check_conserved(self) -> None:
        if self._outboxes is not None:
            self._outboxes.check_conserved()

    def stop(self) -> None:
        """Let update threads wait for other ranks only for a while: they may be gone."""
        if self._outboxes is not None:
            self._outboxes.stop()

    def close(self) -> None:
        if self._outboxes is not None:
            self._outboxes.close()

"""Gradients of experts that their owners do not compute alone: what goes to the outboxes of ranks,
and what owners take from there."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from overspill.core.experts import ExpertId
from overspill.optim.arguments import AdamHyper
from overspill.optim.updates import Update
from overspill.tiers.entry import Entry
from overspill.tiers.store import ExpertStore
from overspill.transfer.outboxes import GradientPart, Outboxes
from overspill.transfer.streams import StreamEvent, all_of


class SharedGradients:
    """A part of `StreamingGradients`, which copies the gradients and submits the updates."""

    def __init__(self, outboxes: Outboxes | None, store: ExpertStore) -> None:
        """Without `outboxes` nothing is shared."""
        self._outboxes = outboxes
        self._store = store
        self._collected: list[Sequence[GradientPart]] = []  # parts of this step's gradients
        self.updated: set[int] = set()
        """Experts that were updated with such parts in this step."""

    def begin(self, shared: Mapping[int, tuple[int, ...]]) -> None:
        """Before the gradients of a layer: `shared` are the ranks that compute each expert which
        its owner does not compute alone."""
        if self._outboxes is not None:
            self._outboxes.begin(shared)

    def slots(self, wave: Mapping[int, Entry]) -> dict[int, GradientPart]:
        """Where gradients of shared experts in a wave go, by their offsets in it."""
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
        """After the gradients of a layer: the updates of shared experts of this rank, or what adds
        to their kept gradients. `take_kept` says when the kept gradient has arrived."""
        if (outboxes := self._outboxes) is None:
            return
        for expert, parts in outboxes.owned():
            entry = self._store.entry(ExpertId(layer, expert))
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
        """Waits for all parts of this step's gradients. What was taken already is known to the
        updates."""
        if (outboxes := self._outboxes) is None:
            return True
        parts = [p for parts in self._collected for p in parts if not outboxes.was_taken(p)]
        outboxes.wait_arrived(parts)
        return all(math.isfinite(part.square.item()) for part in parts)

    def forget(self) -> None:
        """The step has ended."""
        self._collected.clear()
        self.updated.clear()

    def check_conserved(self) -> None:
        if self._outboxes is not None:
            self._outboxes.check_conserved()

    def stop(self) -> None:
        """Other ranks may be gone: update threads do not wait for them any more, after a while."""
        if self._outboxes is not None:
            self._outboxes.stop()

    def close(self) -> None:
        if self._outboxes is not None:
            self._outboxes.close()

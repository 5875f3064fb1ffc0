"""Which slot of the states of a model each request has."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from overspill.models.huggingface.recurrent import States, StateSpan
from overspill.serve.request import Request
from overspill.serve.scheduler import Work


class Part(NamedTuple):
    """Tokens of a request that a pass computes."""

    request: Request
    before: int
    """Tokens before them."""
    n_new: int


class StateSlots:
    """Slots of the requests that run, and how many tokens the state in each of them has seen. A
    pass changes states where they are: after one that was interrupted or is not wanted, a state
    has seen other tokens than the request has computed."""

    def __init__(self, n_slots: int) -> None:
        self._free = list(range(n_slots))
        self._slots: dict[Request, int] = {}
        self._seen: dict[Request, int] = {}

    def lost(self, batch: Sequence[Work]) -> list[Request]:
        """Requests whose states have to be computed again."""
        return [
            request
            for request, _ in batch
            if request.computed and self._seen.get(request) != request.computed
        ]

    def begin(
        self, parts: Sequence[Part], copies: Sequence[Mapping[int, States]] = ()
    ) -> list[StateSpan]:
        """The states that a pass changes. `copies` are those that it makes of each, by the number
        of tokens they have seen."""
        self._forget_freed(parts)
        found = []
        for (request, before, _), wanted in zip(parts, copies or [{}] * len(parts), strict=True):
            self._seen.pop(request, None)
            # those of a pass that is not wanted
            for seen in [each for each in request.checkpoints if each > before]:
                del request.checkpoints[seen]
            inside = [(seen - before, states) for seen, states in sorted(wanted.items())]
            found.append(StateSpan(self.slot(request), not before, inside))
        return found

    def resume(self, request: Request) -> int:
        """The slot of a request that continues from a checkpoint, which comes there."""
        self._forget_freed()
        self._seen[request] = request.computed
        return self.slot(request)

    def _forget_freed(self, parts: Sequence[Part] = ()) -> None:
        # the pass before this one may not be recorded yet
        begun = {part.request for part in parts if part.before}
        for request in [each for each in self._slots if not each.computed and each not in begun]:
            self.forget(request)  # it has given its blocks back

    def slot(self, request: Request) -> int:
        if request not in self._slots:
            self._slots[request] = self._free.pop()
        return self._slots[request]

    def end(self, parts: Sequence[Part]) -> None:
        """The pass was computed, as far as the host knows."""
        self._seen.update({request: before + n for request, before, n in parts})

    def unchanged(self, parts: Sequence[Part]) -> None:
        """The pass was not computed."""
        self._seen.update({request: before for request, before, _ in parts})

    def forget(self, request: Request) -> None:
        slot = self._slots.pop(request, None)
        self._seen.pop(request, None)
        if slot is not None:
            self._free.append(slot)

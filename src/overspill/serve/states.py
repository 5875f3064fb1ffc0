"""Which slot of the states of a model each request has."""

from collections.abc import Sequence
from typing import NamedTuple

from overspill.models.huggingface.recurrent import StateSpan
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

    def begin(self, parts: Sequence[Part]) -> list[StateSpan]:
        """The states that a pass changes."""
        # the pass before this one may not be recorded yet
        begun = {part.request for part in parts if part.before}
        for request in [each for each in self._slots if not each.computed and each not in begun]:
            self.forget(request)  # it has given its blocks back
        found = []
        for request, before, _ in parts:
            self._seen.pop(request, None)
            if request not in self._slots:
                self._slots[request] = self._free.pop()
            found.append(StateSpan(self._slots[request], not before))
        return found

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

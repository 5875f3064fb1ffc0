"""Slots for the states of requests, in models that have more than keys and values."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from overspill.models.huggingface.recurrent import RecurrentStates, States, StateSpan
from overspill.serve.checkpoints import Checkpoints
from overspill.serve.request import Request
from overspill.serve.scheduler import BatchItem


class Part(NamedTuple):
    """Tokens of a request that a pass computes."""

    request: Request
    before: int
    """Number of tokens of the request before them."""
    n_new: int


class StateSlots:
    """Slots of the requests that run, and how many tokens the state in each of them has seen. A
    pass changes states in place: after a pass that was interrupted or is not wanted, a state has
    seen other tokens than the request has computed."""

    def __init__(
        self,
        memory: RecurrentStates,
        n_slots: int,
        block_size: int,
        checkpoints: Checkpoints | None,
    ) -> None:
        """With `checkpoints`, passes copy the states after full blocks for them."""
        self.memory = memory
        self._block_size = block_size
        self._checkpoints = checkpoints
        self._free = list(range(n_slots))
        self._slots: dict[Request, int] = {}
        self._seen: dict[Request, int] = {}
        self._copies: list[dict[int, States]] = []  # that the current pass makes of each part

    def restore(self, batch: Sequence[BatchItem]) -> list[Request]:
        """Copy checkpoints to the slots of requests that continue from them. Returns the requests
        whose states have to be computed again."""
        for request, _ in batch:
            if request.beginning is not None:
                self.memory.copy_in(self.resume(request), request.beginning)
        return [
            request
            for request, _ in batch
            if request.computed and self._seen.get(request) != request.computed
        ]

    def begin_pass(self, parts: Sequence[Part], device: torch.device, keep: bool) -> None:
        """Prepare a pass of the model's modules. Without `keep`, it makes no copies."""
        counts = [part.n_new for part in parts]
        self._copies = [self._new_copies(part) if keep else {} for part in parts]
        self.memory.begin(counts, self.begin(parts, self._copies), device)

    def end_pass(self, parts: Sequence[Part], keep: bool) -> None:
        """Record a pass of the model's modules, and give its copies to the requests."""
        self._end(parts)
        if keep:
            self._copy_states(parts)
            for part, made in zip(parts, self._copies, strict=True):
                part.request.checkpoints |= made

    def end_step(self, parts: Sequence[Part], done: bool) -> None:
        """Record a decoding step after `begin`; `done` is False if it was not computed."""
        if done:
            self._end(parts)
            self._copy_states(parts)
        else:
            self._seen.update({request: before for request, before, _ in parts})

    def _new_copies(self, part: Part) -> dict[int, States]:
        """Return places for the copies of a piece of a prompt: at regular intervals, after its last
        full block, and after the last block that was computed before without a checkpoint (others
        have the same beginning). The same prompt needs its last token again, and the block before
        if that is the end of one."""
        if self._checkpoints is None or part.n_new == 1:
            return {}
        end, size = part.before + part.n_new, self._block_size
        full = end - 1 if end == part.request.prompt_tokens else end
        interval = self._checkpoints.prompt_blocks * size
        first = (part.before // interval + 1) * interval
        wanted = {*range(first, full + 1, interval), full // size * size, part.request.known}
        return {seen: {} for seen in wanted if part.before < seen <= end}

    def _copy_states(self, parts: Sequence[Part]) -> None:
        """Copy the states of parts of one token that end a block worth keeping."""
        if self._checkpoints is None:
            return
        size = self._block_size
        interval = self._checkpoints.answer_blocks * size
        for request, before, n_new in parts:
            seen = before + 1
            prompt = (request.prompt_tokens - 1) // size * size
            if n_new == 1 and (seen % interval == 0 or seen in (request.known, prompt)):
                request.checkpoints[seen] = self.memory.copy_out(self.slot(request))

    def begin(
        self, parts: Sequence[Part], copies: Sequence[Mapping[int, States]] = ()
    ) -> list[StateSpan]:
        """Return the states that a pass changes. `copies` are those that it makes of each part, by
        the number of tokens they have seen."""
        self._forget_freed(parts)
        found = []
        for (request, before, _), wanted in zip(parts, copies or [{}] * len(parts), strict=True):
            self._seen.pop(request, None)
            # copies of a pass that is not wanted
            for seen in [each for each in request.checkpoints if each > before]:
                del request.checkpoints[seen]
            inside = [(seen - before, states) for seen, states in sorted(wanted.items())]
            in_prompt = before < request.prompt_tokens
            found.append(StateSpan(self.slot(request), not before, inside, in_prompt))
        return found

    def may_step(self, parts: Sequence[Part]) -> bool:
        """Return whether a decoding step may compute parts of one token. It reads states: a
        sequence that begins has none."""
        in_prompt = any(part.before < part.request.prompt_tokens for part in parts)
        differs = in_prompt and self.memory.differs_in_prompts
        return not differs and all(part.before for part in parts)

    def resume(self, request: Request) -> int:
        """Return the slot of a request that continues from a checkpoint, which is copied there."""
        self._forget_freed()
        self._seen[request] = request.computed
        return self.slot(request)

    def _forget_freed(self, parts: Sequence[Part] = ()) -> None:
        # the pass before this one may not be recorded yet
        begun = {part.request for part in parts if part.before}
        for request in [each for each in self._slots if not each.computed and each not in begun]:
            self.forget(request)  # it has given its blocks back

    def slot(self, request: Request) -> int:
        """Return the slot of a request, which gets one if it has none."""
        if request not in self._slots:
            self._slots[request] = self._free.pop()
        return self._slots[request]

    def _end(self, parts: Sequence[Part]) -> None:
        """Record that a pass was computed, as far as the host knows."""
        self._seen.update({request: before + n for request, before, n in parts})

    def forget(self, request: Request) -> None:
        """Free the slot of a request; no-op if it has none."""
        slot = self._slots.pop(request, None)
        self._seen.pop(request, None)
        if slot is not None:
            self._free.append(slot)

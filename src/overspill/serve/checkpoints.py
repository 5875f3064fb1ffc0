"""States after full blocks of prompts and answers, from which other requests continue."""

from collections import OrderedDict

from overspill.models.huggingface.recurrent import States, states_bytes

ANSWER_BLOCKS = 8
"""An answer keeps its state whenever so many more blocks are full: a copy takes about as long as
half a decoding step."""
PROMPT_BLOCKS = 128
"""Distance of states that are kept in a prompt, in full blocks: another prompt that begins in the
same way computes fewer tokens than these again."""


class Checkpoints:
    """Copies of states in host memory, each after a full block of the pool: at most `limit` bytes.
    Copies unused for longest are freed first."""

    def __init__(
        self,
        limit: int,
        answer_blocks: int = ANSWER_BLOCKS,
        prompt_blocks: int = PROMPT_BLOCKS,
    ) -> None:
        self.limit = limit
        self.answer_blocks = answer_blocks
        self.prompt_blocks = prompt_blocks
        self.nbytes = 0
        self._found: OrderedDict[int, States] = OrderedDict()  # by the numbers of contents

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, number: int) -> bool:
        return number in self._found

    def put(self, number: int, states: States) -> None:
        """Keep the states after a content; no-op if it has a checkpoint already, or if they are
        larger than the limit."""
        size = states_bytes(states)
        if number in self._found:
            self._found.move_to_end(number)
        elif size <= self.limit:
            self._found[number] = states
            self.nbytes += size
        while self.nbytes > self.limit:
            self.drop(next(iter(self._found)))

    def use(self, number: int) -> States:
        """Return the states after a content."""
        self._found.move_to_end(number)
        return self._found[number]

    def drop(self, number: int) -> None:
        """Free a checkpoint; no-op if there is none."""
        self.nbytes -= states_bytes(self._found.pop(number, {}))

    def clear(self) -> None:
        self._found.clear()
        self.nbytes = 0

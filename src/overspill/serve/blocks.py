"""Blocks of a key-value cache: which are free, and which hold the beginning of a prompt."""

from collections import OrderedDict
from collections.abc import Sequence

from overspill.models.huggingface.recurrent import States
from overspill.serve.checkpoints import Checkpoints

_ROOT = 0

Key = tuple[int, tuple[int, ...]]
"""Content of a full block: the number of the block before it, and its tokens."""


class BlockPool:
    """Blocks of `size` tokens. Full blocks are found again by their tokens and those before them,
    so that requests with a common beginning share them. A block that no request uses keeps its
    content until it is needed; the one unused for longest goes first."""

    def __init__(
        self, n_blocks: int, size: int, share: bool = True, checkpoints: Checkpoints | None = None
    ) -> None:
        """Without `share` no block is found again. With `checkpoints`, a beginning is shared up to
        a block that has one."""
        self.size = size
        self.checkpoints = checkpoints
        self._share = share
        self.n_blocks = n_blocks
        self._users = [0] * n_blocks
        self._unused: OrderedDict[int, None] = OrderedDict.fromkeys(range(n_blocks))
        self._found: dict[Key, int] = {}  # full blocks
        self._keys: dict[int, Key] = {}  # of full blocks
        self._numbers = [_ROOT] * n_blocks  # of each content, never used twice
        self._last_number = _ROOT

    @property
    def n_free(self) -> int:
        return len(self._unused)

    def take(self) -> int | None:
        """A block for one request; None if all are in use."""
        if not self._unused:
            return None
        block, _ = self._unused.popitem(last=False)
        key = self._keys.pop(block, None)
        if key is not None:
            del self._found[key]
            if self.checkpoints is not None:
                self.checkpoints.drop(self._numbers[block])
        self._last_number += 1
        self._numbers[block] = self._last_number
        self._users[block] = 1
        return block

    def share(self, tokens: Sequence[int]) -> list[int]:
        """The blocks that hold the beginning of `tokens`, which get one more user. At least one
        token is left to compute."""
        blocks = self.find(tokens)
        while self.checkpoints is not None and blocks:
            if self._numbers[blocks[-1]] in self.checkpoints:
                break
            blocks.pop()
        for block in blocks:
            self._users[block] += 1
            self._unused.pop(block, None)
        return blocks

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The blocks that hold the beginning of `tokens`, with or without a checkpoint."""
        blocks: list[int] = []
        number = _ROOT
        for start in range(0, len(tokens) - self.size, self.size):
            block = self._found.get((number, tuple(tokens[start : start + self.size])))
            if block is None:
                break
            number = self._numbers[block]
            blocks.append(block)
        return blocks

    def states(self, block: int) -> States:
        """The checkpoint of the last one of shared blocks."""
        assert self.checkpoints is not None
        return self.checkpoints.use(self._numbers[block])

    def keep(self, block: int, states: States) -> None:
        """The checkpoint of a full block."""
        if self.checkpoints is not None:
            self.checkpoints.put(self._numbers[block], states)

    def drop(self, block: int) -> None:
        """The checkpoint of a block is of no use any more; no-op if it has none."""
        if self.checkpoints is not None:
            self.checkpoints.drop(self._numbers[block])

    def fill(self, block: int, before: int | None, tokens: Sequence[int]) -> None:
        """A block is full: it follows `before` and holds `tokens`. No-op if another block holds the
        same."""
        assert len(tokens) == self.size
        if not self._share:
            return
        key = (_ROOT if before is None else self._numbers[before], tuple(tokens))
        if key in self._found:  # the next block is found after either
            self._numbers[block] = self._numbers[self._found[key]]
            return
        self._found[key] = block
        self._keys[block] = key

    def forget(self) -> None:
        """No block is found again: the contents are of other weights."""
        self._found.clear()
        self._keys.clear()
        if self.checkpoints is not None:
            self.checkpoints.clear()

    def release(self, blocks: Sequence[int]) -> None:
        """A request uses these no longer; the last ones are reused first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            assert self._users[block] >= 0
            if self._users[block] == 0:
                self._unused[block] = None
                if block not in self._keys:
                    self._unused.move_to_end(block, last=False)

    def check_conserved(self) -> None:
        """Every block is either used or free."""
        used = sum(count > 0 for count in self._users)
        assert used + len(self._unused) == self.n_blocks
        assert all(self._keys[block] == key for key, block in self._found.items())

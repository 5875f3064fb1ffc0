"""Blocks of a cache of keys and values: free blocks, and blocks with the beginning of a prompt."""

from collections import OrderedDict
from collections.abc import Sequence

from overspill.models.huggingface.recurrent import States
from overspill.serve.checkpoints import Checkpoints

_ROOT = 0

Key = tuple[int, tuple[int, ...]]
"""Content of a full block: the number of the block before it, and its tokens."""


class BlockPool:
    """Blocks of `size` tokens. Full blocks are found again by their tokens and the tokens before
    them, so that requests with a common beginning share them. A block that no request uses keeps
    its content until it is needed; the block unused for longest is reused first."""

    def __init__(
        self, n_blocks: int, size: int, share: bool = True, checkpoints: Checkpoints | None = None
    ) -> None:
        """Without `share` no block is found again. With `checkpoints`, a beginning is shared up to
        a block that has one."""
        self.size = size
        self.needs_checkpoints = checkpoints is not None
        self.checkpoints = Checkpoints(0) if checkpoints is None else checkpoints
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
        """Return a block for one request; None if all are in use."""
        if not self._unused:
            return None
        block, _ = self._unused.popitem(last=False)
        key = self._keys.pop(block, None)
        if key is not None:
            del self._found[key]
            self.checkpoints.drop(self._numbers[block])
        self._last_number += 1
        self._numbers[block] = self._last_number
        self._users[block] = 1
        return block

    def share(self, tokens: Sequence[int]) -> list[int]:
        """Return the blocks that hold the beginning of `tokens`, which get one more user. At least
        one token is left to compute."""
        blocks = self.find(tokens)
        if self.needs_checkpoints:
            while blocks and self._numbers[blocks[-1]] not in self.checkpoints:
                blocks.pop()
        for block in blocks:
            self._users[block] += 1
            self._unused.pop(block, None)
        return blocks

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Return the blocks that hold the beginning of `tokens`, with or without a checkpoint."""
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
        """Return the checkpoint of the last one of shared blocks."""
        return self.checkpoints.use(self._numbers[block])

    def keep(self, block: int, states: States) -> None:
        """Keep states as the checkpoint of a full block."""
        self.checkpoints.put(self._numbers[block], states)

    def drop(self, block: int) -> None:
        """Free the checkpoint of a block; no-op if it has none."""
        self.checkpoints.drop(self._numbers[block])

    def fill(self, block: int, before: int | None, tokens: Sequence[int]) -> None:
        """Record a full block, which follows `before` and holds `tokens`, so that it is found. A
        block with the same content may be found instead."""
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
        """Find no block again: weights have changed since the contents were computed."""
        self._found.clear()
        self._keys.clear()
        self.checkpoints.clear()

    def release(self, blocks: Sequence[int]) -> None:
        """Count one user less of these blocks; the last ones are reused first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            assert self._users[block] >= 0
            if self._users[block] == 0:
                self._unused[block] = None
                if block not in self._keys:
                    self._unused.move_to_end(block, last=False)

    def check_conserved(self) -> None:
        """Assert that every block is either used or free."""
        used = sum(count > 0 for count in self._users)
        assert used + len(self._unused) == self.n_blocks
        assert all(self._keys[block] == key for key, block in self._found.items())

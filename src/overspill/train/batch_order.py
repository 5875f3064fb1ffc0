"""The order in which a run reads its data: a pure function of the seed and the position."""

import numpy as np
import numpy.typing as npt


class BatchOrder:
    """Order of `count` items, in a new permutation for every epoch.

    The position of a run in its data is one integer: the number of items read so far.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self._epoch = -1
        self._permutation: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def take(self, position: int, most: int) -> list[int]:
        """Items after the first `position` ones, up to the end of the epoch."""
        epoch, start = divmod(position, self._count)
        if epoch != self._epoch:
            # seed and epoch alone determine the generator: any position can be entered directly
            generator = np.random.default_rng((self._seed, epoch))
            self._epoch, self._permutation = epoch, generator.permutation(self._count)
        return [int(item) for item in self._permutation[start : start + most]]

    def take_across(self, position: int, count: int) -> list[int]:
        """The `count` items after the first `position` ones, also from later epochs."""
        items: list[int] = []
        while len(items) < count:
            items += self.take(position + len(items), count - len(items))
        return items

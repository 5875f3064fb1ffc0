"""Rows → batches. The order is a pure function of the seed: rows read so far are one integer."""

from collections.abc import Sequence

import numpy as np
import torch

from overspill.train.finetune.rows import IGNORED, Ids, Row

Batch = dict[str, torch.Tensor]


class Order:
    """Every epoch its own permutation of `count` rows."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    def take(self, position: int, most: int) -> list[int]:
        """The next rows when `position` have been read, up to the end of the epoch."""
        epoch, at = divmod(position, self._count)
        if epoch != self._epoch:
            generator = np.random.default_rng((self._seed, epoch))
            self._epoch, self._permutation = epoch, generator.permutation(self._count)
        return [int(row) for row in self._permutation[at : at + most]]


def collate(rows: Sequence[Row], pad: int, device: torch.device) -> Batch:
    """Rows side by side, padded on the right."""
    tokens = [row.tokens for row in rows]
    batch = {
        "input_ids": _padded(tokens, pad),
        "attention_mask": _padded([np.ones_like(row) for row in tokens], 0),
        "labels": _padded([row.labels for row in rows], IGNORED),
    }
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


def _padded(rows: Sequence[Ids], fill: int) -> torch.Tensor:
    out = np.full((len(rows), max(len(row) for row in rows)), fill, dtype=np.int64)
    for number, row in enumerate(rows):
        out[number, : len(row)] = row
    return torch.from_numpy(out)

"""Rows → batches."""

from collections.abc import Sequence

import numpy as np
import torch

from overspill.train.finetune.rows import IGNORED, Ids, Row

Batch = dict[str, torch.Tensor]


def collate(rows: Sequence[Row], pad: int, device: torch.device) -> Batch:
    """A batch of rows, padded on the right."""
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

"""A row: one sequence of a batch, with its tokens and labels; and batches of rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from overspill.core.errors import ConfigError

IGNORED = -100  # the label that losses of transformers ignore

Ids = npt.NDArray[np.int32]
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Row:
    """Tokens and labels of equal length, where a label is the token itself or IGNORED. For an
    encoder-decoder model `tokens` is the source and `labels` the target."""

    where: str
    tokens: Ids
    labels: Ids

    @property
    def learned(self) -> int:
        return int((self.labels != IGNORED).sum())


def ids(tokens: Sequence[int]) -> Ids:
    return np.asarray(tokens, dtype=np.int32)


def make_row(where: str, tokens: Sequence[int], learn: Sequence[bool]) -> Row:
    row = ids(tokens)
    return Row(where, row, np.where(np.asarray(learn, dtype=bool), row, np.int32(IGNORED)))


def without_first_label(row: Row) -> Row:
    """The row with its first label ignored: no token precedes it."""
    labels = row.labels.copy()
    labels[:1] = IGNORED
    return Row(row.where, row.tokens, labels)


def split(row: Row, seq_len: int) -> list[Row]:
    """The row, cut into pieces of at most `seq_len` tokens."""
    return [
        Row(row.where, row.tokens[at : at + seq_len], row.labels[at : at + seq_len])
        for at in range(0, len(row.tokens), seq_len)
    ]


def shorten(row: Row, seq_len: int, truncate: bool, keep_end: bool) -> Row:
    """The row with at most `seq_len` tokens, or an error that names its line. With `keep_end` the
    start is cut: the learned tokens are at the end."""
    length = max(len(row.tokens), len(row.labels))
    if length <= seq_len:
        return row
    if not truncate:
        raise too_long(row.where, length, seq_len)
    if not keep_end:
        return Row(row.where, row.tokens[:seq_len], row.labels[:seq_len])
    # do not cut the answer before the whole prompt is cut
    start = min(length - seq_len, int(np.argmax(row.labels != IGNORED)))
    end = start + seq_len
    return Row(row.where, row.tokens[start:end], row.labels[start:end])


def too_long(where: str, length: int, seq_len: int) -> ConfigError:
    return ConfigError(
        f"{where}: {length} tokens exceed --seq-len {seq_len}; raise it, or give --truncate to cut "
        "such examples"
    )


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

"""Packs several examples into one row, to avoid padding."""

import bisect
from collections.abc import Sequence

import numpy as np

from overspill.train.finetune.rows import IGNORED, Ids, Row


def pack_cut(rows: Sequence[Row], seq_len: int) -> list[Row]:
    """Concatenates all rows and cuts every `seq_len` tokens; for text, which may start anywhere."""
    tokens = np.concatenate([row.tokens for row in rows])
    labels = np.concatenate([row.labels for row in rows])
    return [
        Row("packed", tokens[at : at + seq_len], labels[at : at + seq_len])
        for at in range(0, len(tokens), seq_len)
    ]


def pack_whole(rows: Sequence[Row], seq_len: int, separator: Ids) -> list[Row]:
    """Packs whole rows with `separator` between them: an answer keeps its question. Best fit,
    longest rows first."""
    bins: list[list[Row]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), sorted
    for row in sorted(rows, key=lambda row: -len(row.tokens)):
        need = len(row.tokens) + len(separator)
        at = bisect.bisect_left(room, (need, -1))
        if at < len(room):
            free, chosen = room.pop(at)
            bins[chosen].append(row)
            bisect.insort(room, (free - need, chosen))
        else:
            bisect.insort(room, (seq_len - len(row.tokens), len(bins)))
            bins.append([row])
    return [_join(members, separator) for members in bins]


def _join(rows: Sequence[Row], separator: Ids) -> Row:
    silent = np.full_like(separator, IGNORED)
    tokens, labels = [rows[0].tokens], [rows[0].labels]
    for row in rows[1:]:
        if len(separator) and tokens[-1][-1] != separator[-1]:
            tokens.append(separator)
            labels.append(silent)
        tokens.append(row.tokens)
        labels.append(row.labels)
    return Row("packed", np.concatenate(tokens), np.concatenate(labels))

"""The tasks of bench/pregate_quality.py: text of wikitext-2, sentences of SST-2.

FOLDER/wikitext-2/train.txt.gz and valid.txt.gz, FOLDER/sst2/train.tsv.gz and test.tsv.gz: 6 MB.
"""

import gzip
import math
from collections.abc import Iterator, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from sst2 import make_tokenizer
from tokenizers import Tokenizer
from torch import Tensor

from overspill.models import GPTMoE
from overspill.train.batch_order import BatchOrder
from overspill.train.data import Windows
from overspill.train.finetune.classification import (
    Choice,
    ChoiceRows,
    LabelForm,
    encode_choices,
)
from overspill.train.finetune.evaluation import chosen, row_losses
from overspill.train.finetune.examples import read_examples
from overspill.train.finetune.kinds import Labelled
from overspill.train.finetune.rows import Row, collate

WIKITEXT, SST2 = "wikitext-2", "sst2"
FILES = {
    WIKITEXT: ("wikitext-2/train.txt.gz", "wikitext-2/valid.txt.gz"),
    SST2: ("sst2/train.tsv.gz", "sst2/test.tsv.gz"),
}
PROMPT, LABELS = " {sentence} it was", ("bad", "good")
END = "<|endoftext|>"


class Task(Protocol):
    """Batches to train on, and one figure of a model."""

    def batches(self, seed: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless tokens and targets, [size, S] each; -100 is no target."""
        ...

    def evaluate(self, model: GPTMoE) -> float: ...


class Wikitext:
    """Windows of tokens. The figure is the perplexity per token of the validation text, in windows
    without earlier context."""

    def __init__(
        self, folder: Path, vocab: int, seq_len: int, characters: int | None, device: str
    ) -> None:
        texts = [_read(folder / name, characters) for name in FILES[WIKITEXT]]
        self.tokenizer = make_tokenizer(texts[0], vocab)
        self.train, self.valid = (Windows(_encode(self.tokenizer, text), seq_len) for text in texts)
        self.device = device

    def batches(self, seed: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = BatchOrder(len(self.train), seed)
        for step in count():
            yield self._windows(self.train, order.take_across(step * size, size))

    def _windows(self, windows: Windows, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        tokens, targets = windows.batch(numbers)
        return tokens.to(self.device), targets.to(self.device)

    @torch.no_grad()
    def evaluate(self, model: GPTMoE) -> float:
        model.eval()
        total = torch.zeros((), device=self.device)
        for first in range(0, len(self.valid), 64):
            numbers = range(first, min(first + 64, len(self.valid)))
            cross_entropy = model(*self._windows(self.valid, numbers)).ce
            assert cross_entropy is not None
            total += cross_entropy * len(numbers)
        model.train()
        return math.exp(total.item() / len(self.valid))


class Sst2:
    """Sentences followed by a word for their label, the only token that is learned. The figure is
    the share of test sentences (the development set of GLUE) whose word is the likelier one."""

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, seq_len: int, most: int | None, device: str
    ) -> None:
        from transformers import PreTrainedTokenizerFast

        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
        form = LabelForm(LABELS, PROMPT, " {label}", seq2seq=False)

        def read(name: str) -> list[Choice]:
            items = read_examples([str(folder / name)]).items[:most]
            examples = [item for item in items if isinstance(item, Labelled)]
            return encode_choices(fast, examples, form, seq_len, truncate=True)

        train, self.test = (read(name) for name in FILES[SST2])
        self.train = [choice.right for choice in train]
        self.pad, self.device = fast.eos_token_id, torch.device(device)

    def batches(self, seed: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = BatchOrder(len(self.train), seed)
        for step in count():
            numbers = order.take_across(step * size, size)
            rows = self._collate([self.train[number] for number in numbers])
            yield rows["input_ids"][:, :-1], rows["labels"][:, 1:]

    def _collate(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        return collate(rows, self.pad, self.device)

    @torch.no_grad()
    def evaluate(self, model: GPTMoE) -> float:
        model.eval()

        def logits(input_ids: Tensor, **_: object) -> Any:
            return model(input_ids)  # causal attention needs no mask for padding on the right

        losses = row_losses(logits, ChoiceRows(self.test), 128, self._collate, seq2seq=False)
        picked = chosen(losses, self.test)
        model.train()
        hits = sum(number == choice.label for number, choice in zip(picked, self.test, strict=True))
        return hits / len(self.test)


def _read(file: Path, characters: int | None) -> list[str]:
    """The lines of a text."""
    with gzip.open(file, "rt", encoding="utf-8") as text:
        return text.read(characters or -1).splitlines(keepends=True)


def _encode(tokenizer: Tokenizer, lines: list[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    encoded = tokenizer.encode_batch(lines)
    return np.fromiter(chain.from_iterable(one.ids for one in encoded), dtype=np.int64)

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralForCausalLM

from overspill.train.finetune.classification import ChoiceRows, LabelForm, encode_choices
from overspill.train.finetune.evaluation import chosen, mean_loss, row_losses, summed_losses
from overspill.train.finetune.kinds import Labelled
from overspill.train.finetune.rows import IGNORED, Batch, Row, collate, make_row
from tests.train.finetune.tiny import make_tokenizer, mixtral_config


def _collate(rows: list[Row]) -> Batch:
    return collate(rows, pad=257, device=torch.device("cpu"))


def _rows() -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    rows = []
    for length in (5, 9, 2, 7, 3):
        tokens = torch.randint(0, 250, (length,), generator=generator).tolist()
        rows.append(make_row("f:1", tokens, [at >= length // 2 for at in range(length)]))
    return rows


def test_losses_are_those_that_the_model_itself_gives() -> None:
    model = MixtralForCausalLM(mixtral_config()).eval()
    rows = _rows()
    losses = row_losses(model, rows, 2, _collate, seq2seq=False)
    for row, loss in zip(rows, losses, strict=True):
        alone = model(
            input_ids=torch.tensor(row.tokens[None]).long(),
            labels=torch.tensor(row.labels[None]).long(),
        )
        assert loss == pytest.approx(alone.loss.item() * row.learned, rel=1e-5)
    whole = _collate(rows)
    assert mean_loss(losses, rows) == pytest.approx(model(**whole).loss.item(), rel=1e-5)


def test_targets_of_an_encoder_decoder_are_not_shifted() -> None:
    logits = torch.randn(2, 3, 5)
    labels = torch.tensor([[1, 2, 3], [4, IGNORED, IGNORED]])
    logprobs = logits.log_softmax(-1)
    expected = [-sum(logprobs[0, t, t + 1] for t in range(3)), -logprobs[1, 0, 4]]
    found = summed_losses(logits, labels, seq2seq=True)
    assert found.tolist() == pytest.approx([float(value) for value in expected])


def test_the_chosen_label_is_the_most_likely_completion() -> None:
    """Against the product of probabilities, token by token, each from its own forward."""
    tokenizer = make_tokenizer()
    model = MixtralForCausalLM(mixtral_config()).eval()
    words = ("no", "yes", "may be")
    form = LabelForm(words, "{sentence}:", " {label}", seq2seq=False)
    examples = [Labelled(f"f:{n}", "x" * n + "y", "0") for n in range(1, 7)]
    choices = encode_choices(tokenizer, examples, form, 64, truncate=False)
    rows = ChoiceRows(choices)
    picked = chosen(row_losses(model, rows, 4, _collate, seq2seq=False), choices)
    for example, pick in zip(examples, picked, strict=True):
        scores = []
        for word in words:
            prompt, score = tokenizer(f"{example.sentence}:")["input_ids"], 0.0
            for token in tokenizer(f" {word}")["input_ids"]:
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
                score += logits.log_softmax(-1)[token].item()
                prompt = [*prompt, token]
            scores.append(score)
        assert scores[pick] == max(scores)


def test_rows_are_read_batch_by_batch() -> None:
    read: list[slice] = []
    calls: list[int] = []

    class Rows(list[Row]):
        def __getitem__(self, at: Any) -> Any:
            read.append(at)
            return super().__getitem__(at)

    def model(input_ids: Tensor, **_: object) -> Any:
        calls.append(len(input_ids))
        assert len(read) == len(calls), "no more batches are read than computed"
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 300))

    assert len(row_losses(model, Rows(_rows()), 2, _collate, seq2seq=False)) == 5  # type: ignore[arg-type]
    assert calls == [2, 2, 1]

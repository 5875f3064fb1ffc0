import torch

from overspill.train.finetune.batches import collate
from overspill.train.finetune.rows import IGNORED, Row, ids, make_row


def test_padding_is_on_the_right_masked_and_not_learned() -> None:
    rows = [make_row("a", [1, 2, 3], [False, True, True]), make_row("b", [4], [True])]
    batch = collate(rows, pad=9, device=torch.device("cpu"))
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORED, 2, 3], [4, IGNORED, IGNORED]]


def test_source_and_target_are_padded_each_to_its_own_length() -> None:
    rows = [Row("a", ids([1]), ids([2, 3])), Row("b", ids([4, 5, 6]), ids([7]))]
    batch = collate(rows, pad=0, device=torch.device("cpu"))
    assert batch["input_ids"].tolist() == [[1, 0, 0], [4, 5, 6]]
    assert batch["labels"].tolist() == [[2, 3], [7, IGNORED]]

import torch

from overspill.train.finetune.batches import Order, collate
from overspill.train.finetune.rows import IGNORED, Row, ids, make_row


def test_every_epoch_has_each_row_once_in_its_own_order() -> None:
    order = Order(10, seed=3)
    epochs = []
    for epoch in range(3):
        taken: list[int] = []
        while len(taken) < 10:
            taken += order.take(10 * epoch + len(taken), 4)
        assert sorted(taken) == list(range(10))
        epochs.append(taken)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_on_seed_and_position_alone() -> None:
    order = Order(10, seed=3)
    order.take(17, 4)
    assert order.take(4, 4) == Order(10, seed=3).take(4, 4)
    assert Order(10, seed=3).take(0, 10) != Order(10, seed=4).take(0, 10)


def test_a_step_ends_with_its_epoch() -> None:
    assert len(Order(10, seed=0).take(8, 4)) == 2


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

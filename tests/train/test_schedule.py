import itertools

import pytest
import torch

from overspill.train.schedule import lr_share, make_scheduler


def test_the_rate_rises_then_falls_to_its_share() -> None:
    shares = [lr_share(step, warmup=4, steps=20, min_share=0.1) for step in range(21)]
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(a > b for a, b in itertools.pairwise(shares[4:]))
    assert shares[20] == pytest.approx(0.1)
    assert lr_share(50, 4, 20, 0.1) == pytest.approx(0.1)


@pytest.mark.parametrize("done", [0, 1, 7])
def test_a_schedule_entered_in_the_middle_is_the_same_schedule(done: int) -> None:
    def rates(start: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
        scheduler = make_scheduler(optimizer, start, warmup=3, steps=10, min_share=0.1)
        found = []
        for _ in range(start, 10):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    assert rates(done) == rates(0)[done:]

"""Engines whose uploads a native thread carries, over a link that is late: exact too."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from overspill.moe import streaming, waves
from overspill.moe.settings import Settings
from overspill.tiers.store import ExpertStore
from overspill.transfer.lanes import Lane
from overspill.transfer.loader import Loader
from overspill.transfer.ported import PortedLoader
from overspill.transfer.porter import porter_library
from tests.moe.oracle import Task, assert_follows, plain_run, spilled_run
from tests.moe.test_sharing import at_random, shared_run
from tests.transfer.test_ported import LateLink

pytestmark = pytest.mark.skipif(porter_library() is None, reason="no C++ compiler")

TASKS = {
    "plain": Task(steps=8),
    "clipped, accumulated, checkpointed": Task(steps=6, clip=0.5, micro_batches=2, checkpoint=True),
    "an expert without tokens": Task(steps=8, starve=True, weight_decay=3.0),
}


class LateLoader(PortedLoader):
    """Its copies and numbers come some time after they were issued."""

    def __init__(self, seed: int, *args: ExpertStore | Tensor | Lane | int) -> None:
        self._link = LateLink(seed)
        super().__init__(*args, self._link)  # type: ignore[arg-type]

    def close(self) -> None:
        super().close()
        self._link.finish()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Loader]:
    """The loaders that engines were given."""
    loaders: list[Loader] = []
    seeds = itertools.count()

    def late(*args: ExpertStore | Tensor | Lane | int) -> Loader:
        loaders.append(LateLoader(next(seeds), *args))
        return loaders[-1]

    monkeypatch.setattr(streaming, "new_loader", late)
    # on a CPU the thread that computes is the stream
    monkeypatch.setattr(waves, "compute_waits", lambda device, mark: mark.wait())
    return loaders


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("where", ["host with 2 slots", "host with 12 slots"])
@pytest.mark.parametrize("name", TASKS)
def test_training_follows_plain_pytorch(
    name: str,
    where: str,
    small: bool,
    made: list[Loader],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if small:
        in_pieces(monkeypatch.setattr)
    task = TASKS[name]
    assert_follows(spilled_run(task, where, tmp_path), plain_run(task))
    assert made


@pytest.mark.parametrize("where", ["host with 5 slots", "host with 12 slots"])
def test_any_split_follows_plain_pytorch(
    where: str, made: list[Loader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_pieces(monkeypatch.setattr)
    task = Task(steps=8)
    run = shared_run(task, where, tmp_path, Settings(), at_random(11))
    assert_follows(run, plain_run(task))
    assert made


def in_pieces(set_to: Callable[[str, int], None]) -> None:
    """Records of several pieces, few of them on their way."""
    set_to("overspill.transfer.loader._PIECE", 512)
    set_to("overspill.transfer.loader._SURE_BYTES", 2048)
    set_to("overspill.transfer.loader.ALIGN", 64)

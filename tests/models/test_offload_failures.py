"""`offload` that fails or is interrupted leaves the model as it was, and no thread, file or memory.
The injected faults do not know the procedure: they occur at calls that are spread over it."""

import dataclasses
import errno
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from tests.models.huggingface.families import make_batch, make_model
from tests.models.huggingface.oracle import MODES, budgets
from tests.models.huggingface.test_exactness import BY_NAME
from tests.pairs import all_pairs
from tests.slow import slow_rows

CONFIG = GPTConfig(
    vocab=32, n_layers=2, d_model=16, d_hidden=16, n_heads=2, n_experts=4, top_k=2, max_seq=16
)
PACKAGE = str(Path(overspill.__file__).parent)


class Fault:
    """Calls `fail` at one call of a function of the package; counts the calls of this thread."""

    def __init__(self, at: int | None, fail: Callable[[], None]) -> None:
        self.calls = 0
        self._at, self._fail = at, fail

    def _seen(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        # errors in a generator that is being collected are ignored by Python
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "<genexpr>":
            self.calls += 1
            if self.calls == self._at:
                self._fail()

    @contextmanager
    def injected(self) -> Iterator[None]:
        handler = signal.getsignal(signal.SIGINT)
        gc.disable()  # models of other tests call the package as well when they are collected
        sys.setprofile(self._seen)
        try:
            yield
        finally:
            sys.setprofile(None)
            gc.enable()
            signal.signal(signal.SIGINT, handler)


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def run_out_of_memory() -> None:
    raise MemoryError


FAILURES = {"ctrl-c": (press_ctrl_c, KeyboardInterrupt), "error": (run_out_of_memory, MemoryError)}


def leftovers(folder: Path) -> list[str]:
    """Threads of an engine, and files in `folder`, also those that are open and have no name."""
    threads = [t.name for t in threading.enumerate() if t.name.startswith("overspill-")]
    names = [str(path) for path in folder.rglob("*")]
    descriptors = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    opened = [os.readlink(path) for path in descriptors if os.path.islink(path)]
    return threads + names + [path for path in opened if path.startswith(str(folder))]


class Subject:
    """A model, and what must not change."""

    def __init__(self, name: str) -> None:
        self.model: Any
        self.batch: dict[str, Tensor]
        if name == "gpt":
            self.model = GPTMoE(CONFIG, seed=1)
            self.batch = {"tokens": torch.arange(16).view(1, 16)}
        else:
            self.model = make_model(BY_NAME[name])
            self.batch = make_batch(BY_NAME[name], self.model)
        self._parameters = dict(self.model.named_parameters())
        self._values = {key: value.clone() for key, value in self.model.state_dict().items()}
        self._kinds = self.kinds()
        self._logits = self.logits()

    def kinds(self) -> list[tuple[str, type[nn.Module]]]:
        return [(path, type(module)) for path, module in self.model.named_modules()]

    def logits(self) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.model(**self.batch).logits
            return logits

    def assert_unchanged(self) -> None:
        now = dict(self.model.named_parameters())
        assert not hasattr(self.model, "overspill")
        assert self.kinds() == self._kinds
        assert now.keys() == self._parameters.keys()
        assert all(now[name] is before for name, before in self._parameters.items())
        values = self.model.state_dict()
        assert values.keys() == self._values.keys()
        assert all(torch.equal(values[key], before) for key, before in self._values.items())
        assert torch.equal(self.logits(), self._logits)

    def offload(self, mode: str, folder: Path) -> Any:
        return overspill.offload(self.model, **budgets(mode, folder))

    def assert_offloads(self, mode: str, folder: Path) -> None:
        """Nothing that is left prevents a second attempt."""
        self.offload(mode, folder)
        torch.testing.assert_close(self.logits(), self._logits, rtol=1e-5, atol=1e-5)
        self.model.overspill.close()


def calls_of(build: Callable[[], Any]) -> int:
    """Calls of the package's functions while a model is built; the first time there are more."""
    build().overspill.close()
    counted = Fault(None, press_ctrl_c)
    with counted.injected():
        model = build()
    model.overspill.close()
    return counted.calls


def spread(calls: int, count: int, offset: int) -> range:
    stride = max(1, calls // count)
    return range(1 + offset % stride, calls + 1, stride)


@pytest.mark.parametrize(
    ("name", "failure", "mode"),
    slow_rows(
        all_pairs(["gpt", "mixtral", "switch_transformers"], list(FAILURES), list(MODES)), 6, 8
    ),
)
def test_a_model_whose_offload_fails_is_what_it_was(
    name: str, failure: str, mode: str, tmp_path: Path
) -> None:
    fail, error = FAILURES[failure]
    subject, *others = [Subject(name) for _ in range(3)]
    calls = calls_of(lambda: others.pop().offload(mode, tmp_path))
    # different calls for each of the parameters of this test
    for at in spread(calls, 4, sum(map(ord, name + failure + mode))):
        with Fault(at, fail).injected(), pytest.raises(error):
            subject.offload(mode, tmp_path)
        subject.assert_unchanged()
        assert not leftovers(tmp_path), at
    subject.assert_offloads(mode, tmp_path)


@pytest.mark.parametrize(("failure", "mode"), slow_rows(product(FAILURES, ["host", "disk"]), 0, 3))
def test_a_failed_load_leaves_no_thread_and_no_file(
    failure: str, mode: str, tmp_path: Path
) -> None:
    fail, error = FAILURES[failure]
    make_model(BY_NAME["mixtral"]).save_pretrained(tmp_path / "checkpoint")
    spill = tmp_path / "spill"

    def load() -> Any:
        return overspill.load(tmp_path / "checkpoint", **budgets(mode, spill))

    for at in spread(calls_of(load), 3, 7):
        with Fault(at, fail).injected(), pytest.raises(error):
            load()
        assert not leftovers(spill), at


@pytest.mark.parametrize("failure", slow_rows(FAILURES, 1))
def test_a_failed_from_config_leaves_no_thread_and_no_file(failure: str, tmp_path: Path) -> None:
    fail, error = FAILURES[failure]
    config = make_model(BY_NAME["mixtral"]).config

    def build() -> Any:
        return overspill.from_config(config, **budgets("disk", tmp_path))

    for at in spread(calls_of(build), 3, 11):
        with Fault(at, fail).injected(), pytest.raises(error):
            build()
        assert not leftovers(tmp_path), at


def test_a_system_that_allows_no_more_threads_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, start, allowed, count = Subject("gpt"), threading.Thread.start, 0, 0

    def limited(thread: threading.Thread) -> None:
        nonlocal count
        count += 1
        if count > allowed:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    while allowed < 60:
        count = 0
        try:
            subject.offload("disk", tmp_path)
            break
        except RuntimeError:
            subject.assert_unchanged()
            assert not leftovers(tmp_path), allowed
        allowed += 1
    assert allowed > 2
    subject.model.overspill.close()


def test_a_full_disk_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, write, writes = Subject("gpt"), os.pwritev, 0

    def full_after_two(fd: int, buffers: Any, at: int) -> int:
        nonlocal writes
        writes += 1
        if writes > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, buffers, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full_after_two)
        with pytest.raises(overspill.OverspillError, match=rf"{tmp_path}.*No space left.*--disk"):
            subject.offload("disk", tmp_path)
    subject.assert_unchanged()
    assert not leftovers(tmp_path)
    subject.assert_offloads("disk", tmp_path)


@pytest.mark.parametrize("mode", MODES)
def test_a_progress_function_that_fails_leaves_the_model_as_it_was(
    mode: str, tmp_path: Path
) -> None:
    subject = Subject("gpt")

    def progress(what: str, done: int, total: int) -> None:
        if done == total:
            raise ValueError("of the caller")

    with pytest.raises(ValueError, match="of the caller"):
        overspill.offload(subject.model, **budgets(mode, tmp_path) | {"progress": progress})
    subject.assert_unchanged()
    assert not leftovers(tmp_path)


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_offload_frees_its_memory(mode: str, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, d_model=256, d_hidden=384, n_experts=8)
    model = GPTMoE(config, seed=1)
    experts = sum(p.nbytes for layer in model.moe_layers() for p in layer.expert_parameters())

    def progress(what: str, done: int, total: int) -> None:
        if done == total:
            raise MemoryError

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    given = budgets(mode, tmp_path) | {"progress": progress}
    if mode == "disk":
        given["host_slots"] = 15
    used = []
    for _ in range(6):
        with pytest.raises(MemoryError):
            overspill.offload(model, **given)
        used.append(resident())
    # the first attempt imports what it needs, and the C library may keep the memory of one
    assert used[-1] - used[0] < 3 * experts

"""A failure in one batch fails its requests with one clear error; later requests work."""

import errno
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from overspill import LLM, SamplingParams, Settings
from overspill.core.errors import EngineError, NonFiniteError, OverspillError
from tests.moe.oracle import threads_left
from tests.serve.models import (
    gpt_tokens,
    plain_generate,
    plain_model,
    served,
    served_gpt,
    tokens_of,
)
from tests.serve.test_threads import in_thread, wait_for

SHORT = SamplingParams(max_tokens=4)
LONG = SamplingParams(max_tokens=40)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not threads_left()
    assert not list(tmp_path.glob("overspill-*")), "files were left on the disk"


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with served_gpt("host", tmp_path) as made:
        yield made


class FailOnce:
    """A forward hook that raises in one pass."""

    def __init__(self, error: Exception, at: int = 1) -> None:
        self.error, self._left = error, at

    def __call__(self, *_: object) -> None:
        self._left -= 1
        if self._left == 0:
            raise self.error


ERRORS = [
    RuntimeError("CUDA out of memory"),
    OSError(errno.EIO, "injected"),
    ValueError("wrong shape"),
    KeyError("name"),
    AssertionError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_exception_of_the_model_fails_its_batch_alone(llm: LLM, error: Exception) -> None:
    hook = llm.model.blocks[1].register_forward_hook(FailOnce(error, at=2))
    with pytest.raises(OverspillError, match="a batch failed: ") as raised:
        llm.generate([[1, 2], [3]], LONG)
    assert raised.value.__cause__ is error
    assert type(error).__name__ in str(raised.value)
    assert tokens_of(llm, [[1, 2], [3]], SHORT) == [gpt_tokens([1, 2], 4), gpt_tokens([3], 4)]
    hook.remove()
    pool = llm._loop.scheduler._pool
    assert pool.n_free == pool.n_blocks


def test_a_failure_fails_requests_of_all_threads_in_the_batch_and_no_others(llm: LLM) -> None:
    other = in_thread(lambda: llm.generate([1, 2, 3], LONG))
    wait_for(lambda: llm.stats()["prompt_tokens"] > 0)
    fails = FailOnce(RuntimeError("injected"), at=10)
    hook = llm.model.blocks[1].register_forward_hook(fails)
    with pytest.raises(OverspillError, match=r"a batch failed: .*injected"):
        llm.generate([[4]] * 2, LONG)
    with pytest.raises(OverspillError, match=r"a batch failed: .*injected"):
        other.join()
    hook.remove()
    assert tokens_of(llm, [[1, 2]], SHORT) == [gpt_tokens([1, 2], 4)]


def test_requests_that_wait_are_finished_after_a_failure(llm: LLM) -> None:
    """Three run, the others are not in the batch that fails."""
    hook = llm.model.blocks[1].register_forward_hook(FailOnce(RuntimeError("injected"), at=2))
    with pytest.raises(OverspillError, match="injected"):
        llm.generate([[number + 1] for number in range(5)], SHORT)
    hook.remove()
    assert llm.stats()["requests"] == 2


def test_a_stream_gives_its_tokens_before_the_error(llm: LLM) -> None:
    """Another thread may have computed further than the stream was read."""
    stream = llm.stream([1, 2, 3], LONG)
    got = [next(stream).token_ids[0]]
    tokens_of(llm, [[4]], SHORT)
    hook = llm.model.blocks[1].register_forward_hook(FailOnce(RuntimeError("injected")))
    with pytest.raises(OverspillError, match="injected"):
        llm.generate([5], SHORT)
    hook.remove()
    with pytest.raises(OverspillError, match="injected"):
        got.extend(piece.token_ids[0] for piece in stream)
    assert got == gpt_tokens([1, 2, 3], 5)


@pytest.mark.parametrize("name", ["mixtral", "jamba"])
def test_a_failure_does_not_change_later_tokens_of_any_model(name: str, tmp_path: Path) -> None:
    prompts = [[5, 6, 7], [8], list(range(10, 30))]
    model, _ = plain_model(name)
    expected = [plain_generate(model, prompt, 4) for prompt in prompts]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with served(name, "host", tmp_path) as llm:
        for at in (1, 2, 3):
            hook = llm.model.lm_head.register_forward_hook(FailOnce(RuntimeError("injected"), at))
            with pytest.raises(OverspillError, match="injected"):
                llm.generate(prompts, params)
            hook.remove()
            assert tokens_of(llm, prompts, params) == expected


@pytest.mark.parametrize("params", [SHORT, SamplingParams(max_tokens=4, temperature=1.0)])
def test_a_prompt_with_nan_fails_alone(llm: LLM, params: SamplingParams) -> None:
    with torch.no_grad():
        llm.model.embedding.weight[7] = math.nan
    head = torch.nn.Parameter(plain_head(), requires_grad=False)
    swap_head(llm.model, head)
    requests = [llm._request(prompt, each) for prompt, each in (([1, 2, 3], SHORT), ([7], params))]
    for request in requests:
        llm._loop.add(request)
    llm._loop.run_until(lambda: all(request.finished for request in requests))
    good, bad = requests
    assert good.result().token_ids == gpt_tokens([1, 2, 3], 4)
    assert isinstance(bad.error, NonFiniteError)
    assert "NaN or infinite" in str(bad.error)
    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        llm.generate([[7], [1]], params)
    lengths = [[4, 5] * 9, [2], [3, 4]]  # padded to the longest
    assert tokens_of(llm, lengths, SHORT) == [gpt_tokens(prompt, 4) for prompt in lengths]


def plain_head() -> torch.Tensor:
    from tests.serve.models import plain_gpt

    return plain_gpt().get_output_embeddings().weight.detach().clone()


def swap_head(model: Any, weight: torch.nn.Parameter) -> None:
    """An output head without NaN, if it is the embedding otherwise."""
    if model.head is None:
        model.head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    model.head.weight = weight


class FailingJob:
    """Fails transfers of one kind from some time on."""

    def __init__(self, kind: str) -> None:
        self.kind, self.on = kind, False

    def __call__(self, kind: str) -> None:
        if self.on and kind == self.kind:
            raise OSError(errno.EIO, "injected")


@pytest.mark.parametrize(("kind", "mode"), [("upload", "host"), ("ssd read", "disk")])
def test_a_failed_transfer_is_one_clear_error_for_every_request(
    kind: str, mode: str, tmp_path: Path
) -> None:
    """Its thread has ended: later requests fail at once with the same error."""
    fail = FailingJob(kind)
    with served_gpt(mode, tmp_path, Settings(inject=fail)) as llm:
        assert tokens_of(llm, [[1, 2]], SHORT) == [gpt_tokens([1, 2], 4)]
        stream = llm.stream([3, 4], LONG)
        next(stream)
        fail.on = True
        began = time.monotonic()
        for prompts in ([[1, 2], [3]], [[5]]):
            with pytest.raises(EngineError, match="injected"):
                llm.generate(prompts, LONG)
        with pytest.raises(EngineError, match="injected"):
            list(stream)
        assert time.monotonic() - began < 10
        assert not llm._loop.scheduler.running


def test_a_file_on_disk_that_was_cut_is_a_disk_error(tmp_path: Path) -> None:
    with served_gpt("disk", tmp_path) as llm:
        tokens_of(llm, [[1, 2]], SHORT)
        for fd in Path("/proc/self/fd").iterdir():
            target = os.readlink(fd) if fd.is_symlink() else ""
            if target.startswith(str(tmp_path)) and "weights" in target:
                os.truncate(fd, 0)
        with pytest.raises(OverspillError, match="weights"):
            llm.generate([[number] for number in range(20)], LONG)


def test_requests_of_other_models_continue_after_a_failed_transfer(tmp_path: Path) -> None:
    fail = FailingJob("upload")
    with (
        served_gpt("host", tmp_path, Settings(inject=fail)) as failing,
        served_gpt("host", tmp_path) as other,
    ):
        fail.on = True
        with pytest.raises(EngineError, match="injected"):
            failing.generate([1, 2], LONG)
        assert tokens_of(other, [[1, 2]], SHORT) == [gpt_tokens([1, 2], 4)]


def test_an_error_while_another_thread_waits_is_seen_by_it_at_once(llm: LLM) -> None:
    started, go = threading.Event(), threading.Event()

    def block(*_: object) -> None:
        started.set()
        assert go.wait(10)
        raise RuntimeError("injected")

    hook = llm.model.blocks[0].register_forward_hook(block)
    first = in_thread(lambda: llm.generate([1, 2], SHORT))
    assert started.wait(10)
    hook.remove()
    second = in_thread(lambda: llm.generate([3], SHORT))
    time.sleep(0.05)
    go.set()
    with pytest.raises(OverspillError, match="injected"):
        first.join()
    assert second.join()[0].token_ids == gpt_tokens([3], 4)

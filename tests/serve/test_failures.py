"""A failure in one batch fails its requests with one clear error; later requests work."""

import errno
import itertools
import math
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from overspill import LLM, SamplingParams, Settings
from overspill.core.errors import DiskError, EngineError, NonFiniteError, OverspillError
from tests.moe.oracle import threads_left
from tests.serve.models import (
    gpt_tokens,
    plain_generate,
    plain_gpt,
    plain_model,
    served,
    served_gpt,
    tokens_of,
)
from tests.serve.submissions import gated
from tests.serve.test_threads import in_thread, n_asked
from tests.slow import slow_rows
from tests.waiting import wait_until

SHORT = SamplingParams(max_tokens=4)
MIDDLE = SamplingParams(max_tokens=10)
LONG = SamplingParams(max_tokens=24)


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


@pytest.mark.parametrize(
    "error", slow_rows(ERRORS, 2, 3, 4), ids=lambda error: type(error).__name__
)
def test_an_exception_of_the_model_fails_its_batch_alone(llm: LLM, error: Exception) -> None:
    hook = llm.model.blocks[1].register_forward_hook(FailOnce(error, at=2))
    with pytest.raises(OverspillError, match="a batch failed: ") as raised:
        llm.generate([[1, 2], [3]], LONG)
    assert raised.value.__cause__ is error
    assert type(error).__name__ in str(raised.value)
    assert tokens_of(llm, [[1, 2], [3]], SHORT) == [gpt_tokens([1, 2], 4), gpt_tokens([3], 4)]
    hook.remove()
    pool = llm._loop.scheduler.pool
    assert pool.n_free == pool.n_blocks


def test_a_failure_fails_requests_of_all_threads_in_the_batch_and_no_others(llm: LLM) -> None:
    fails = FailOnce(RuntimeError("injected"), at=10)
    hook = llm.model.blocks[1].register_forward_hook(fails)
    with gated(llm):
        threads = [
            in_thread(lambda prompts=prompts: llm.generate(prompts, LONG))
            for prompts in ([1, 2, 3], [[4]] * 2)
        ]
        wait_until(lambda: n_asked(llm) == 3)
    for thread in threads:
        with pytest.raises(OverspillError, match=r"a batch failed: .*injected"):
            thread.join()
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


@pytest.mark.parametrize("name", slow_rows(["mixtral", "jamba"], 0))
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


@pytest.mark.parametrize(
    "params", slow_rows([SHORT, SamplingParams(max_tokens=4, temperature=1.0)], 0)
)
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
    return plain_gpt().get_output_embeddings().weight.detach().clone()


def swap_head(model: Any, weight: torch.nn.Parameter) -> None:
    """An output head without NaN, if it is the embedding otherwise."""
    if model.head is None:
        model.head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    model.head.weight = weight


class FailingJob:
    """Fails transfers of experts of one kind while it is on, or the next few of them."""

    def __init__(self, kind: str) -> None:
        self.kind, self.on, self.next = kind, False, 0

    def __call__(self, kind: str) -> None:
        # dense weights are uploaded by the thread that computes; a native thread is a "Dummy"
        worker = threading.current_thread().name.startswith(("overspill-", "Dummy"))
        if kind == self.kind and worker and (self.on or self.next > 0):
            self.next -= 1
            raise OSError(errno.EIO, "injected")


TRANSFERS = [
    ("upload", "host", "thread"),
    ("upload", "host", "native"),
    ("upload", "disk", "thread"),
    ("ssd read", "disk", "thread"),
]
each_transfer = pytest.mark.parametrize(("kind", "mode", "uploader"), slow_rows(TRANSFERS, 0, 2))
PROMPTS = [[1, 2], [3], [5, 6, 7]]


@each_transfer
def test_requests_fail_while_transfers_fail_and_work_afterwards(
    kind: str, mode: str, uploader: str, tmp_path: Path
) -> None:
    fail = FailingJob(kind)
    with served_gpt(mode, tmp_path, Settings(inject=fail, uploader=uploader)) as llm:
        for _ in range(2):
            assert tokens_of(llm, PROMPTS, SHORT) == [gpt_tokens(p, 4) for p in PROMPTS]
            stream = llm.stream([3, 4], LONG)
            next(stream)
            fail.on = True
            began = time.monotonic()
            for prompts in ([[1, 2], [3]], [[5]]):
                with pytest.raises(OverspillError, match="injected"):
                    llm.generate(prompts, LONG)
            with pytest.raises(OverspillError, match="injected"):
                list(stream)
            assert time.monotonic() - began < 50, "not found by the watchdog"
            assert not llm._loop.scheduler.running
            fail.on = False
        assert tokens_of(llm, PROMPTS, LONG) == [gpt_tokens(p, 24) for p in PROMPTS]
        llm.model.overspill.check_conserved()


@pytest.mark.parametrize(
    ("kind", "mode", "uploader", "count"),
    slow_rows(
        [(*transfer, 20 if number % 2 else 1) for number, transfer in enumerate(TRANSFERS)], 1, 2
    ),
)
def test_a_few_failed_transfers_change_no_tokens(
    kind: str, mode: str, uploader: str, count: int, tmp_path: Path
) -> None:
    """A read ahead of need is tried again when the expert is needed."""
    fail = FailingJob(kind)
    expected = [gpt_tokens(prompt, 4) for prompt in PROMPTS]
    with served_gpt(mode, tmp_path, Settings(inject=fail, uploader=uploader)) as llm:
        for skipped in range(3):
            for prompt in ([7], [8, 9])[:skipped]:  # other experts are in the slots then
                tokens_of(llm, [prompt], SHORT)
            fail.next = count
            requests = [llm._request(prompt, SHORT) for prompt in PROMPTS]
            for request in requests:
                llm._loop.add(request)
            llm._loop.run_until(lambda r=requests: all(each.finished for each in r))
            for request, tokens in zip(requests, expected, strict=True):
                if request.error is None:
                    assert request.result().token_ids == tokens
                else:
                    assert "injected" in str(request.error)
            fail.next = 0
            assert tokens_of(llm, PROMPTS, SHORT) == expected
        llm.model.overspill.check_conserved()


@pytest.mark.parametrize("name", slow_rows(["mixtral", "jamba"], 1))
def test_a_failing_disk_does_not_change_later_tokens_of_any_model(
    name: str, tmp_path: Path
) -> None:
    prompts = [[5, 6, 7], [8], list(range(10, 30))]
    model, _ = plain_model(name)
    expected = [plain_generate(model, prompt, 4) for prompt in prompts]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    fail = FailingJob("ssd read")
    with served(name, "disk", tmp_path, Settings(inject=fail)) as llm:
        for _ in range(2):
            fail.on = True
            with pytest.raises(DiskError, match=r"expert \d+\.\d+ could not be read.*injected"):
                llm.generate(prompts, params)
            fail.on = False
            assert tokens_of(llm, prompts, params) == expected


def test_reads_that_fail_in_any_batch_of_long_prompts_and_answers_change_no_tokens(
    tmp_path: Path,
) -> None:
    """An answer runs while a prompt is computed in pieces; the disk fails in three passes, from the
    first to the last ones. Blocks of prompts that failed are found again."""
    fail = FailingJob("ssd read")
    failed: set[str] = set()
    options = {"max_batch": 4, "prefill_chunk": 16}
    with served_gpt("disk", tmp_path, Settings(inject=fail), **options) as llm:
        for first in range(0, 9, 2):
            prompts = {
                "answer": [1, 2, first],
                "long": [3, first, *range(8, 46)],
                "short": [4, first],
            }
            passes = itertools.count()

            def begin(*_: object, first: int = first, passes: Iterator[int] = passes) -> None:
                fail.on = first <= next(passes) < first + 3

            with gated(llm) as gate:
                hook = llm.model.embedding.register_forward_pre_hook(begin)
                submissions = {"answer": llm.submit(prompts["answer"], MIDDLE)}
                gate.wait_for_batch()
                for name in ("long", "short"):
                    submissions[name] = llm.submit(prompts[name], SHORT)
            for name, submission in submissions.items():
                try:
                    result = submission.result(60)
                except DiskError:
                    failed.add(name)
                else:
                    assert result.token_ids == gpt_tokens(prompts[name], len(result.token_ids))
                    assert len(result.token_ids) == (10 if name == "answer" else 4)
            hook.remove()
            fail.on = False
            assert tokens_of(llm, list(prompts.values()), SHORT) == [
                gpt_tokens(prompt, 4) for prompt in prompts.values()
            ]
            pool = llm._loop.scheduler.pool
            pool.check_conserved()
            assert pool.n_free == pool.n_blocks
        llm.model.overspill.check_conserved()
    assert {"answer", "long"} <= failed


class BadRecord:
    """A disk that cannot read one record of a file, while it is bad."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.record, self.bad, self.failures = 0, True, 0
        self._read = os.preadv
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, fd: int, buffers: Any, offset: int) -> int:
        if self.bad and offset == self.record * len(buffers[0]):
            self.failures += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._read(fd, buffers, offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> BadRecord:
    return BadRecord(monkeypatch)


ONE = SamplingParams(max_tokens=1)
SINGLES = [[token] for token in range(1, 24)]


def test_only_requests_that_need_an_unreadable_expert_fail(disk: BadRecord, tmp_path: Path) -> None:
    with served_gpt("disk", tmp_path, max_batch=8) as llm:
        alone = [error_of(llm, prompt) for prompt in SINGLES]
        (message,) = {str(error) for error in alone if error is not None}
        found = re.fullmatch(
            r"expert (\d+)\.(\d+) could not be read from disk: (\S+)weights\.bin: reading .* of "
            r"experts failed \(Input/output error\); check the disk .*",
            message,
        )
        assert found, message
        assert found[3].startswith(str(tmp_path))
        needed = [(int(found[1]), int(found[2])) in experts_of(prompt) for prompt in SINGLES]
        assert [error is not None for error in alone] == needed
        assert disk.failures <= 1 + 2 * sum(needed), "read when it was needed, and once ahead of it"
        requests = [llm._request(prompt, ONE) for prompt in SINGLES]
        for request in requests:
            llm._loop.add(request)
        llm._loop.run_until(lambda: all(request.finished for request in requests))
        assert [request.error is not None for request in requests] == needed
        for request, prompt in zip(requests, SINGLES, strict=True):
            if request.error is None:
                assert request.result().token_ids == gpt_tokens(prompt, 1)
        disk.bad = False
        assert tokens_of(llm, SINGLES, ONE) == [gpt_tokens(prompt, 1) for prompt in SINGLES]


def test_an_unreadable_expert_that_should_move_to_the_device_fails_no_other_requests(
    disk: BadRecord, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served_gpt("disk", tmp_path, Settings(follow_usage=True)) as llm:
        home = next(
            (layer, ids[0])
            for layer, ids in enumerate(llm.model.overspill.addresses.resident)
            if ids
        )
        disk.record = home[0] * llm.model.overspill.n_experts  # the next expert of the layer
        failed = {prompt[0]: error_of(llm, prompt) for prompt in SINGLES}
        needed = [t for t, e in failed.items() if e is not None and home not in experts_of([t])]
        other = next(t for t, e in failed.items() if e is None)
        for token in (needed * 12)[:12]:
            assert error_of(llm, [token]) is not None
        assert "experts stay where they are: " in caplog.text
        for _ in range(4):
            assert error_of(llm, [other]) is None


def experts_of(prompt: list[int]) -> set[tuple[int, int]]:
    """The experts that compute a prompt, with their layers."""
    found: set[tuple[int, int]] = set()
    hooks = [
        block.moe.router.register_forward_hook(
            lambda _, __, out, layer=layer: found.update(
                (layer, expert) for expert in out.expert_ids_TK.flatten().tolist()
            )
        )
        for layer, block in enumerate(plain_gpt().blocks)
    ]
    plain_gpt()(torch.tensor([prompt]))
    for hook in hooks:
        hook.remove()
    return found


def error_of(llm: LLM, prompt: list[int]) -> DiskError | None:
    try:
        assert tokens_of(llm, [prompt], ONE) == [gpt_tokens(prompt, 1)]
    except DiskError as error:
        return error
    return None


@pytest.mark.slow
def test_threads_get_their_tokens_or_a_disk_error(disk: BadRecord, tmp_path: Path) -> None:
    """Experts also try to exchange places by their usage."""
    with served_gpt("disk", tmp_path) as llm:
        jobs = [
            in_thread(lambda own=SINGLES[number::4]: [error_of(llm, p) for p in own])
            for number in range(4)
        ]
        errors = [error for job in jobs for error in job.join()]
        assert None in errors
        assert any(errors)
        disk.bad = False
        assert tokens_of(llm, SINGLES, SHORT) == [gpt_tokens(prompt, 4) for prompt in SINGLES]
        llm.model.overspill.check_conserved()


def test_an_expert_that_could_not_be_written_is_not_lost(tmp_path: Path) -> None:
    """Experts exchange places, so that one on disk is newer in its host slot."""
    fail = FailingJob("ssd write")
    with served_gpt("disk", tmp_path, Settings(inject=fail)) as llm:
        engine = llm.model.overspill
        (layer, *_) = (layer for layer, count in enumerate(engine.residents) if count)
        fail.on = True
        engine.swap_experts([(layer, 0, engine.residents[layer])])
        with pytest.raises(OverspillError, match="injected"):
            tokens_of(llm, PROMPTS * 5, SHORT)
        fail.on = False
        assert tokens_of(llm, PROMPTS, SHORT) == [gpt_tokens(p, 4) for p in PROMPTS]
        engine.check_conserved()


def cut_weights(folder: Path) -> None:
    """Truncates the file of weights in a disk folder; it has no name any more."""
    for fd in Path("/proc/self/fd").iterdir():
        target = os.readlink(fd) if fd.is_symlink() else ""
        if target.startswith(str(folder)) and "weights" in target:
            os.truncate(fd, 0)


def test_a_file_on_disk_that_was_cut_is_a_disk_error(tmp_path: Path) -> None:
    with served_gpt("disk", tmp_path) as llm:
        tokens_of(llm, [[1, 2]], SHORT)
        cut_weights(tmp_path)
        for _ in range(3):
            with pytest.raises(DiskError, match=r"expert .*weights.* truncated .* load the model"):
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
        assert go.wait(60)
        raise RuntimeError("injected")

    hook = llm.model.blocks[0].register_forward_hook(block)
    first = in_thread(lambda: llm.generate([1, 2], SHORT))
    assert started.wait(60)
    hook.remove()
    second = in_thread(lambda: llm.generate([3], SHORT))
    time.sleep(0.05)
    go.set()
    with pytest.raises(OverspillError, match="injected"):
        first.join()
    assert second.join()[0].token_ids == gpt_tokens([3], 4)

"""Several threads use one LLM at once."""

import contextlib
import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from overspill import LLM, SamplingParams, Settings
from overspill.core.errors import OrderError
from overspill.serve.request import Request
from tests.interrupts import spread
from tests.moe.oracle import delays
from tests.serve.models import gpt_tokens, served, served_gpt, tokens_of
from tests.serve.submissions import gated, slow_batches
from tests.slow import slow_rows
from tests.waiting import wait_until

LONG = SamplingParams(max_tokens=40)
SHORT = SamplingParams(max_tokens=4)
SERVE = str(Path("overspill", "serve"))

# of generators that were interrupted
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with served_gpt("host", tmp_path, max_batch=8) as made:
        yield made


@pytest.fixture(params=["gpt", "jamba"])
def either(request: Any, tmp_path: Path) -> Iterator[LLM]:
    """Requests in one pass, or one after another."""
    opened = (
        served_gpt("gpu", tmp_path) if request.param == "gpt" else served("jamba", "gpu", tmp_path)
    )
    with opened as made:
        yield made


def in_thread(job: Callable[[], Any]) -> "Background":
    return Background(job)


class Background:
    """A job in another thread; `join` returns its result, or raises its exception."""

    def __init__(self, job: Callable[[], Any]) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(job)

    @property
    def running(self) -> bool:
        return not self._future.done()

    def join(self) -> Any:
        try:
            return self._future.result(timeout=60)
        finally:
            self._pool.shutdown(wait=False)


def test_threads_get_their_own_tokens_from_common_batches(tmp_path: Path) -> None:
    late = Settings(inject=delays(seed=1, longest=3e-4))
    prompts = [[number + 1, 2 * number + 1, 7] for number in range(6)]
    expected = [gpt_tokens(prompt, 6) for prompt in prompts]
    with served_gpt("host", tmp_path, late, max_batch=4) as llm:
        params = SamplingParams(max_tokens=6)
        sizes: list[int] = []
        llm.model.embedding.register_forward_hook(lambda _, args, out: sizes.append(out.shape[1]))

        def ask(number: int) -> list[int]:
            if number % 2:
                return tokens_of(llm, [prompts[number]], params)[0]
            pieces = llm.stream(prompts[number], params)
            return [token for piece in pieces for token in piece.token_ids]

        with ThreadPoolExecutor(6) as pool:
            with gated(llm):
                answers = pool.map(ask, range(6))
                wait_until(lambda: n_asked(llm) == 6)
            assert list(answers) == expected
        assert len(sizes) < 6 * 6, "several requests are in one batch"
        assert llm.stats()["requests"] == 6


def n_asked(llm: LLM) -> int:
    stats = llm.stats()
    return int(stats["running"] + stats["waiting"])


@contextmanager
def two_requests(llm: LLM) -> Iterator[None]:
    """Batches wait until there are two requests, in which one is not finished before the other
    comes."""
    ended = threading.Event()

    def wait(*_: object) -> None:
        wait_until(lambda: ended.is_set() or n_asked(llm) > 1)

    hook = llm.model.embedding.register_forward_pre_hook(wait)
    try:
        yield
    finally:
        hook.remove()
        ended.set()


def test_a_short_request_does_not_wait_for_a_long_one(llm: LLM) -> None:
    with two_requests(llm):
        long = in_thread(lambda: llm.generate([1, 2, 3], LONG))
        for _ in range(3):
            assert tokens_of(llm, [[4, 5]], SHORT) == [gpt_tokens([4, 5], 4)]
        assert long.running
    (result,) = long.join()
    assert result.token_ids == gpt_tokens([1, 2, 3], 40)


def test_pieces_arrive_while_another_thread_computes(llm: LLM) -> None:
    seen = []
    with two_requests(llm):
        long = in_thread(lambda: llm.generate([1, 2, 3], SamplingParams(max_tokens=60)))
        for piece in llm.stream([4, 5], SHORT):
            seen.append((piece.token_ids[0], long.running))
    assert seen == [(token, True) for token in gpt_tokens([4, 5], 4)]
    long.join()


def test_close_ends_requests_of_other_threads(either: LLM) -> None:
    with slow_batches(either):
        threads = [in_thread(lambda: either.generate([[1, 2, 3]] * 5, LONG)) for _ in range(2)]
        threads.append(in_thread(lambda: list(either.stream([4, 5], LONG))))
        wait_until(lambda: either.stats()["prompt_tokens"] > 3)
        either.close()
        for thread in threads:
            with pytest.raises(OrderError, match="this LLM was closed"):
                thread.join()


def test_close_beside_new_requests_never_hangs(tmp_path: Path) -> None:
    """A request is finished, or says that the LLM was closed."""
    for pause in (0.0, 0.0005, 0.001, 0.002, 0.004):
        with served_gpt("gpu", tmp_path) as llm:

            def ask(llm: LLM = llm) -> int:
                for count in itertools.count():
                    try:
                        tokens = tokens_of(llm, [[1, 2]], SHORT)
                    except OrderError as error:
                        return count if "this LLM was closed" in str(error) else -1
                    assert tokens == [gpt_tokens([1, 2], 4)]
                raise AssertionError

            gpt_tokens([1, 2], 4)
            threads = [in_thread(ask) for _ in range(3)]
            time.sleep(pause)
            llm.close()
            for thread in threads:
                assert thread.join() >= 0


def test_a_request_that_arrives_with_close_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was made before, and is added after: the model computes otherwise by then."""
    with served("mixtral", "gpu", tmp_path) as llm:
        add = llm._loop.add

        def close_first(request: Request) -> None:
            llm.close()
            add(request)

        monkeypatch.setattr(llm._loop, "add", close_first)
        with pytest.raises(OrderError, match="closed"):
            llm.generate([[1, 2, 3], [4]], SHORT)


def test_a_model_is_free_when_close_returns(tmp_path: Path) -> None:
    with served("mixtral", "gpu", tmp_path) as llm, slow_batches(llm):
        thread = in_thread(lambda: llm.generate([[1, 2, 3]] * 5, LONG))
        wait_until(lambda: llm.stats()["prompt_tokens"] > 0)
        llm.close()
        assert llm.model.config._attn_implementation == "eager"
        with pytest.raises(OrderError, match="this LLM was closed"):
            thread.join()


def test_an_abandoned_stream_does_not_disturb_other_threads(llm: LLM) -> None:
    long = in_thread(lambda: llm.generate([1, 2, 3], LONG))
    for number in range(6):
        stream = llm.stream([number + 1, 5], LONG)
        next(stream)
        del stream
    (result,) = long.join()
    assert result.token_ids == gpt_tokens([1, 2, 3], 40)
    assert tokens_of(llm, [[4, 5]], SHORT) == [gpt_tokens([4, 5], 4)]
    scheduler = llm._loop.scheduler
    assert not scheduler.running
    assert scheduler.pool.n_free == scheduler.pool.n_blocks


@pytest.mark.slow
def test_an_interrupt_in_one_thread_leaves_requests_of_another_intact(llm: LLM) -> None:
    """In a pass that computes both: the other thread computes its part again."""
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5)
    (expected,) = tokens_of(llm, [[1, 2, 3]], params)
    raised = threading.Event()
    mine = threading.get_ident()

    def interrupt(*_: object) -> None:
        if threading.get_ident() == mine and not raised.is_set():
            raised.set()
            raise KeyboardInterrupt

    for module in (llm.model.blocks[0], llm.model.norm):
        raised.clear()
        other = in_thread(lambda: llm.generate([1, 2, 3], params))
        wait_until(lambda: llm._loop.scheduler.running)
        hook = module.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[4, 5], [6]], LONG)
        hook.remove()
        (result,) = other.join()
        assert result.token_ids == expected
        assert tokens_of(llm, [[4, 5]], SHORT) == [gpt_tokens([4, 5], 4)]
        assert not llm._loop.scheduler.running


@pytest.mark.parametrize("name", slow_rows(["gpt", "jamba"], 1))
def test_an_interrupt_between_two_batches_of_streams_loses_no_token(
    name: str, tmp_path: Path
) -> None:
    """One stream is interrupted in a pass that computes two more."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    opened = served_gpt("gpu", tmp_path) if name == "gpt" else served("jamba", "gpu", tmp_path)
    with opened as llm:
        prompts = [[1, 2, 3], [4], [5, 6]]
        expected = tokens_of(llm, prompts, params)
        for at in (1, 2, 5):
            streams = [llm.stream(prompt, params) for prompt in prompts]
            got = [[next(stream).token_ids[0]] for stream in streams]
            passes = itertools.count(1)

            def interrupt(*_: object, passes: Any = passes, at: int = at) -> None:
                if next(passes) == at:
                    raise KeyboardInterrupt

            hook = llm.model.get_input_embeddings().register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                got[0].extend(piece.token_ids[0] for piece in streams[0])
            hook.remove()
            for number in (1, 2):
                got[number] += [piece.token_ids[0] for piece in streams[number]]
            assert got[1:] == expected[1:], at
            assert got[0] == expected[0][: len(got[0])]


def test_ctrl_c_at_any_time_leaves_other_requests_intact(tmp_path: Path) -> None:
    """A real signal, after so many calls of the serving loop."""
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=5)
    with served_gpt("host", tmp_path) as llm:
        (expected,) = tokens_of(llm, [[1, 2, 3]], params)
        calls = signal_after(None, lambda: llm.generate([4, 5], SHORT))
        for at in spread(calls, 8):
            other = llm.stream([1, 2, 3], params)
            got = [next(other).token_ids[0]]
            with contextlib.suppress(KeyboardInterrupt):
                signal_after(at, lambda: llm.generate([4, 5], SHORT))
            got += [piece.token_ids[0] for piece in other]
            assert got == expected, at
            assert tokens_of(llm, [[4, 5]], SHORT) == [gpt_tokens([4, 5], 4)], at
            scheduler = llm._loop.scheduler
            assert not scheduler.running
            assert scheduler.pool.n_free == scheduler.pool.n_blocks


def signal_after(at: int | None, job: Callable[[], object]) -> int:
    """Runs `job` and sends Ctrl-C after call number `at` of the package `serve`; how many calls
    there were."""
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        if event in ("call", "c_return") and SERVE in frame.f_code.co_filename:
            calls += 1
            if calls == at:
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(count)
    try:
        job()
    finally:
        sys.setprofile(None)
    return calls

"""Submissions while something fails, the LLM is closed, or the process ends."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from overspill import LLM, SamplingParams
from overspill.core.errors import EngineError, OrderError, OverspillError
from tests.fork_server import fork_server
from tests.moe.oracle import threads_left
from tests.serve.models import gpt_tokens, served_gpt, tokens_of
from tests.serve.submissions import (
    LONG,
    SHORT,
    Pieces,
    gated,
    slow_batches,
    tokens_of_submission,
    wait_until_idle,
)
from tests.serve.test_threads import in_thread
from tests.waiting import wait_until


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with served_gpt("gpu", tmp_path, max_batch=4) as made:
        yield made
    assert not threads_left()


def test_an_exception_of_the_model_is_an_error_piece(llm: LLM) -> None:
    error = RuntimeError("a failing layer")

    def fail(*_: object) -> None:
        raise error

    hook = llm.model.norm.register_forward_hook(fail)
    pieces = Pieces()
    submission = llm.submit([1, 2], SHORT, pieces)
    assert pieces.ended.wait(60)
    hook.remove()
    assert [(piece.text, piece.finish_reason) for piece in pieces.all] == [("", "error")]
    assert submission.error is error
    with pytest.raises(OverspillError, match="a batch failed: RuntimeError: a failing layer"):
        submission.result()
    assert tokens_of_submission(llm.submit([1, 2], SHORT)) == gpt_tokens([1, 2], 4)
    wait_until_idle(llm)


def test_a_thread_that_dies_ends_its_requests_and_says_so(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    def exit_thread(*_: object) -> None:
        raise SystemExit(3)  # no Exception: the loop does not take it for an error of the model

    with gated(llm) as gate:
        pieces = Pieces()
        running = llm.submit([1, 2], LONG, pieces)
        gate.wait_for_batch()
        arriving = llm.submit([3], LONG)
        hook = llm.model.norm.register_forward_hook(exit_thread)
    assert pieces.ended.wait(60)
    for submission in (running, arriving):
        with pytest.raises(EngineError, match=r"has failed \(SystemExit: 3\); make a new LLM"):
            submission.result(timeout=60)
    hook.remove()
    assert pieces.all[-1].finish_reason == "error"
    with pytest.raises(EngineError, match="the thread that computes submissions has failed"):
        llm.submit([1, 2], SHORT)
    assert tokens_of(llm, [[4, 5]], SHORT) == [gpt_tokens([4, 5], 4)], "generate still works"
    assert "the thread that computes submissions has failed" in caplog.text


def test_close_ends_all_submissions_with_an_error(llm: LLM) -> None:
    all_pieces = [Pieces() for _ in range(8)]  # twice as many as run
    with slow_batches(llm):
        submissions = [llm.submit([n % 2 + 1], LONG, pieces) for n, pieces in enumerate(all_pieces)]
        wait_until(lambda: all_pieces[0].all)
        llm.close()
    assert "overspill-serve" not in threads_left()
    for number, (pieces, submission) in enumerate(zip(all_pieces, submissions, strict=True)):
        assert pieces.ended.is_set()
        assert pieces.all[-1].finish_reason in ("error", "length")
        assert pieces.tokens == gpt_tokens([number % 2 + 1], 24)[: len(pieces.tokens)]
        submission.cancel()
    assert all_pieces[-1].all[-1].finish_reason == "error"
    with pytest.raises(OrderError, match="this LLM was closed"):
        submissions[-1].result()
    with pytest.raises(OrderError, match="this LLM was closed"):
        llm.submit([1], SHORT)


def test_close_while_threads_submit_loses_no_submission(tmp_path: Path) -> None:
    for pause in (0.0, 0.001, 0.004):
        with served_gpt("gpu", tmp_path) as llm:

            def ask(llm: LLM = llm) -> None:
                while True:
                    try:
                        submission = llm.submit([1, 2], SHORT)
                    except OrderError:
                        return
                    try:
                        submission.result(timeout=60)
                    except OrderError as error:
                        assert "closed" in str(error)  # noqa: PT017

            threads = [in_thread(ask) for _ in range(4)]
            time.sleep(pause)
            llm.close()
            for thread in threads:
                thread.join()


def test_ctrl_c_of_a_waiting_main_thread_leaves_submissions_alone(llm: LLM) -> None:
    with gated(llm) as gate:
        submission = llm.submit([1, 2], LONG)
        gate.wait_for_batch()
        timer = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            submission.result()
        timer.join()
        gate.open()
    assert tokens_of_submission(submission) == gpt_tokens([1, 2], 24)


def test_ctrl_c_of_generate_leaves_submissions_alone(llm: LLM) -> None:
    mine = threading.get_ident()

    def interrupt(*_: object) -> None:
        if threading.get_ident() == mine:
            raise KeyboardInterrupt

    for module in (llm.model.blocks[0], llm.model.norm):
        submission = llm.submit([1, 2], LONG)
        hook = module.register_forward_hook(interrupt)
        interrupted = False
        for _ in range(200):  # until this thread is the one that computes
            try:
                llm.generate([4, 5], SHORT)
            except KeyboardInterrupt:
                interrupted = True
                break
        hook.remove()
        assert interrupted
        assert tokens_of_submission(submission) == gpt_tokens([1, 2], 24)
    llm.submit([1], SHORT)  # what was interrupted leaves with the next batch
    wait_until_idle(llm)


def test_a_forked_child_refuses_submissions_and_leaves_the_parent_alone(llm: LLM) -> None:
    with gated(llm) as gate:
        submission = llm.submit([1, 2], SHORT)
        gate.wait_for_batch()  # the child's copies of the locks stay locked
        child = os.fork()
        if child == 0:
            code = 1
            try:
                llm.submit([1], SHORT)
            except OrderError:
                llm.close()
                submission.cancel()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tokens_of_submission(submission) == gpt_tokens([1, 2], 4)


def test_the_process_ends_while_submissions_are_computed(tmp_path: Path) -> None:
    """Without close: neither a crash nor a wait for all tokens."""
    log = tmp_path / "log"
    code = fork_server().run(_leave_submissions, tmp_path, log=log)
    assert (code, log.read_text()) == (0, "computing\n")


def _leave_submissions(folder: Path) -> None:
    opened = served_gpt("gpu", folder)
    llm = opened.__enter__()
    _LEFT.append(opened)
    pieces = Pieces()
    for number in range(6):
        llm.submit([number + 1], SamplingParams(max_tokens=60, ignore_eos=True), pieces)
    wait_until(lambda: len(pieces.all) > 2)
    print("computing", flush=True)
    ctypes.pythonapi.Py_Exit(0)  # as a script that ends; the fork server would leave that out


_LEFT: list[object] = []

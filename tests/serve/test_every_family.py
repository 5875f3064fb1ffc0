"""Each family with states, sparse attention or attention of its own, in all ways in which requests
are batched. test_states.py and test_sparse.py look at each of these closely."""

import functools
from pathlib import Path
from typing import Any

import pytest

from overspill import LLM, SamplingParams
from overspill.serve import source
from overspill.serve.runners import PagedRunner
from tests.models.huggingface.families import make_model
from tests.models.huggingface.oracle import offloaded
from tests.serve.test_checkpoints import check_greedy, greedy
from tests.serve.test_exactness import _long_rope
from tests.serve.test_sparse import SPARSE
from tests.serve.test_states import STATEFUL, make_plain
from tests.waiting import wait_until

NAMES = [*STATEFUL, *SPARSE, "phimoe"]
PIECES = [1, 2, 3, 4, 5, 64]
TEXT = [7 + 5 * number % 83 for number in range(16)]


@functools.cache
def plain_model(name: str) -> Any:
    return make_model(_long_rope(1.2, 1.2)).eval() if name == "phimoe" else make_plain(name)


@pytest.mark.parametrize("name", NAMES)
def test_batches_pieces_shared_beginnings_preemption_and_cancellation(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are blocks for one request and a half, of 4 tokens each."""
    monkeypatch.setattr(source.CacheRequest, "blocks", lambda *_: 5)
    monkeypatch.setattr("overspill.serve.llm._BLOCK", 4)
    plain, piece = plain_model(name), PIECES[NAMES.index(name) % len(PIECES)]
    with (
        offloaded(plain, "host", tmp_path) as model,
        LLM(model, context=16, max_batch=3, prefill_chunk=piece) as llm,
    ):
        loop = llm._loop
        runner, scheduler = loop.runner, loop.scheduler
        assert isinstance(runner, PagedRunner)
        together, longest, given_back = note(runner, scheduler, monkeypatch)
        # the second one has a beginning in common with the first: up to an edge of a block
        prompts = [TEXT[:6], [*TEXT[:4], 3], TEXT[9:11]]
        for prompt, result in zip(prompts, llm.generate(prompts, greedy(8)), strict=True):
            check_greedy(plain, [*prompt, *result.token_ids], 8)
        assert max(together) > 1, "one pass computes several requests"
        assert min(piece, 6) // 2 < max(longest) <= piece
        assert given_back
        cancelled = llm.submit(TEXT[:6], SamplingParams(max_tokens=10, ignore_eos=True))
        wait_until(lambda: bool(scheduler.running))
        cancelled.cancel()
        wait_until(lambda: not scheduler.running)
        llm.reset_prefix_cache()
        cached = []
        for prompt in (TEXT[:9], TEXT[:9], [*TEXT[:8], 3], [*TEXT[:9], 3], [*TEXT[:7], 3]):
            (result,) = llm.generate([prompt], greedy(2))
            check_greedy(plain, [*prompt, *result.token_ids], 2)
            cached.append(result.cached_tokens)
        assert cached[:4] == [0, 8, 8, 8]
        # a state after the first block is kept if a piece ends there
        assert cached[4] == 4 or (cached[4] == 0 and name in STATEFUL)
        scheduler.pool.check_conserved()
        assert scheduler.pool.n_free == 5
        assert runner._slots is None or not runner._slots._slots


def note(
    runner: Any, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[int], list[Any]]:
    """How many requests each pass has, the tokens of the longest piece, and the requests that give
    their blocks back."""
    together: list[int] = []
    longest: list[int] = []
    given_back: list[Any] = []
    compute, preempt = runner._compute, scheduler._preempt

    def computed(parts: Any, keep: bool = True) -> Any:
        together.append(len(parts))
        longest.append(max(part.n_new for part in parts))
        return compute(parts, keep)

    def preempted(request: Any) -> None:
        given_back.append(request)
        preempt(request)

    monkeypatch.setattr(runner, "_compute", computed)
    monkeypatch.setattr(scheduler, "_preempt", preempted)
    return together, longest, given_back

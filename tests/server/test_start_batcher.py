"""Which requests begin together."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from overspill.server.start_batcher import StartBatcher

LONG = 60.0


def run(work: Callable[[StartBatcher], Awaitable[None]], max_wait: float = LONG) -> None:
    async def inside() -> None:
        with ThreadPoolExecutor(2) as threads:
            await work(StartBatcher(threads, max_wait))

    asyncio.run(asyncio.wait_for(inside(), LONG))


def test_a_request_waits_for_those_that_are_coming() -> None:
    order: list[str] = []

    async def first(batcher: StartBatcher) -> None:
        with batcher.arrival() as start:
            await start(lambda: order.append(f"first in {threading.get_ident()}"))

    async def second(batcher: StartBatcher) -> None:
        with batcher.arrival() as start:
            for _ in range(20):  # is tokenized
                await asyncio.sleep(0)
            order.append("tokenized")
            await start(lambda: order.append(f"second in {threading.get_ident()}"))

    async def both(batcher: StartBatcher) -> None:
        await asyncio.gather(second(batcher), first(batcher))

    run(both)
    tokenized, one, other = order
    assert tokenized == "tokenized"
    assert one.removeprefix("first") == other.removeprefix("second")


def test_a_request_alone_does_not_wait() -> None:
    started: list[int] = []

    async def alone(batcher: StartBatcher) -> None:
        for number in range(3):
            with batcher.arrival() as start:
                await start(partial(started.append, number))

    run(alone)  # a wait would take LONG, and end in a TimeoutError
    assert started == [0, 1, 2]


def test_a_request_that_takes_long_holds_nobody_up() -> None:
    started: list[str] = []

    async def beside(batcher: StartBatcher) -> None:
        with batcher.arrival(), batcher.arrival() as start:  # the first is tokenized all the time
            await start(lambda: started.append("second"))
            assert started == ["second"]
            started.append("first is tokenized")

    run(beside, max_wait=0.01)
    assert started == ["second", "first is tokenized"]


@pytest.mark.parametrize("how", [ValueError, asyncio.CancelledError])
def test_a_request_that_fails_before_its_start_is_not_waited_for(how: type[BaseException]) -> None:
    async def fails(batcher: StartBatcher) -> None:
        with batcher.arrival():
            await asyncio.sleep(0)
            raise how

    async def both(batcher: StartBatcher) -> None:
        async def good() -> None:
            with batcher.arrival() as start:
                await start(lambda: None)

        found = await asyncio.gather(fails(batcher), good(), return_exceptions=True)
        assert isinstance(found[0], how)
        assert found[1] is None

    run(both)


def test_a_start_that_fails_fails_its_own_request() -> None:
    def broken() -> None:
        raise ValueError("refused")

    async def request(batcher: StartBatcher, function: Callable[[], None]) -> None:
        with batcher.arrival() as start:
            await asyncio.sleep(0)
            await start(function)

    async def three(batcher: StartBatcher) -> None:
        functions = (lambda: None, broken, lambda: None)
        work = (request(batcher, function) for function in functions)
        found = await asyncio.gather(*work, return_exceptions=True)
        assert [type(each) for each in found] == [type(None), ValueError, type(None)]

    run(three)


def test_threads_that_have_ended_fail_a_request() -> None:
    async def closed() -> None:
        threads = ThreadPoolExecutor(1)
        threads.shutdown()
        with StartBatcher(threads).arrival() as start, pytest.raises(RuntimeError):
            await start(lambda: None)

    asyncio.run(closed())

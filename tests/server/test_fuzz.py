"""A few of the malformed requests that bench/server_fuzz.py sends."""

import asyncio

from overspill.serve.llm import LLM
from tests.server.malformed import case_of
from tests.server.running import running
from tests.server.send import send_all

N_REQUESTS = 100


def test_malformed_requests_get_errors_and_leave_nothing_behind(llm: LLM) -> None:
    with running(llm, max_body="64KiB", body_timeout=1.0, request_timeout=100) as server:
        outcome = asyncio.run(send_all(server.port, range(N_REQUESTS), 16))
        assert outcome.problems == []
        assert server.wait_until(lambda: server.idle)
        assert server.http.get("/health").status_code == 200
    assert sum(outcome.kinds.values()) == N_REQUESTS
    assert outcome.statuses[400] > N_REQUESTS // 3


def test_a_number_makes_the_same_request_again() -> None:
    assert [case_of(number) for number in range(200)] == [case_of(n) for n in range(200)]

"""The benchmarks of the server: what their clients read, and what they count as a failure."""

import importlib
from types import ModuleType
from typing import Any

import pytest

from tests.server.mock_server import Mock, mock_server

FREE = {"kv_blocks": 8, "kv_blocks_free": 8, "running": 0, "waiting": 0, "in_flight": 0}


@pytest.fixture
def load(scripts: None) -> ModuleType:
    return importlib.import_module("server_load")


@pytest.fixture
def client(scripts: None) -> ModuleType:
    return importlib.import_module("server_client")


def answer(client: ModuleType, text: str = "a b", **changes: Any) -> Any:
    return client.Answer(0, text, **{"status": 200, "times": [0.1, 0.2], **changes})


def test_complete_and_abandoned_answers_that_agree_are_no_problem(
    load: ModuleType, client: ModuleType
) -> None:
    answers = [answer(client), answer(client, "a", left=True), answer(client, "", left=True)]
    assert load.problems(answers, ["a b"], FREE, 0) == []


@pytest.mark.parametrize(
    ("changes", "stats", "growth", "problem"),
    [
        ({"text": "a c"}, {}, 0, "1 of 1 answers differ"),
        ({"text": "b", "left": True}, {}, 0, "1 beginnings"),
        ({"error": "nothing for 120 seconds"}, {}, 0, "got no answer"),
        ({}, {"kv_blocks_free": 6}, 0, "2 blocks are held"),
        ({}, {"waiting": 1}, 0, "1 requests open"),
        ({}, {}, 100 << 20, "grown by 100 MiB"),
    ],
)
def test_what_must_not_happen_is_named(
    load: ModuleType,
    client: ModuleType,
    changes: dict[str, Any],
    stats: dict[str, Any],
    growth: int,
    problem: str,
) -> None:
    (found,) = load.problems([answer(client, **changes)], ["a b"], {**FREE, **stats}, growth)
    assert problem in found


def test_clients_read_streams_errors_and_leave(client: ModuleType) -> None:
    def ask(mock: Mock, **changes: Any) -> Any:
        host, port = mock.address.removeprefix("http://").rstrip("/").split(":")
        path = "/v1/chat/completions"
        (found,) = clients.at_once((host, int(port)), path, [{"messages": [], **changes}])
        return found

    with mock_server() as mock, client.Clients() as clients:
        whole = ask(mock)
        assert (whole.text, whole.tokens, len(whole.times)) == ("Hello", 2, 2)
        mock.pieces, mock.delay = ["a"] * 1000, 0.01
        left = ask(mock, leave={"pieces": 3, "seconds": 60})
        assert (left.text, left.left, left.error) == ("aaa", True, None)
        assert mock.disconnected.wait(5)
        assert ask(mock, leave={"pieces": 900, "seconds": 0.2}).left
        mock.refusal = (429, "full")
        refused = ask(mock)
        assert (refused.status, "full" in refused.error) == (429, True)

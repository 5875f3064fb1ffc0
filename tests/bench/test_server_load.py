"""The benchmarks of the server: what their clients read, and what they count as a failure."""

import importlib
from collections import Counter
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


def answer(client: ModuleType, text: str = "w1 w2", **changes: Any) -> Any:
    return client.Answer(0, text, **{"status": 200, "times": [0.1, 0.2], **changes})


@pytest.mark.parametrize(
    ("text", "left", "agreement"),
    [
        ("w1 w2", False, "equal"),
        ("w1", True, "equal"),
        ("", True, "equal"),
        ("w1", False, "different"),
        ("w1 w2 w3", False, "different"),
        ("w1 w9", False, "tie"),
        ("w1 w8", False, "different"),
        ("w9 w2", True, "different"),
    ],
)
def test_an_answer_agrees_with_the_one_alone_up_to_a_tie(
    load: ModuleType, client: ModuleType, text: str, left: bool, agreement: str
) -> None:
    expected = load.Expected([1, 2], [frozenset({1}), frozenset({2, 9})])
    assert dict(load.compare([answer(client, text, left=left)], [expected])) == {agreement: 1}


@pytest.mark.parametrize(
    ("changes", "different", "stats", "growth", "problem"),
    [
        ({}, 1, {}, 0, "1 of 1 answers differ"),
        ({"error": "nothing for 120 seconds"}, 0, {}, 0, "got no answer"),
        ({}, 0, {"kv_blocks_free": 6}, 0, "2 blocks are held"),
        ({}, 0, {"waiting": 1}, 0, "1 requests open"),
        ({}, 0, {}, 100 << 20, "grown by 100 MiB"),
    ],
)
def test_what_must_not_happen_is_named(
    load: ModuleType,
    client: ModuleType,
    changes: dict[str, Any],
    different: int,
    stats: dict[str, Any],
    growth: int,
    problem: str,
) -> None:
    agreement = Counter({"equal": 1, "different": different})
    answers = [answer(client, **changes)]
    (found,) = load.problems(answers, agreement, {**FREE, **stats}, growth)
    assert problem in found
    assert load.problems([answer(client)], Counter(equal=1), FREE, 0) == []


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
        assert mock.disconnected.wait(60)
        assert ask(mock, leave={"pieces": 900, "seconds": 0.2}).left
        mock.refusal = (429, "full")
        refused = ask(mock)
        assert (refused.status, "full" in refused.error) == (429, True)

"""Chats of OpenAI and ShareGPT, calls of tools, and rows of Alpaca."""

import json
from typing import Any

import pytest

from overspill.core.errors import ConfigError
from overspill.train.finetune.json_lines import parse_line
from overspill.train.finetune.kinds import Chat, Instruction, Kind

USER = {"role": "user", "content": "2 + 3?"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "5"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def _parse(content: Any) -> Any:
    return parse_line(json.dumps(content), "f:1", None)[1]


def test_calls_of_tools_have_arguments_and_need_no_text() -> None:
    as_text = {**CALL, "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    without_text = {"role": "assistant", "tool_calls": [as_text]}
    for calls in (CALLS, without_text):
        chat = _parse({"messages": [USER, calls, RESULT], "tools": [TOOL]})
        assert chat == Chat("f:1", [USER, CALLS, RESULT], [TOOL])
    as_text_too = _parse({"messages": [USER, CALLS], "tools": json.dumps([TOOL])})
    assert as_text_too.tools == [TOOL]
    for none in (None, "", [], "[]"):
        assert _parse({"messages": [USER, CALLS], "tools": none}).tools is None


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = _parse({"messages": [{"role": "assistant", "content": parts}]})
    assert chat.messages == [{"role": "assistant", "content": "ab"}]


def test_chats_of_sharegpt_become_those_of_openai() -> None:
    turns = [
        {"from": "human", "value": "2 + 3?"},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "observation", "value": "5"},
        {"from": "gpt", "value": ""},
    ]
    chat = _parse({"conversations": turns, "system": "Add.", "tools": json.dumps([TOOL])})
    last = {"role": "assistant", "content": ""}
    system = {"role": "system", "content": "Add."}
    assert chat == Chat("f:1", [system, USER, CALLS, RESULT, last], [TOOL])
    assert _parse({"conversations": [USER, last]}).messages == [USER, last]


def test_rows_of_alpaca_are_instructions() -> None:
    row = {"instruction": "Add.", "input": "2, 3", "output": "5", "text": "Below is an ..."}
    assert _parse(row) == Instruction("f:1", "Add.", "2, 3", "5")
    for empty in ({}, {"input": ""}, {"input": None}):
        found = _parse({"instruction": "Add.", "output": "5", **empty})
        assert found == Instruction("f:1", "Add.", "", "5")


def _calls(**function: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "tool_calls": [{"function": function}]}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"messages": [USER, {"role": "assistant", "tool_calls": []}]}, "message 2 without a str"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": "f"}]}, "found 'f' in message 2"),
        ({"messages": [{"role": "user", "content": [7]}]}, "message 1: 7 in a message is not text"),
        ({"messages": _calls(arguments={})}, r'expected "tool_calls" to be a list of objects with'),
        ({"messages": _calls(name="f", arguments='{"a"')}, r'found the arguments \'\{"a"\' in mes'),
        (
            {"messages": _calls(name="f", arguments="[" * 10**5)},
            "found the arguments '.*…' in mess",
        ),
        ({"messages": _calls(name="f", arguments=[1])}, r"found the arguments \[1\] in message 2"),
        ({"messages": [USER, CALLS], "tools": "f"}, '"tools" to be a list of JSON obj.* found \'f'),
        ({"messages": [USER, CALLS], "tools": {"f": 1}}, r'found \{"f": 1\}'),
        ({"messages": [USER, CALLS], "tools": [{"name": "\ud800"}]}, '"tools" contains the lone'),
        ({"messages": _calls(name="\ud800")}, "'tool_calls' of message 2 contains the lone"),
        ({"conversations": "Hi"}, "found \"conversations\" = 'Hi'"),
        ({"conversations": [{"from": "king", "value": "a"}]}, "one of human, .* 'king' in mess"),
        ({"conversations": [{"from": "gpt", "value": 1}]}, 'a string "value", found message 1'),
        ({"conversations": [{"from": "function_call", "value": "f"}]}, '"tool_calls" to be a list'),
        ({"conversations": [{"from": "human", "value": "a"}]}, 'role "assistant" .*, found none'),
        ({"instruction": "a", "output": ""}, 'found an empty "output"'),
        ({"instruction": "a", "output": "b", "input": 3}, 'found "input" = 3'),
        ({"instruction": "a", "output": "b", "history": [["a", "b"]]}, 'all turns, found a "hist'),
        ({"instruction": "a"}, 'with "instruction" and "output", .* found an object with "instr'),
    ],
)
def test_a_bad_line_is_named(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^f:1: .*" + message):
        _parse(content)


def test_nothing_but_errors_for_users_is_raised_at_any_depth() -> None:
    """Reading JSON takes less of Python's stack than writing it."""
    refused = 0
    for depth in range(100, 1100, 25):
        tools = '[{"a":' * depth + "1" + "}]" * depth
        line = f'{{"messages": [{json.dumps(USER)}, {json.dumps(CALLS)}], "tools": {tools}}}'
        try:
            parse_line(line, "f:1", Kind.CHAT)
        except ConfigError:
            refused += 1
    assert 0 < refused < 40

"""Calls of tools in the text of an answer."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.serve.llm import LLM
from overspill.server.protocol import ChatRequest
from overspill.server.tools import Call, new_reader
from tests.server.running import ScriptedLLM, running

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("sum", "weather.now")]
HERMES = "tools <tool_call>"
MISTRAL = "tools [TOOL_CALLS]"
LLAMA = 'tools {"name": x, "parameters": y}'


def read(template: str, parts: list[str], **options: Any) -> tuple[str, list[Call]]:
    """The text and the calls of an answer that comes in parts."""
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, **options}
    reader = new_reader(ChatRequest.model_validate(body), template)
    assert reader is not None
    found = [*(reader.feed(part) for part in parts), reader.end()]
    return "".join(each.text for each in found), [call for each in found for call in each.calls]


def names(calls: list[Call]) -> list[tuple[str | None, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


SUM = '{"name": "sum", "arguments": {"a": [1, "}"]}}'
NOW = '{"name": "weather.now", "arguments": {}}'
ARGUMENTS = {"a": [1, "}"]}
CASES = [
    (HERMES, f"<tool_call>\n{SUM}\n</tool_call>", "", [("sum", ARGUMENTS)]),
    (HERMES, f"Well: <tool_call>{SUM}</tool_call>", "Well: ", [("sum", ARGUMENTS)]),
    (
        HERMES,
        f"\n<tool_call>{SUM}</tool_call>\n<tool_call>{NOW}</tool_call>",
        "",
        [("sum", ARGUMENTS), ("weather.now", {})],
    ),
    (HERMES, f"<tool_call>{SUM}", "", [("sum", ARGUMENTS)]),  # the end of the text is an end too
    (HERMES, "a < b <tool", "a < b <tool", []),
    (HERMES, "<tool_call>{</tool_call> no", "<tool_call>{</tool_call> no", []),
    (HERMES, '<tool_call>{"name": "x"}</tool_call>', '<tool_call>{"name": "x"}</tool_call>', []),
    (MISTRAL, f"[TOOL_CALLS][{SUM}, {NOW}]", "", [("sum", ARGUMENTS), ("weather.now", {})]),
    (MISTRAL, f"[{SUM}]", "", [("sum", ARGUMENTS)]),  # its marker is a special token
    (MISTRAL, '[TOOL_CALLS]sum[ARGS]{"a": 1}', "", [("sum", {"a": 1})]),
    (MISTRAL, 'sum{"a": 1}', "", [("sum", {"a": 1})]),
    (MISTRAL, "[1, 2]", "[1, 2]", []),
    (MISTRAL, "summary", "summary", []),
    (LLAMA, '{"name": "sum", "parameters": {"a": 1}}', "", [("sum", {"a": 1})]),
    (LLAMA, f"<|python_tag|>{SUM}; {NOW}", "", [("sum", ARGUMENTS), ("weather.now", {})]),
    (LLAMA, '{"answer": 5}', '{"answer": 5}', []),
    (LLAMA, "Plain text with {braces}.", "Plain text with {braces}.", []),
]


@pytest.mark.parametrize(("template", "answer", "text", "calls"), CASES)
def test_calls_are_found_in_the_style_of_the_template(
    template: str, answer: str, text: str, calls: list[Any]
) -> None:
    for parts in ([answer], list(answer)):
        found, made = read(template, parts)
        assert (found, names(made)) == (text, calls)
        assert [call.index for call in made] == list(range(len(calls)))
        assert len({call.id for call in made}) == len(calls)


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", SUM, NOW, "{", "}", "<", " ", "text", "\n"]
)


@given(st.lists(PIECES, max_size=8), st.data())
def test_it_does_not_matter_how_an_answer_is_divided(parts: list[str], data: Any) -> None:
    answer = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)), max_size=6)))
    divided = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    whole, calls = read(HERMES, [answer])
    text, again = read(HERMES, divided)
    assert text.split() == whole.split()
    assert names(again) == names(calls)


def test_only_one_call_is_taken_if_that_is_asked_for() -> None:
    answer = f"<tool_call>{SUM}</tool_call><tool_call>{NOW}</tool_call>"
    _, calls = read(HERMES, [answer], parallel_tool_calls=False)
    assert names(calls) == [("sum", ARGUMENTS)]


def test_the_client_gets_text_and_calls(llm: LLM) -> None:
    scripted = ScriptedLLM(llm, ["Let me ", "see. <tool", "_call>", SUM, "</tool_call>"])
    options: Any = {
        "model": "tiny", "messages": [{"role": "user", "content": "a"}], "tools": TOOLS,
    }  # fmt: skip
    with running(scripted) as server, server.client() as client:
        choice = client.chat.completions.create(**options).choices[0]
        chunks = list(client.chat.completions.create(stream=True, **options))
        unused = client.chat.completions.create(tool_choice="none", **options).choices[0]
    assert choice.message.content == "Let me see. "
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == ARGUMENTS
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see. "
    ((streamed,),) = [delta.tool_calls for delta in deltas if delta.tool_calls]
    assert streamed.index == 0
    assert streamed.function.model_dump() == call.function.model_dump()
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert unused.message.tool_calls is None
    assert unused.finish_reason == "stop"

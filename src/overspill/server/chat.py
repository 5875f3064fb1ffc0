"""POST /v1/chat/completions"""

import functools
import inspect
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from overspill.serve.params import Piece, Result
from overspill.server.answers import Job
from overspill.server.errors import invalid
from overspill.server.forms import Form
from overspill.server.logprobs import TokenTexts
from overspill.server.plan import Plan, check_length
from overspill.server.protocol import ChatRequest, Message, NamedTool
from overspill.server.sampling import samples_of, sampling_params, schema_of
from overspill.server.tool_schema import check_tools, tool_schema
from overspill.server.tools import Call, Found, ToolReader, new_reader

if TYPE_CHECKING:
    from overspill.serve.llm import LLM


def plan_chat(llm: "LLM", body: ChatRequest, model: str) -> Plan:
    """Return the plan of a chat. It takes long to tokenize a long chat."""
    llm.check_chats()
    template = llm.chat_template
    check_tools(body, template)
    of_tools = tool_schema(body)
    schema = of_tools or schema_of(body.response_format)
    schema_field = "response_format" if of_tools is None else "tools"
    top = body.top_logprobs or 0
    most = body.max_completion_tokens or body.max_tokens or llm.context
    logprobs = top if body.logprobs else None
    params = sampling_params(body, most, logprobs, schema, schema_field=schema_field)
    tools = None
    if body.tools and body.tool_choice != "none":
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    messages = [_message(message) for message in body.messages]
    given = template_arguments(body, template)

    def check(text: str) -> None:
        check_length(llm.least_tokens(text), llm, "messages", "at least ")

    is_long = sum(len(message["content"] or "") for message in messages) >= llm.context
    tokens = llm.check_chat_tokens(messages, tools, given, check if is_long else None)
    check_length(len(tokens), llm, "messages")
    n = body.n or 1
    form = ChatForm(
        model,
        [new_reader(body, template or "") for _ in range(n)],
        isinstance(body.tool_choice, NamedTool),
        TokenTexts(llm.token_bytes) if body.logprobs else None,
        top,
        body.includes_usage,
    )
    return Plan([Job(tokens, each) for each in samples_of(params, n)], n, form, schema_field)


def template_arguments(body: ChatRequest, template: str | None) -> dict[str, Any]:
    """Return variables for the chat template, such as `enable_thinking`. Raises an error for
    variables that it does not use, and for arguments of the tokenizer, such as another template."""
    given = body.chat_template_kwargs or {}
    used = set(re.findall(r"\w+", template or ""))
    if body.reasoning_effort is not None:
        if "reasoning_effort" not in used:
            problem = "reasoning_effort is not a variable of the chat template; leave it out"
            raise invalid(problem, "reasoning_effort")
        given = {**given, "reasoning_effort": body.reasoning_effort}
    for name in given:
        if name not in used or name in _reserved():
            asked = f"chat_template_kwargs: {name[:40]!r}"
            raise invalid(f"{asked} is not a variable of the chat template", "chat_template_kwargs")
    return dict(given)


@functools.cache
def _reserved() -> frozenset[str]:
    from transformers import PreTrainedTokenizerBase

    arguments = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset({"messages", *arguments})


def _message(message: Message) -> dict[str, Any]:
    """Return a message in the form that chat templates expect."""
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": _content(message)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            made[name] = getattr(message, name)
    for name in ("audio", "function_call"):
        if getattr(message, name) is not None:
            problem = f"{name} of a message is not supported; give its text, or tool_calls"
            raise invalid(problem, "messages")
    if message.tool_calls:
        made["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    elif message.content is None and message.role != "assistant":
        raise invalid(f"a message of the {message.role} has no content", "messages")
    return made


def _content(message: Message) -> str | None:
    if message.content is None:
        # without calls the text is empty: templates would print "None"
        return message.refusal or (None if message.tool_calls else "")
    if isinstance(message.content, str):
        return message.content
    texts = []
    for part in message.content:
        text = {"text": part.text, "refusal": part.refusal}.get(part.type)
        if text is None:
            raise invalid(
                f"a content part of type {part.type[:40]!r} is not supported; this model reads "
                'text: {"type": "text", "text": "..."}',
                "messages",
            )
        texts.append(text)
    return "".join(texts)


class ChatForm(Form):
    """Form of chats."""

    def __init__(
        self,
        model: str,
        readers: Sequence[ToolReader | None],
        named: bool,
        texts: TokenTexts | None,
        top: int,
        with_usage: bool,
    ) -> None:
        """`readers` find calls of tools, one for each answer; `named` says that the client has
        chosen the tool; `texts` are for log probabilities, if they are asked for."""
        super().__init__("chat.completion.chunk", "chatcmpl", model, with_usage)
        self._readers = readers
        self._called = [False] * len(readers)
        self._named = named
        self._texts = texts
        self._top = top

    def opening(self) -> bytes:
        first = '{"role":"assistant","content":""}'
        return b"".join(self._delta(index, first) for index in range(len(self._readers)))

    def events(self, index: int, piece: Piece) -> bytes:
        found = self._read(index, piece.text, piece.finish_reason is not None)
        logs = "null"
        if self._texts is not None and piece.logprobs:
            content = self._texts.chat(piece.token_ids, piece.logprobs, self._top)
            logs = json.dumps({"content": content, "refusal": None}, separators=(",", ":"))
        events = b""
        if found.text or logs != "null":
            events += self._delta(index, f'{{"content":{json.dumps(found.text)}}}', logs)
        for call in found.calls:
            events += self._delta(index, json.dumps({"tool_calls": [call.delta()]}))
        if piece.finish_reason is not None:
            reason = self._reason(index, piece.finish_reason)
            events += self._delta(index, "{}", reason=json.dumps(reason))
        return events

    def _delta(self, index: int, delta: str, logs: str = "null", reason: str = "null") -> bytes:
        fields = f'"index":{index},"delta":{delta},"logprobs":{logs},"finish_reason":{reason}'
        return self._event(f"{{{fields}}}")

    def _read(self, index: int, text: str, last: bool) -> Found:
        reader = self._readers[index]
        if reader is None:
            return Found(text)
        found = reader.feed(text) if text else Found()
        if last:
            rest = reader.end()
            found = Found(found.text + rest.text, [*found.calls, *rest.calls])
        self._called[index] |= bool(found.calls)
        return found

    def _reason(self, index: int, reason: str) -> str:
        """Return the finish reason of an answer. As in OpenAI's API, a call of a tool that the
        client has chosen ends with "stop"."""
        called = self._called[index] and not self._named
        return "tool_calls" if reason == "stop" and called else reason

    def choice(self, index: int, result: Result) -> dict[str, Any]:
        found = self._read(index, result.text, True)
        content = found.text or None if found.calls else found.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if found.calls:
            message["tool_calls"] = _joined(found.calls)
        logs = None
        if self._texts is not None and result.logprobs is not None:
            content_logs = self._texts.chat(result.token_ids, result.logprobs, self._top)
            logs = {"content": content_logs, "refusal": None}
        reason = self._reason(index, result.finish_reason)
        return {"index": index, "message": message, "logprobs": logs, "finish_reason": reason}


def _joined(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return calls without the numbers that only streams have."""
    deltas = [call.delta() for call in calls]
    return [{name: delta[name] for name in ("id", "type", "function")} for delta in deltas]

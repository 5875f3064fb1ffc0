"""Lines of JSON → examples: texts, pairs, rows of Alpaca, and chats of OpenAI and ShareGPT."""

import json
from typing import Any

from overspill.core.errors import ConfigError
from overspill.core.json_text import parse_json
from overspill.train.finetune.kinds import (
    Chat,
    Example,
    Instruction,
    Kind,
    Pair,
    Text,
    check_unicode,
    expected,
    keys,
    short,
)
from overspill.train.messages import read_message

_CHATS = ("messages", "conversations")
_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "assistant": "assistant", "function_call": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function_response": "tool",
}  # fmt: skip


def parse_line(line: str, where: str, kind: Kind | None) -> tuple[Kind, Example]:
    """The example in a line, of `kind` or of the kind that its keys show."""
    wanted = "a JSON object" if kind is None else kind.value
    try:
        content = parse_json(line)
    except ValueError as error:
        raise expected(wanted, short(line), where) from error
    if not isinstance(content, dict):
        raise expected(wanted, short(line), where)
    kind = kind or _kind_of(content, where)
    return kind, _parse(content, kind, where)


def _kind_of(content: dict[str, Any], where: str) -> Kind:
    if any(name in content for name in _CHATS):
        return Kind.CHAT
    if "prompt" in content or "completion" in content:
        return Kind.PAIR
    if "instruction" in content and "output" in content:  # Alpaca's rows also have a "text"
        return Kind.INSTRUCTION
    if "text" in content:
        return Kind.TEXT
    wanted = (
        'a JSON object with "text", with "prompt" and "completion", with "instruction" and '
        '"output", with "messages", or with "conversations"'
    )
    raise expected(wanted, keys(content), where)


def _parse(content: dict[str, Any], kind: Kind, where: str) -> Example:
    if kind is Kind.TEXT:
        return Text(where, _string(content, "text", kind, where))
    if kind is Kind.PAIR:
        return _parse_pair(content, where)
    if kind is Kind.INSTRUCTION:
        return _parse_instruction(content, where)
    if kind is Kind.CHAT:
        return _parse_chat(content, where)
    raise expected(kind.value, "JSON", where)


def _parse_pair(content: dict[str, Any], where: str) -> Pair:
    """A prompt with a completion, with a list of right answers, of which the first is learned, or
    with both."""
    kind = Kind.PAIR
    prompt = _string(content, "prompt", kind, where)
    listed = content.get("answers")
    if listed is None:
        return Pair(where, prompt, _string(content, "completion", kind, where))
    if not isinstance(listed, list) or not listed:
        raise expected(kind.value, f'"answers" = {short(listed)}', where)
    answers = tuple(_string({"answers": answer}, "answers", kind, where) for answer in listed)
    learned = _string(content, "completion", kind, where) if "completion" in content else answers[0]
    return Pair(where, prompt, learned, answers)


def _parse_instruction(content: dict[str, Any], where: str) -> Instruction:
    kind = Kind.INSTRUCTION
    for key in ("system", "history"):  # of LLaMA-Factory
        if content.get(key):
            raise expected(f'{kind.value}, or "messages" with all turns', f'a "{key}"', where)
    instruction = _string(content, "instruction", kind, where)
    given = _string(content, "input", kind, where) if content.get("input") else ""
    return Instruction(where, instruction, given, _string(content, "output", kind, where))


def _parse_chat(content: dict[str, Any], where: str) -> Chat:
    name = next((name for name in _CHATS if name in content), None)
    if name is None:
        raise expected(Kind.CHAT.value, keys(content), where)
    listed = content[name]
    if not isinstance(listed, list):
        raise expected(Kind.CHAT.value, f'"{name}" = {short(listed)}', where)
    messages = [_parse_message(each, number, where) for number, each in enumerate(listed, start=1)]
    if name == "conversations" and content.get("system"):
        text = _string(content, "system", Kind.CHAT, where)
        messages.insert(0, {"role": "system", "content": text})
    if not any(message["role"] == "assistant" for message in messages):
        raise expected('a message of the role "assistant" to learn from', "none", where)
    return Chat(where, messages, _parse_tools(content.get("tools"), where))


def _parse_message(message: Any, number: int, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise expected(Kind.CHAT.value, f"message {number} = {short(message)}", where)
    if "from" in message and "role" not in message:
        message = _of_sharegpt(message, number, where)
    if not isinstance(message.get("role"), str):
        raise expected(Kind.CHAT.value, f"message {number} without a string 'role'", where)
    calls = message.get("tool_calls")
    if calls:
        _check_calls(calls, number, where)
    if not (isinstance(message.get("content"), str | list) or calls):
        raise expected(Kind.CHAT.value, f"message {number} without a string 'content'", where)
    try:
        read = read_message(message)
    except ConfigError as error:
        raise ConfigError(f"{where}: message {number}: {error}") from error
    for key, value in read.items():
        _check_value(value, f"{key!r} of message {number}", where)
    return read


def _of_sharegpt(message: dict[str, Any], number: int, where: str) -> dict[str, Any]:
    """A message of ShareGPT in OpenAI's format."""
    role, value = message["from"], message.get("value")
    if not isinstance(role, str) or role not in _SHAREGPT_ROLES:
        names = ", ".join(_SHAREGPT_ROLES)
        raise expected(f'"from" to be one of {names}', f"{short(role)} in message {number}", where)
    if not isinstance(value, str):
        raise expected('a string "value"', f"message {number} without one", where)
    if role != "function_call":
        return {"role": _SHAREGPT_ROLES[role], "content": value}
    try:
        call = parse_json(value)
    except ValueError:
        call = value
    calls = call if isinstance(call, list) else [call]
    wrapped = [{"type": "function", "function": each} for each in calls]
    return {"role": "assistant", "content": None, "tool_calls": wrapped}


def _check_calls(calls: Any, number: int, where: str) -> None:
    wanted = '"tool_calls" to be a list of objects with a "function" of a "name" and "arguments"'
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise expected(wanted, f"{short(calls)} in message {number}", where)
        arguments = function.get("arguments")
        try:
            parsed = parse_json(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            parsed = arguments
        if not isinstance(parsed, dict | None):
            found = f"the arguments {short(arguments)} in message {number}"
            raise expected('"arguments" of "tool_calls" to be a JSON object', found, where)


def _parse_tools(tools: Any, where: str) -> list[dict[str, Any]] | None:
    """The tools of a chat, which some data sets store as the text of JSON."""
    if tools is None or tools == "":
        return None
    try:
        listed = parse_json(tools) if isinstance(tools, str) else tools
    except ValueError:
        listed = None
    if not isinstance(listed, list) or not all(isinstance(tool, dict) for tool in listed):
        raise expected('"tools" to be a list of JSON objects', short(tools), where)
    _check_value(listed, '"tools"', where)
    return listed or None


def _string(content: dict[str, Any], key: str, kind: Kind, where: str) -> str:
    if key not in content:
        raise expected(kind.value, keys(content), where)
    value = content[key]
    if not isinstance(value, str):
        raise expected(kind.value, f'"{key}" = {short(value)}', where)
    if not value:
        raise expected(kind.value, f'an empty "{key}"', where)
    check_unicode(value, f'"{key}"', where)
    return value


def _check_value(value: Any, field: str, where: str) -> None:
    """Raise for text that no tokenizer accepts, and for nesting that no template can follow."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise ConfigError(f"{where}: {field} is nested too deeply; simplify it") from error
    check_unicode(text, field, where)

"""Calls of tools in the text of an answer."""

import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from overspill.serve.text import overlap
from overspill.server.protocol import ChatRequest, NamedTool, Tool


@dataclass(frozen=True)
class Call:
    """Call of a tool, or a part of one: if a call comes in parts, only the first has a name."""

    index: int
    arguments: str
    name: str | None = None
    id: str | None = None

    def delta(self) -> dict[str, Any]:
        """Return the call as an item of `tool_calls` in an event."""
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass
class Found:
    """Text and calls that were found in a part of an answer."""

    text: str = ""
    calls: list[Call] = field(default_factory=list)


class ToolReader(Protocol):
    """Divides an answer into text and calls while it is generated."""

    def feed(self, text: str) -> Found:
        """Read more text of the answer."""

    def end(self) -> Found:
        """Return the text that was held back, and its calls. No text follows."""


def new_id() -> str:
    """Return nine letters and digits: templates of Mistral accept nothing else."""
    return secrets.token_hex(5)[:9]


Read = Callable[[str], list[tuple[str, Any]] | None]


@dataclass(frozen=True)
class Style:
    """Form in which a family of models writes calls."""

    marker: str
    """The text that begins a call."""
    openers: tuple[str, ...]
    """Texts that begin a call at the start of an answer: special tokens such as the marker may be
    left out of the text."""
    end: str | None
    """The text that ends a call; None if a call takes the rest of the answer."""
    read: Read
    """Returns the names and arguments in a call; None if it is no call."""


def _objects(text: str) -> list[tuple[str, Any]] | None:
    """Return names and arguments of JSON objects, or of a list of them; None for other text."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text):
        if text[at] in " \t\r\n;,":
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, dict) or not isinstance(each.get("name"), str):
                return None
            found.append((each["name"], each.get("arguments", each.get("parameters", {}))))
    return found or None


def _named(text: str) -> list[tuple[str, Any]] | None:
    """Return the calls in a text of Mistral: a list of objects, or a name and its arguments."""
    match = re.match(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)", text)
    if match is None:
        return _objects(text)
    try:
        return [(match[1], json.loads(text[match.end() :]))]
    except (ValueError, RecursionError):
        return None


def find_style(template: str, tools: Sequence[Tool]) -> Style | None:
    """Return the style of a model's calls, by its chat template; None if it is not known."""
    if "[TOOL_CALLS]" in template:
        names = tuple(tool.function.name + "{" for tool in tools)
        return Style("[TOOL_CALLS]", ("[{", *names), None, _named)
    if "<tool_call>" in template and "<function=" not in template:
        return Style("<tool_call>", (), "</tool_call>", _objects)
    if "<|python_tag|>" in template or re.search(r'"parameters\\?"\s*:', template):
        return Style("<|python_tag|>", ("{",), None, _objects)
    return None


class StyleReader:
    """Finds calls in the style of a model. Text that looks like a call and is none stays text."""

    def __init__(self, style: Style, names: Sequence[str], most: int | None = None) -> None:
        """`names` are the names of the tools; at most `most` calls are accepted."""
        self._style = style
        self._names = frozenset(names)
        self._most = most
        self._held = ""
        self._begun = False  # text has been given out
        self._inside: int | None = None  # characters of the marker before the call in `_held`
        self._count = 0

    def feed(self, text: str) -> Found:
        self._held += text
        found = Found()
        while self._step(found):
            pass
        return found

    def end(self) -> Found:
        found = Found()
        if self._inside is not None:
            self._close(found, self._held[self._inside :], "", "")
        elif self._begun or self._held.strip():
            self._give(found, self._held)
        self._held = ""
        return found

    def _step(self, found: Found) -> bool:
        """Read the next part of the held text; return False if more text is needed."""
        if self._inside is not None:
            end = self._style.end
            if end is None or end not in self._held:
                return False
            content, _, rest = self._held[self._inside :].partition(end)
            self._close(found, content, end, rest)
            return True
        return self._open(found)

    def _open(self, found: Found) -> bool:
        """Look for the beginning of a call, and give out the text before it."""
        marker, start = self._style.marker, self._held.lstrip()
        if not self._begun:
            if any(start.startswith(opener) for opener in self._style.openers):
                self._held, self._inside = start, 0
                return True
            if not start or any(o.startswith(start) for o in (marker, *self._style.openers)):
                return False  # not decided yet
        before, there, rest = self._held.partition(marker)
        if there:
            self._give(found, before if before.strip() else "")
            self._held, self._inside = there + rest, len(there)
            return True
        keep = overlap(self._held, marker)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        self._give(found, text)
        return False

    def _close(self, found: Found, content: str, end: str, rest: str) -> None:
        """End a call; its content stays text if it is none."""
        calls = self._style.read(content)
        if calls is None or not all(name in self._names for name, _ in calls):
            self._give(found, self._held[: self._inside] + content + end)
        else:
            for name, arguments in calls:
                self._add(found, name, arguments)
            rest = rest.lstrip()
        self._held, self._inside = rest, None

    def _add(self, found: Found, name: str, arguments: Any) -> None:
        if self._most is not None and self._count >= self._most:
            return
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        found.calls.append(Call(self._count, text, name, new_id()))
        self._count += 1

    def _give(self, found: Found, text: str) -> None:
        if text:
            self._begun = True
            found.text += text


class NamedReader:
    """Reads an answer that is the arguments of one tool: a grammar allows nothing else."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str) -> Found:
        name, self._name = self._name, None
        if name is not None:
            return Found(calls=[Call(0, text, name, new_id())])
        return Found(calls=[Call(0, text)] if text else [])

    def end(self) -> Found:
        return Found() if self._name is None else self.feed("")


_ANY = Style("<|python_tag|>", ("{",), None, _objects)
"""Style of an answer that a grammar restricts to a call."""


def new_reader(request: ChatRequest, template: str) -> ToolReader | None:
    """Return a reader that finds the calls in one answer; None if there can be none."""
    tools, choice = request.tools or [], request.tool_choice
    if not tools or choice == "none":
        return None
    if isinstance(choice, NamedTool):
        return NamedReader(choice.function.name)
    names = [tool.function.name for tool in tools]
    style = _ANY if choice == "required" else find_style(template, tools)
    most = 1 if request.parallel_tool_calls is False else None
    return None if style is None else StyleReader(style, names, most)

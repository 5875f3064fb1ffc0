"""JSON schemas of answers that must be calls of tools."""

import reprlib
from typing import Any

from overspill.server.errors import invalid
from overspill.server.protocol import ChatRequest, NamedTool, Tool


def check_tools(request: ChatRequest, template: str | None) -> None:
    """Raise an error for tools and choices that cannot be followed."""
    tools, choice = request.tools or [], request.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice asks for a tool, but tools is empty", "tool_choice")
        return
    if choice != "none" and (template is None or "tools" not in template):
        raise invalid("the chat template of this model does not support tools", "tools")
    if isinstance(choice, NamedTool):
        names = [tool.function.name for tool in tools]
        if choice.function.name not in names:
            asked = f"tool_choice names {reprlib.repr(choice.function.name)}"
            there = reprlib.repr(names)  # both may be megabytes
            raise invalid(f"{asked}, which is not one of the tools {there}", "tool_choice")
    format_ = request.response_format
    if choice != "none" and format_ is not None and format_.type != "text":
        raise invalid(
            "an answer that must be JSON cannot call tools; leave out response_format, or set "
            "tool_choice to none",
            "response_format",
        )


def tool_schema(request: ChatRequest) -> dict[str, Any] | None:
    """Return the schema of an answer that must be a call; None if it need not be one. If
    `tool_choice` names a tool, the schema is that of its arguments."""
    tools, choice = request.tools or [], request.tool_choice
    if isinstance(choice, NamedTool):
        return next(_arguments(t) for t in tools if t.function.name == choice.function.name)
    if choice != "required":
        return None
    return {
        "anyOf": [_call(tool, number) for number, tool in enumerate(tools)],
        "$defs": {
            f"tool{number}": _rebase(_arguments(tool), f"#/$defs/tool{number}")
            for number, tool in enumerate(tools)
        },
    }


def _arguments(tool: Tool) -> dict[str, Any]:
    return {"type": "object", **(tool.function.parameters or {})}


def _call(tool: Tool, number: int) -> dict[str, Any]:
    arguments = {"$ref": f"#/$defs/tool{number}"}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _rebase(schema: Any, root: str) -> Any:
    """Return a schema as a part of another one: its references begin at `root`."""
    if isinstance(schema, list):
        return [_rebase(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    rebased = {name: _rebase(value, root) for name, value in schema.items()}
    reference = rebased.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        rebased["$ref"] = root + reference[1:]
    return rebased

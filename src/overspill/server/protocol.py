"""The bodies of requests, as OpenAI's API defines them. Unknown fields are refused, but ignored in
messages, tools and schemas.

A setting that is ignored, or misspelt, would go unnoticed. Fields that cannot change an answer, and
values that equal the behaviour of this server, are accepted."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from overspill.server.errors import ApiError, invalid

MOST_SAMPLES = 128
MOST_LOGPROBS = 20
MOST_STOPS = 4
MOST_ENTRIES = 10_000
"""Entries of an object whose keys are free."""

_WITHOUT_EFFECT = frozenset(
    {
        "include_obfuscation", "metadata", "prediction", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
    }
)  # fmt: skip
"""Fields of OpenAI's API that concern its accounts, its storage and its speed."""

_USUAL: Mapping[str, Any] = {
    "add_generation_prompt": True, "best_of": 1, "continue_final_message": False, "echo": False,
    "include_stop_str_in_output": False, "length_penalty": 1, "min_p": 0, "repetition_penalty": 1,
    "skip_special_tokens": True, "stop_token_ids": [], "use_beam_search": False,
}  # fmt: skip
"""Fields of other servers, which clients often send with the value that changes nothing."""


def _check_unknown(given: Mapping[str, Any] | None, inside: str = "") -> None:
    """Raise an error for the first field that could change the answer. `inside` is the name of the
    object that has these fields."""
    for name, value in (given or {}).items():
        usual = name in _USUAL and value == _USUAL[name]
        if value is None or name in _WITHOUT_EFFECT or usual:
            continue
        param = f"{inside}{name[:80]}"
        raise invalid(f"{param!r} is not supported here; leave it out", param, "unknown_parameter")


def _few_entries(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MOST_ENTRIES:
        problem = "Object should have at most {most} entries, not {found}"
        found = {"most": MOST_ENTRIES, "found": len(value)}
        raise PydanticCustomError("too_many_entries", problem, found)
    return value


Item = TypeVar("Item")
# Errors are collected for all values: without limits, four megabytes of wrong ones take half a
# minute and gigabytes of memory.
List = Annotated[list[Item], Field(fail_fast=True)]
Entries = Annotated[dict[str, Item], BeforeValidator(_few_entries)]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Language = Annotated[str, Field(min_length=1, max_length=64)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Body(BaseModel):
    """Part of a body. Types are not converted: "5" is no number."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Body):
    model_config = ConfigDict(extra="allow")  # and refused in `check`
    include_usage: bool | None = None


class Shared(Body):
    """Fields that chats and completions have in common."""

    model_config = ConfigDict(extra="allow")  # and refused in `check`
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] | None = None
    stop: str | List[str] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: int | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Entries[Annotated[float, Field(ge=-100, le=100)]] | None = None
    user: str | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with an event that has the number of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Raise an error for values that types do not exclude."""
        _check_unknown(self.model_extra)
        if self.stream_options is not None:
            if not self.stream:
                raise invalid("stream_options is only for stream=true", "stream_options")
            _check_unknown(self.stream_options.model_extra, "stream_options.")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MOST_STOPS or not all(stops):
            raise invalid(f"stop takes 1 to {MOST_STOPS} texts, none empty", "stop")


class TextPart(Body):
    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | List[TextPart] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: List[ToolCall] | None = None
    tool_call_id: str | None = None
    audio: Any = None
    function_call: Any = None


class Function(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class SchemaFormat(Body):
    model_config = ConfigDict(protected_namespaces=())
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class ChatRequest(Shared):
    """POST /v1/chat/completions"""

    messages: Annotated[List[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: List[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Entries[str | bool | int | float] | None = None
    reasoning_effort: str | None = None
    functions: Any = None
    function_call: Any = None
    modalities: List[str] | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
        for name in ("functions", "function_call"):
            if getattr(self, name) is not None:
                raise invalid(f"{name} is not supported; use tools and tool_choice", name)
        if self.modalities not in (None, ["text"]):
            raise invalid("this model answers with text only", "modalities")


class CompletionRequest(Shared):
    """POST /v1/completions"""

    prompt: str | List[str] | List[int] | List[List[int]]
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None
    src_lang: Language | None = None
    tgt_lang: Language | None = None
    decoder_prompt: str | List[int] | None = None

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.n or 1):
            raise invalid("best_of is not supported; use n, which returns all answers", "best_of")
        if self.suffix:
            raise invalid("suffix is not supported; leave it out", "suffix")
        if self.echo and self.logprobs is not None:
            raise invalid("logprobs of the prompt are not supported; leave out echo", "echo")
        if self.prompt == []:
            raise invalid("prompt is an empty list; give at least one prompt", "prompt")


Parsed = TypeVar("Parsed", bound=Shared)


def parse(kind: type[Parsed], body: bytes) -> Parsed:
    """Return a body as an object; raises an `ApiError` if it is wrong."""
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None
    parsed.check()
    return parsed


def _explain(error: ValidationError) -> ApiError:
    """Return an error that names the wrong field, without its value: it may be a prompt."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return invalid(f"the body is not valid JSON: {first['msg'].partition(': ')[2]}")
    param = ""
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif part in _FIELDS:
            param += f".{part}" if param else part
        elif not isinstance(part, str) or not _is_type(part):
            param += f"[{part!r}]"[:80]
    return invalid(f"{param or 'the body'}: {first['msg']}", param or None)


def _fields(kind: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in kind.model_fields.items()}


_MODELS = (
    ChatRequest, CompletionRequest, StreamOptions, TextPart, CalledFunction, ToolCall, Message,
    Function, Tool, NamedFunction, NamedTool, SchemaFormat, ResponseFormat,
)  # fmt: skip
_FIELDS = frozenset(name for kind in _MODELS for name in _fields(kind))


def _is_type(part: str) -> bool:
    """Return whether a part of a location is pydantic's name for a member of a union."""
    return part in ("str", "int", "float", "bool", "NamedTool") or part.startswith(
        ("list[", "literal[", "dict[", "constrained-", "function-", "nullable[")
    )

"""Conversion of the fields of a request to `SamplingParams`."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from overspill.core.errors import ConfigError
from overspill.serve.params import SamplingParams
from overspill.serve.schema_process import BusyError
from overspill.server.errors import ApiError, invalid, machine_busy
from overspill.server.protocol import ResponseFormat, Shared

_SEEDS = 1 << 63
_ARGUMENTS = frozenset(
    ["prompt", "tokens", *(field.name for field in dataclasses.fields(SamplingParams))]
)


def sampling_params(
    body: Shared,
    max_tokens: int,
    logprobs: int | None,
    schema: dict[str, Any] | None,
    decoder: Mapping[str, Any] | None = None,
    schema_field: str = "response_format",
) -> SamplingParams:
    """Return the parameters of a request. Defaults are those of OpenAI's API: tokens are drawn with
    temperature 1. `decoder` are further arguments; `schema_field` is the field of the schema."""
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k == -1 else body.top_k,
        "seed": body.seed,
        "stop": body.stop,
        "min_tokens": body.min_tokens,
        "ignore_eos": body.ignore_eos,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "logit_bias": _bias(body.logit_bias),
        "json_schema": schema,
        **(decoder or {}),
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplingParams(
            max_tokens=max_tokens, logprobs=logprobs, **{"temperature": 1.0, **chosen}
        )
    except ConfigError as error:
        raise refused(error, schema_field) from error


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    for key in given:
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise invalid(f"logit_bias: {key[:40]!r} is not a token id", "logit_bias")
    return {int(key): value for key, value in given.items()}


def samples_of(params: SamplingParams, n: int) -> list[SamplingParams]:
    """Return the parameters of n answers to one prompt. With a seed each gets a seed of its own, so
    that they differ."""
    if params.seed is None:
        return [params] * n
    return [dataclasses.replace(params, seed=(params.seed + i) % _SEEDS) for i in range(n)]


def schema_of(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    """Return the JSON schema that an answer must follow; None if it is free."""
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return {"type": "object"}
    if response_format.json_schema is None:
        raise invalid("response_format of type json_schema needs json_schema", "response_format")
    schema = response_format.json_schema.schema_
    return {"type": "object"} if schema is None else schema


def refused(error: ConfigError, schema_field: str = "response_format") -> ApiError:
    """Return the engine's error about a wrong value as one for the client. Most messages begin with
    the name of the argument; the schema is of the field `schema_field` of the request."""
    message = str(error)
    name = re.match(r"\w*", message)
    param = name[0] if name and name[0] in _ARGUMENTS else None
    if param == "json_schema":
        param = schema_field
        if param == "tools":
            message = f"the JSON schema of tools{message.removeprefix('json_schema')}"
    if param == "tokens":  # of `LLM.decode`, for echo
        param = "prompt"
    return machine_busy(message, param) if isinstance(error, BusyError) else invalid(message, param)

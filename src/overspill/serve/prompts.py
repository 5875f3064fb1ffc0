"""Checks prompts and the parameters that belong to them."""

from collections.abc import Sequence
from typing import Any

from overspill.core.errors import ConfigError
from overspill.serve.params import SamplingParams

Prompt = str | Sequence[int]


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list."""
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = list(check_prompt(prompts))
    if listed and all(isinstance(each, int) for each in listed):
        return [listed]
    return [each if isinstance(each, str) else check_prompt(each) for each in listed]


def check_prompt(prompt: Any) -> Any:
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise ConfigError(f"{prompt!r} is no prompt; give texts or lists of token ids")
    return prompt


def check_tokens(tokens: Sequence[Any], vocabulary: int, context: int) -> None:
    """Whether these are tokens of the model, and leave room for an answer."""
    if not tokens:
        raise ConfigError("the prompt is empty; give at least one token")
    check_ids(tokens, vocabulary)
    if len(tokens) >= context:
        raise ConfigError(
            f"a prompt of {len(tokens)} tokens leaves no room in the context of "
            f"{context}; shorten it, or raise context= (--context) if the model allows it"
        )


def check_source(tokens: Sequence[Any], vocabulary: int, longest: int) -> None:
    """Whether the encoder takes these tokens."""
    if not tokens:
        raise ConfigError("the source is empty; give at least one token")
    check_ids(tokens, vocabulary)
    if len(tokens) > longest:
        raise ConfigError(
            f"a source of {len(tokens)} tokens is longer than the {longest} that the encoder "
            "takes; shorten it, or raise context= (--context) if the model allows it"
        )


def check_decoder(tokens: Sequence[Any], vocabulary: int, context: int) -> None:
    """Whether a decoder can begin with these tokens, and has room for an answer."""
    check_ids(tokens, vocabulary)
    if len(tokens) >= context:
        raise ConfigError(
            f"decoder_prompt: the decoder begins with {len(tokens)} tokens, which leaves no room "
            f"in its context of {context}; shorten it, or raise context= (--context) if the model "
            "allows it"
        )


def check_ids(tokens: Sequence[Any], vocabulary: int) -> None:
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ConfigError(f"{token!r} in a prompt is not a token id (a whole number)")
        if not 0 <= token < vocabulary:
            raise ConfigError(f"token id {token} is not one of the {vocabulary} of this model")


def params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, prompts: Sequence[Prompt]
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    for each in params if isinstance(params, list | tuple) else [params]:
        if not isinstance(each, SamplingParams):
            raise ConfigError(f"{each!r} is not SamplingParams; give overspill.SamplingParams(...)")
    if len(params) != len(prompts):
        raise ConfigError(f"{len(params)} params for {len(prompts)} prompts; give one for each")
    return list(params)

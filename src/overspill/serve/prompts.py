"""Prompts as tokens, and checks of prompts and their parameters."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from overspill.core.errors import ConfigError
from overspill.serve.params import DECODER_FIELDS, SamplingParams
from overspill.serve.text import Codec, LengthBound, check_text, need_codec

Prompt = str | Sequence[int]


class Prompts(Protocol):
    """Tokens of the prompts of a model."""

    @property
    def languages(self) -> Mapping[str, int]:
        """The token of each language that a prompt may have."""

    def encode(self, text: str, src_lang: str | None = None) -> list[int]:
        """Return the tokens of a text, which may be a source in a language."""

    def least(self, text: str) -> int:
        """Return a number of tokens that a text has at least, 0 if it is not known: a text that is
        too long need not be tokenized."""

    def read(self, prompt: Prompt, params: SamplingParams) -> tuple[list[int], list[int]]:
        """Return the tokens of the source for an encoder, if there is one, and the tokens that the
        decoder continues."""

    def check(self, params: SamplingParams) -> None:
        """Raise if this model cannot have these languages or this decoder prompt."""


class PlainPrompts:
    """Prompts that the model continues."""

    def __init__(self, model: Any, codec: Codec | None, vocabulary: int, context: int) -> None:
        self._model = model
        self._codec = codec
        self._vocabulary = vocabulary
        self._context = context
        self._bound = LengthBound(codec)
        self.languages: Mapping[str, int] = {}

    def encode(self, text: str, src_lang: str | None = None) -> list[int]:
        self.check(SamplingParams(src_lang=src_lang))
        check_text(text)
        return need_codec(self._codec).encode(text)

    def read(self, prompt: Prompt, params: SamplingParams) -> tuple[list[int], list[int]]:
        self.check(params)
        if isinstance(prompt, str):
            check_room(self.least(prompt), self._context, "at least ")
        tokens = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        check_tokens(tokens, self._vocabulary, self._context)
        return [], tokens

    def least(self, text: str) -> int:
        # no token is shorter than a character: the vocabulary is not read for short texts
        return self._bound.least(text) if len(text) >= self._context else 0

    def check(self, params: SamplingParams) -> None:
        for name in DECODER_FIELDS:
            value = getattr(params, name)
            if value is not None:
                raise ConfigError(
                    f"{name}={value!r} is for models with an encoder and a decoder, "
                    f"{type(self._model).__name__} continues its prompt; leave it out "
                    f"(--{name.replace('_', '-')})"
                )


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list."""
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = list(check_prompt(prompts))
    if listed and all(isinstance(each, int) for each in listed):
        return [listed]
    return [each if isinstance(each, str) else check_prompt(each) for each in listed]


def check_prompt(prompt: Any) -> Any:
    """Return a list of token ids, or of prompts, as it was given; raises for other types."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise ConfigError(f"{prompt!r} is no prompt; give texts or lists of token ids")
    return prompt


def check_tokens(tokens: Sequence[Any], vocabulary: int, context: int) -> None:
    """Raise unless these are tokens of the model that leave room for an answer."""
    if not tokens:
        raise ConfigError("the prompt is empty; give at least one token")
    check_ids(tokens, vocabulary)
    check_room(len(tokens), context)


def check_room(count: int, context: int, words: str = "") -> None:
    """Raise if a prompt of so many tokens leaves no room for an answer."""
    if count >= context:
        raise ConfigError(
            f"a prompt of {words}{count} tokens leaves no room in the context of "
            f"{context}; shorten it, or raise context= (--context) if the model allows it"
        )


def check_source(tokens: Sequence[Any], vocabulary: int, longest: int) -> None:
    """Raise unless the encoder takes these tokens."""
    if not tokens:
        raise ConfigError("the source is empty; give at least one token")
    check_ids(tokens, vocabulary)
    if len(tokens) > longest:
        raise ConfigError(
            f"a source of {len(tokens)} tokens is longer than the {longest} that the encoder "
            "takes; shorten it, or raise context= (--context) if the model allows it"
        )


def check_decoder(tokens: Sequence[Any], vocabulary: int, context: int) -> None:
    """Raise unless a decoder can begin with these tokens and has room for an answer."""
    check_ids(tokens, vocabulary, "decoder_prompt")
    if len(tokens) >= context:
        raise ConfigError(
            f"decoder_prompt: the decoder begins with {len(tokens)} tokens, which leaves no room "
            f"in its context of {context}; shorten it, or raise context= (--context) if the model "
            "allows it"
        )


def check_ids(tokens: Sequence[Any], vocabulary: int, name: str = "prompt") -> None:
    """Raise unless these are token ids of the model; `name` is the argument that has them."""
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ConfigError(f"{name}: {token!r} is not a token id (a whole number)")
        if not 0 <= token < vocabulary:
            raise ConfigError(
                f"{name}: token id {token} is not one of the {vocabulary} of this model"
            )


def params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, prompts: Sequence[Prompt]
) -> list[SamplingParams]:
    """Return the parameters of each prompt, the default ones without `params`."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    for each in params if isinstance(params, list | tuple) else [params]:
        if not isinstance(each, SamplingParams):
            raise ConfigError(f"{each!r} is not SamplingParams; give overspill.SamplingParams(...)")
    if len(params) != len(prompts):
        raise ConfigError(f"{len(params)} params for {len(prompts)} prompts; give one for each")
    return list(params)

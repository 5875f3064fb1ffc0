"""Prompts of encoder-decoders: sources, and the tokens that the decoder begins with."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from overspill.core.errors import ConfigError
from overspill.serve.params import SamplingParams
from overspill.serve.prompts import Prompt, check_decoder, check_ids, check_source
from overspill.serve.text import Codec, check_text

_LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}")
"""Name of the special token of a language, such as fra_Latn."""
_NEAR = 5
"""Names that an error lists."""


class SourcePrompts:
    """Prompts that are sources for an encoder. The decoder begins with the start token, a language
    and a decoder prompt. The tokenizer is not changed, so several threads may use it."""

    def __init__(self, model: Any, codec: Codec | None, vocabulary: int, context: int) -> None:
        self._model = model
        self._tokenizer: Any = getattr(codec, "tokenizer", None)
        self._vocabulary = vocabulary
        self._context = context
        self.languages = read_languages(self._tokenizer)

    def encode(self, text: str, src_lang: str | None = None) -> list[int]:
        """Return the tokens of a source in a language, by default in the tokenizer's own."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ConfigError("this model has no tokenizer; give token ids instead of text")
        check_text(text)
        if src_lang is None:
            return list(tokenizer(text, verbose=False)["input_ids"])
        asked = self._language("src_lang", src_lang)
        own = tokenizer.convert_tokens_to_ids(tokenizer.src_lang)
        # its language comes first or last: what `src_lang` of the tokenizer would set
        before, after = (
            [asked if token == own else token for token in tokens]
            for tokens in (tokenizer.prefix_tokens, tokenizer.suffix_tokens)
        )
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return [*before, *tokens, *after]

    def least(self, text: str) -> int:
        """Return 0: tokenizers of these models normalize texts."""
        return 0

    def read(self, prompt: Prompt, params: SamplingParams) -> tuple[list[int], list[int]]:
        """Return the tokens of the source, and the first tokens of the decoder."""
        return self._source(prompt, params), self._opening(params)

    def _source(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        if isinstance(prompt, str):
            tokens = self.encode(prompt, params.src_lang)
        elif params.src_lang is not None:
            raise ConfigError(
                f"src_lang={params.src_lang!r} is for texts: the token ids of a source are taken "
                "as they are; leave it out"
            )
        else:
            tokens = list(prompt)
        check_source(tokens, self._vocabulary, self._context)
        return tokens

    def _opening(self, params: SamplingParams) -> list[int]:
        """Return the first tokens of the decoder. A decoder prompt of token ids may have all of
        them."""
        start = [start_token(self._model)]
        language = None
        if params.tgt_lang is not None:
            language = self._language("tgt_lang", params.tgt_lang)
        prompt = self._decoder_prompt(params.decoder_prompt)
        if prompt[:1] == start:
            if language is not None and prompt[1:2] != [language]:
                raise ConfigError(
                    f"decoder_prompt begins with the start token {start[0]}, and not with the "
                    f"token {language} of tgt_lang={params.tgt_lang!r} after it; leave one out"
                )
            tokens = prompt
        else:
            if language is None:
                language = getattr(self._model.generation_config, "forced_bos_token_id", None)
            tokens = [*start, *([] if language is None else [language]), *prompt]
        check_decoder(tokens, self._vocabulary, self._context)
        return tokens

    def check(self, params: SamplingParams) -> None:
        """Raise if the parameters fit no source."""
        if params.src_lang is not None:
            self._language("src_lang", params.src_lang)
        self._opening(params)

    def _language(self, name: str, asked: str) -> int:
        if self._tokenizer is None:
            raise ConfigError(f"{name}={asked!r}: this model has no tokenizer; give token ids")
        return find_language(self.languages, name, asked)

    def _decoder_prompt(self, prompt: str | Sequence[int] | None) -> list[int]:
        if not isinstance(prompt, str):
            tokens = list(prompt or ())
            check_ids(tokens, self._vocabulary, "decoder_prompt")
            return tokens
        if self._tokenizer is None:
            raise ConfigError(
                f"decoder_prompt={prompt!r}: this model has no tokenizer; give token ids"
            )
        check_text(prompt)
        return list(self._tokenizer(prompt, add_special_tokens=False)["input_ids"])


def start_token(model: Any) -> int:
    """Return the token that the decoder begins with."""
    start = getattr(model.generation_config, "decoder_start_token_id", None)
    return int(model.config.decoder_start_token_id if start is None else start)


def read_languages(tokenizer: Any) -> dict[str, int]:
    """Return the token of each language that a tokenizer of transformers can have as `src_lang`."""
    if not hasattr(tokenizer, "src_lang"):
        return {}
    names = [str(token) for token in tokenizer.extra_special_tokens]
    names = [name for name in names if _LANGUAGE.fullmatch(name)]
    return dict(zip(names, tokenizer.convert_tokens_to_ids(names), strict=True))


def find_language(languages: Mapping[str, int], name: str, asked: str) -> int:
    """Return the token of a language; raises an error with similar names if there is none. `name`
    is the name of the argument."""
    if not languages:
        raise ConfigError(
            f"{name}={asked!r}: the tokenizer of this model knows no languages; leave it out "
            f"(--{name.replace('_', '-')})"
        )
    if asked in languages:
        return languages[asked]
    lower = {known.lower(): known for known in languages}
    given = asked.lower()
    near = [known for key, known in lower.items() if key.startswith(given[:2])]
    near.sort(key=lambda known: -difflib.SequenceMatcher(None, given, known.lower()).ratio())
    near += [lower[key] for key in difflib.get_close_matches(given, lower, _NEAR)]
    listed = list(dict.fromkeys(near))[:_NEAR]
    told = f"similar names: {', '.join(listed)}"
    if not listed:
        told = f"it has {len(languages)}, such as {', '.join(list(languages)[:_NEAR])}"
    raise ConfigError(f"{name}={asked!r} is no language of this model's tokenizer; {told}")

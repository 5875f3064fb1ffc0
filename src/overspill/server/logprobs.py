"""Log probabilities in the two forms of OpenAI's API."""

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Logprobs = Sequence[Mapping[int, float]]
"""Log probabilities for each token: of the token itself first, and of the likeliest ones."""

_LOWEST = -9999.0
"""OpenAI's value for tokens that are impossible; JSON has no infinity."""


class TokenTexts:
    """Log probabilities with their tokens as text and bytes."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes

    def chat(self, tokens: Sequence[int], logprobs: Logprobs, top: int) -> list[dict[str, Any]]:
        """Return the `content` of `logprobs` in a chat."""
        return [
            {
                **self._entry(token, found[token]),
                "top_logprobs": [self._entry(*each) for each in _likeliest(found, top)],
            }
            for token, found in zip(tokens, logprobs, strict=True)
        ]

    def completion(
        self, tokens: Sequence[int], logprobs: Logprobs, top: int, offsets: "Offsets"
    ) -> dict[str, Any]:
        """Return the `logprobs` of a completion. As in OpenAI's API, the token itself is always
        among the likeliest."""
        tops = []
        for token, found in zip(tokens, logprobs, strict=True):
            listed = {**dict(_likeliest(found, top)), token: found[token]}
            tops.append({self._text(t): _finite(logprob) for t, logprob in listed.items()})
        return {
            "tokens": [self._text(token) for token in tokens],
            "token_logprobs": [_finite(f[t]) for t, f in zip(tokens, logprobs, strict=True)],
            "top_logprobs": tops if top else None,
            "text_offset": [offsets.next(self._token_bytes(token)) for token in tokens],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        found = self._token_bytes(token)
        text = found.decode("utf-8", errors="replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(found)}

    def _text(self, token: int) -> str:
        """Return a token as text. A token that is part of a character is written as OpenAI does."""
        found = self._token_bytes(token)
        try:
            return found.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


class Offsets:
    """Offsets of the tokens of an answer in its text. A token that is part of a character has the
    offset of the character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def next(self, token: bytes) -> int:
        """Return the offset of the next token."""
        begin = self._length
        self._length += len(self._decoder.decode(token))
        return begin


def _likeliest(found: Mapping[int, float], top: int) -> list[tuple[int, float]]:
    return sorted(found.items(), key=lambda each: -each[1])[:top]


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)

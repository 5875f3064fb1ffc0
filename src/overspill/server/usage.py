"""How many tokens a request has used."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overspill.serve.params import Result


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    new_tokens: int
    cached_tokens: int
    """Of the prompts: found in the cache of keys and values."""

    @classmethod
    def of(cls, results: Sequence[Result], samples: int) -> "Usage":
        """Each prompt counts once for its `samples` answers, which follow each other."""
        prompts = results[::samples]
        return cls(
            sum(result.prompt_tokens for result in prompts),
            sum(len(result.token_ids) for result in results),
            sum(result.cached_tokens for result in prompts),
        )

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.new_tokens,
            "total_tokens": self.prompt_tokens + self.new_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

"""Changes to the logits of a request before its token is chosen."""

from collections import Counter
from collections.abc import Collection

import torch
from torch import Tensor

from overspill.serve.grammar import Grammar
from overspill.serve.params import SamplingParams


class Rules:
    """Biases, penalties and the grammar of one request. They depend on the tokens so far, which
    only `accept` changes: a token that is computed twice is chosen alike."""

    def __init__(
        self, params: SamplingParams, grammar: Grammar | None, ends: Collection[int]
    ) -> None:
        """`ends` are the tokens that end a text."""
        self._grammar = grammar
        self._bias = dict(params.logit_bias or {})
        self._frequency, self._presence = params.frequency_penalty, params.presence_penalty
        self._min_tokens = params.min_tokens
        self._ends = sorted(ends)
        self._counts: Counter[int] = Counter()

    def adjust(self, logits_V: Tensor) -> Tensor:
        """Return the logits to choose from; the given ones are not changed."""
        logits_V = logits_V.clone()
        _add(logits_V, self._bias)
        if self._frequency or self._presence:
            penalties = {
                token: -self._frequency * count - self._presence
                for token, count in self._counts.items()
            }
            _add(logits_V, penalties)
        if self._ends and self._min_tokens and self._counts.total() < self._min_tokens:
            logits_V[torch.tensor(self._ends, device=logits_V.device)] = -torch.inf
        if self._grammar is not None:
            self._grammar.mask_(logits_V)
        return logits_V

    def accept(self, token: int) -> None:
        """Follow a token that was chosen. Raises if the grammar cannot continue."""
        if self._grammar is not None:
            self._grammar.accept(token)
        self._counts[token] += 1

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows nothing after the last token."""
        return self._grammar is not None and self._grammar.is_complete


def make_rules(
    params: SamplingParams, grammar: Grammar | None, ends: Collection[int]
) -> Rules | None:
    """Return the rules of a request; None if its parameters leave the logits as they are."""
    asked = params.logit_bias or params.frequency_penalty or params.presence_penalty
    if not asked and not params.min_tokens and grammar is None:
        return None
    return Rules(params, grammar, ends)


def _add(logits_V: Tensor, values: dict[int, float]) -> None:
    if values:
        ids = torch.tensor(list(values), device=logits_V.device)
        logits_V[ids] += torch.tensor(list(values.values()), device=logits_V.device)

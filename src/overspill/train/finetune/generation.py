"""Greedy answers of the model that is being trained.

Prompts of several questions are one batch. A decoder-only model gets them padded on the left, so
that the next token of all of them is in the last column; positions do not count padding. Keys and
values are in the cache of transformers. Shapes: B questions, S tokens.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overspill.train.finetune.questions import Question, Questions
from overspill.train.team import Team

_NO_PADDING = frozenset({"axk2", "glm_moe_dsa", "hy_v4", "minimax"})
"""Model types whose attention in transformers is not independent of padding on the left."""


@dataclass(frozen=True)
class Generator:
    """Generator of greedy answers, for batches of prompts."""

    questions: Questions
    team: Team
    device: torch.device
    pad: int
    batch: int
    """Prompts in a batch, if all have the maximum length."""
    seq_len: int
    """Tokens of the longest prompt with its answer."""

    @torch.no_grad()
    def answers(self, model: Any) -> list[list[int]]:
        """The tokens of the answer to each question, without the end token. Each rank answers a
        part of every batch. Random numbers of training stay the same: some models draw numbers also
        in evaluation."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            return self._answers(model)

    def _answers(self, model: Any) -> list[list[int]]:
        items, ends = self.questions.items, self.questions.ends | _ends_of(model)
        order = sorted(range(len(items)), key=lambda number: len(items[number].prompt))
        found: list[list[list[int]]] = []
        alike = model.config.model_type in _NO_PADDING
        for group in self._batches([items[number] for number in order], alike):
            own, counted = self.team.own(group)
            found.append(self._answer(model, own, ends)[:counted])
        by_batch = zip(*self.team.gather_parts(found), strict=True)
        sorted_answers = (answer for parts in by_batch for part in parts for answer in part)
        answers: list[list[int]] = [[] for _ in items]
        for number, answer in zip(order, sorted_answers, strict=True):
            answers[number] = answer
        return answers

    def _batches(self, questions: Sequence[Question], alike: bool) -> Iterator[Sequence[Question]]:
        """Questions, sorted by length, in batches. Short prompts make large batches: their keys and
        values have at most as many tokens as a batch of the longest sequences. `alike` puts only
        prompts of the same length into a batch."""
        room, first = self.batch * self.seq_len, 0
        for at, question in enumerate(questions):
            longest = len(question.prompt) + max(each.most for each in questions[first : at + 1])
            full = (at + 1 - first) * longest > room
            other = alike and len(question.prompt) != len(questions[first].prompt)
            if at > first and (full or other):
                yield questions[first:at]
                first = at
        if questions:
            yield questions[first:]

    def _answer(
        self, model: Any, questions: Sequence[Question], ends: frozenset[int]
    ) -> list[list[int]]:
        """Greedy answers of one batch. Ranks call the model equally often: a rank whose answers
        have ended continues with tokens that do not count."""
        start = self.questions.start
        tokens = _Sources(self, model, questions) if start else _Prompts(self, model, questions)
        answers: list[list[int]] = [[] for _ in questions]
        going = [True] * len(questions)
        while self.team.any(any(going)):
            next_B = tokens.next_tokens()
            for number, token in enumerate(next_B.tolist()):
                if not going[number]:
                    continue
                if token in ends:
                    going[number] = False
                else:
                    answers[number].append(token)
                    going[number] = len(answers[number]) < questions[number].most
            tokens.append(next_B)
        return answers


class _Prompts:
    """Inputs of a decoder-only model for the next token."""

    def __init__(self, plan: Generator, model: Any, questions: Sequence[Question]) -> None:
        self._model, self._last_position = model, plan.seq_len - 1
        prompts = [question.prompt for question in questions]
        longest = max(map(len, prompts))
        tokens_BS = np.full((len(prompts), longest), plan.pad, dtype=np.int64)
        mask_BS = np.zeros((len(prompts), longest), dtype=np.int64)
        for number, prompt in enumerate(prompts):
            tokens_BS[number, longest - len(prompt) :] = prompt
            mask_BS[number, longest - len(prompt) :] = 1
        self._tokens_BS = torch.from_numpy(tokens_BS).to(plan.device)
        self._mask_BS = torch.from_numpy(mask_BS).to(plan.device)
        self._positions_BS = (self._mask_BS.cumsum(-1) - 1).clamp(min=0)
        self._cache: Any = None
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
        takes = inspect.signature(base.forward).parameters
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    def next_tokens(self) -> Tensor:
        output = self._model(
            input_ids=self._tokens_BS,
            attention_mask=self._mask_BS,
            position_ids=self._positions_BS,
            past_key_values=self._cache,
            use_cache=True,
            **self._last_logits,
        )
        self._cache = output.past_key_values
        return _likeliest(output.logits)

    def append(self, next_B: Tensor) -> None:
        self._tokens_BS = next_B[:, None]
        self._mask_BS = torch.cat([self._mask_BS, torch.ones_like(self._tokens_BS)], dim=1)
        # answers that have ended may be longer than the model's context
        self._positions_BS = (self._positions_BS[:, -1:] + 1).clamp(max=self._last_position)


class _Sources:
    """Inputs of an encoder-decoder model for the next token. The encoder runs once."""

    def __init__(self, plan: Generator, model: Any, questions: Sequence[Question]) -> None:
        from transformers import DynamicCache, EncoderDecoderCache

        self._model = model
        prompts = [torch.from_numpy(question.prompt).long() for question in questions]
        pad = torch.nn.utils.rnn.pad_sequence
        sources_BS = pad(prompts, batch_first=True, padding_value=plan.pad)
        mask_BS = pad([torch.ones_like(prompt) for prompt in prompts], batch_first=True)
        self._source: dict[str, Any] = {"input_ids": sources_BS.to(plan.device)}
        self._mask_BS = mask_BS.to(plan.device)
        start = torch.tensor(plan.questions.start, device=plan.device)
        self._tokens_BS = start.expand(len(questions), -1)
        self._cache = EncoderDecoderCache(DynamicCache(), DynamicCache())

    def next_tokens(self) -> Tensor:
        from transformers.modeling_outputs import MoEModelOutput

        output = self._model(
            **self._source,
            attention_mask=self._mask_BS,
            decoder_input_ids=self._tokens_BS,
            past_key_values=self._cache,  # without use_cache, which an encoder may refuse
        )
        encoded = MoEModelOutput(last_hidden_state=output.encoder_last_hidden_state)
        self._source = {"encoder_outputs": encoded}
        return _likeliest(output.logits)

    def append(self, next_B: Tensor) -> None:
        self._tokens_BS = next_B[:, None]


def _ends_of(model: Any) -> frozenset[int]:
    """The tokens that end a text by the model's own settings for generation."""
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list | tuple) else [found])


def _likeliest(logits: Tensor) -> Tensor:
    """The most likely next token: [B]. In float32, as transformers' `generate` compares them."""
    return logits[:, -1].float().argmax(-1)

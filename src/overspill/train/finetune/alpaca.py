"""Rows of Alpaca (instruction, input, output) → chats, or pairs with the prompt of Alpaca."""

import dataclasses
from collections.abc import Sequence
from typing import cast

from overspill.train.finetune.examples import Examples
from overspill.train.finetune.kinds import Chat, Instruction, Kind, Pair

_INTRODUCTION = "Below is an instruction that describes a task"
_PROMPT = (
    f"{_INTRODUCTION}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
_PROMPT_WITH_INPUT = (
    f"{_INTRODUCTION}, paired with an input that provides further context. Write a response that "
    "appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


def convert(examples: Examples, to_chats: bool) -> Examples:
    """The rows as chats, which a chat template renders, or as pairs."""
    rows = cast(Sequence[Instruction], examples.items)
    if to_chats:
        return dataclasses.replace(examples, kind=Kind.CHAT, items=[_as_chat(row) for row in rows])
    return dataclasses.replace(examples, kind=Kind.PAIR, items=[_as_pair(row) for row in rows])


def _as_chat(row: Instruction) -> Chat:
    question = f"{row.instruction}\n\n{row.input}" if row.input else row.instruction
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": row.output},
    ]
    return Chat(row.where, messages)


def _as_pair(row: Instruction) -> Pair:
    form = _PROMPT_WITH_INPUT if row.input else _PROMPT
    return Pair(row.where, form.format(instruction=row.instruction, input=row.input), row.output)

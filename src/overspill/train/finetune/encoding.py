"""Examples → rows of tokens in which the learned ones are marked."""

from collections.abc import Iterator, Sequence
from typing import Any

from overspill.train.finetune.kinds import Pair, Text
from overspill.train.finetune.rows import Ids, Row, ids, make_row

_AT_ONCE = 1000  # texts per tokenizer call, which is multithreaded

Tokenizer = Any  # transformers' PreTrainedTokenizerBase, which has no types


def encode_texts(tokenizer: Tokenizer, examples: Sequence[Text]) -> Iterator[Row]:
    """Rows of texts. All tokens are learned, including the end token."""
    texts = encode(tokenizer, [example.text for example in examples])
    for example, tokens in zip(examples, texts, strict=True):
        ended = tokens + _end(tokenizer, tokens)
        yield make_row(example.where, ended, [True] * len(ended))


def encode_pairs(tokenizer: Tokenizer, examples: Sequence[Pair]) -> Iterator[Row]:
    """Rows of prompts with completions.

    The completion and its end token are learned, the prompt is not. Both are tokenized separately:
    no token spans the boundary, as in generation from the prompt.
    """
    prompts = encode_prompts(tokenizer, [example.prompt for example in examples])
    completions = encode(tokenizer, [example.completion for example in examples], special=False)
    for example, prompt, completion in zip(examples, prompts, completions, strict=True):
        answer = completion + _end(tokenizer, completion)
        learn = [False] * len(prompt) + [True] * len(answer)
        yield make_row(example.where, prompt + answer, learn)


def encode_sources(tokenizer: Tokenizer, examples: Sequence[Pair]) -> Iterator[Row]:
    """Rows for encoder-decoder models: the prompt is the source, the completion the target."""
    sources = encode(tokenizer, [example.prompt for example in examples])
    targets = encode(tokenizer, [example.completion for example in examples], target=True)
    for example, source, target in zip(examples, sources, targets, strict=True):
        yield Row(example.where, ids(source), ids(target + _end(tokenizer, target)))


def target_prefix(tokenizer: Tokenizer) -> list[int]:
    """The tokens before the text of a target, such as that of its language."""
    text = "a"
    whole = encode(tokenizer, [text], target=True)[0]
    bare = encode(tokenizer, [text], special=False, target=True)[0]
    starts = (at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return whole[: next(starts, 0)]


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Prompts with the start token of the tokenizer but without its end token."""
    end = tokenizer.eos_token_id
    return [
        tokens[:-1] if tokens and tokens[-1] == end else tokens
        for tokens in encode(tokenizer, prompts)
    ]


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], special: bool = True, target: bool = False
) -> list[list[int]]:
    found: list[list[int]] = []
    for at in range(0, len(texts), _AT_ONCE):
        name = "text_target" if target else "text"
        # verbose: the length is checked elsewhere
        batch = {name: list(texts[at : at + _AT_ONCE]), "verbose": False}
        found += tokenizer(**batch, add_special_tokens=special)["input_ids"]
    return found


def separator(tokenizer: Tokenizer) -> Ids:
    """The tokens between two examples in a row."""
    return ids(_end(tokenizer, []))


def _end(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """The end token; empty if the tokenizer has none or `tokens` already end with it."""
    end = tokenizer.eos_token_id
    return [] if end is None or (tokens and tokens[-1] == end) else [int(end)]

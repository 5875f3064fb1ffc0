"""A tiny tokenizer of NLLB, and the translations of transformers with it."""

import copy
from pathlib import Path
from typing import Any

import torch

from tests.serve.seq2seq import plain_answer, plain_model

LANGUAGES = ["eng_Latn", "fra_Latn", "deu_Latn", "zho_Hans"]
_LETTERS = "▁abcdefghijklmnopqrstuvwxyz"


def make_tokenizer(legacy: bool = False) -> Any:
    """One token for each letter and language. With `legacy` the language of a source comes last."""
    from transformers import NllbTokenizer

    tokens = ["<s>", "<pad>", "</s>", "<unk>", *_LETTERS]
    return NllbTokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[],
        extra_special_tokens=LANGUAGES,
        legacy_behaviour=legacy,
    )


def save_nllb(folder: Path, legacy: bool = False) -> Path:
    plain_model("nllb-moe").save_pretrained(folder)
    make_tokenizer(legacy).save_pretrained(folder)
    return folder


def translation(
    tokenizer: Any, text: str, src: str, tgt: str | None, prompt: str = ""
) -> list[int]:
    """The greedy tokens of transformers."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.src_lang = src
    plain = plain_model("nllb-moe")
    source = tokenizer(text)["input_ids"]
    lang = None if tgt is None else int(tokenizer.convert_tokens_to_ids(tgt))
    if not prompt:
        return plain_answer(plain, source, forced_bos_token_id=lang)
    begin = [plain.config.decoder_start_token_id, *([] if lang is None else [lang])]
    begin += tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer = plain_answer(plain, source, decoder_input_ids=torch.tensor([begin]))
    return answer[len(begin) - 1 :]

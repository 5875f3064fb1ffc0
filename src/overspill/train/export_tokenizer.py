"""Converts the tokenizer of a run to the files that transformers reads."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from overspill.core.errors import ConfigError
from overspill.models.config import GPTConfig
from overspill.train.token_bytes import byte_characters
from overspill.train.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer

_SEPARATOR = "<|endoftext|>"


@dataclass(frozen=True)
class TokenizerFiles:
    tokenizer: str
    """The content of tokenizer.json."""
    config: dict[str, Any]
    """The content of tokenizer_config.json."""
    separator: int | None
    """The id that ends a document."""


def tokenizer_files(name: str, shape: GPTConfig) -> TokenizerFiles:
    """The files of the tokenizer given by --tokenizer `name`, with which the model was trained."""
    tokenizer = load_tokenizer(name)
    if tokenizer.ids > shape.vocab:
        raise ConfigError(
            f"--tokenizer {name} has {tokenizer.ids} tokens and the model only {shape.vocab}; give "
            "the tokenizer.json of the run"
        )
    if isinstance(tokenizer, JsonTokenizer):
        content, separator = Path(tokenizer.name).read_text("utf-8"), tokenizer.separator
        token = None if separator is None else Tokenizer.from_str(content).id_to_token(separator)
    else:
        content, separator, token = byte_tokenizer().to_str(), tokenizer.separator, _SEPARATOR
    config = _config(token) | {"model_max_length": shape.max_seq}
    return TokenizerFiles(content, config, separator)


def write_byte_tokenizer(folder: Path, vocab: int) -> None:
    """Writes the files of `byte_tokenizer`, for a model of `vocab` tokens."""
    need = ByteTokenizer().ids
    if vocab < need:
        raise ConfigError(
            f"--tokenizer bytes has {need} tokens and the model only {vocab}; give a larger "
            f"vocabulary (--set vocab_size={need})"
        )
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_str(), encoding="utf-8")
    config = json.dumps(_config(_SEPARATOR), indent=2)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")


def byte_token_ids(encoder_decoder: bool) -> dict[str, int | None]:
    """The fields of a model's config that name special tokens, for `byte_tokenizer`."""
    separator = ByteTokenizer().separator
    ids = {"eos_token_id": separator, "pad_token_id": separator, "bos_token_id": None}
    return ids | ({"decoder_start_token_id": separator} if encoder_decoder else {})


def _config(separator: str | None) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": separator,
        "pad_token": separator,
        "clean_up_tokenization_spaces": False,
    }


def byte_tokenizer() -> Tokenizer:
    """`ByteTokenizer` for the tokenizers library: byte-level BPE without merges, and the
    separator."""
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_SEPARATOR, special=True, normalized=False)])
    return tokenizer

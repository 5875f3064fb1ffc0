"""Opens the tokenizer of a checkpoint."""

from pathlib import Path
from typing import Any

from overspill.models.huggingface.checks import find_gguf, has_tokenizer_files, texts_of
from overspill.models.huggingface.gguf.header import read_header
from overspill.models.huggingface.gguf.tokenizer import make_tokenizer


def open_tokenizer(folder: Path, **languages: str) -> Any:
    """Return the tokenizer in the folder of a checkpoint or of a GGUF file, or else in the metadata
    of the file. transformers raises many types of exceptions."""
    if has_tokenizer_files(folder):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(texts_of(folder), **languages)
    gguf = find_gguf(folder)
    assert gguf is not None, f"{folder} has no tokenizer"
    made = make_tokenizer(read_header(gguf).metadata)
    made.name_or_path = str(folder)
    return made

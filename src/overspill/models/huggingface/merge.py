"""`overspill.merge`: a checkpoint with a LoRA adapter added to its weights."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overspill.models.huggingface.checks import (
    ADAPTER_CONFIG,
    CONFIG,
    INDEX,
    has_tokenizer,
    has_tokenizer_files,
    texts_of,
)
from overspill.models.huggingface.folder import CheckpointFolder, read_config
from overspill.models.huggingface.lora import LoraTensors, open_lora
from overspill.models.huggingface.lora_config import find_adapter, find_base, read_lora_config
from overspill.models.huggingface.merge_recipes import MergeRecipes
from overspill.models.huggingface.packed.files import plain_specs, write_plain, write_plain_texts
from overspill.models.huggingface.pregate_file import copy_pregates, has_pregates, sample
from overspill.models.huggingface.skeleton import model_class
from overspill.models.huggingface.tokenizer import open_tokenizer
from overspill.tiers.aside import check_new, new_folder
from overspill.tiers.safetensors_stream import replace_tensors

_TEXTS = ("*.json", "*.txt", "*.model", "*.jinja")
_TEMPLATES = "additional_chat_templates"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "sentencepiece.bpe.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.json", "chat_template.jinja",
)  # fmt: skip

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Merged:
    """Paths and sizes of a merged checkpoint."""

    out: str
    adapter: str
    base: str
    tensors: int
    """Number of tensors of the model that the adapter has changed; all experts of a layer count as
    two."""
    bytes: int
    """Size of the weights in bytes."""


def merge(
    adapter: str | os.PathLike[str],
    out: str | os.PathLike[str],
    base: str | os.PathLike[str] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Merged:
    """Writes a plain Hugging Face checkpoint of a LoRA adapter and its base model.

    `adapter` is a folder that peft has written, a repository of the hub, or the folder of a run of
    `overspill finetune --lora`; `out` a new folder. Without `base` it is the model that the adapter
    names. Files are copied, and changed one tensor at a time: `W + scale * B @ A` is computed in
    float32 and rounded once to the dtype of the checkpoint. Packed weights are unpacked. The
    tokenizer is the adapter's, if it has one.
    """
    target = Path(out).expanduser()
    check_new(target)
    folder = find_adapter(adapter)
    base_folder = find_base(read_lora_config(folder), base)
    config = read_config(base_folder)
    with (
        CheckpointFolder(base_folder) as checkpoint,
        open_lora(folder, model_class(config), config, checkpoint) as lora,
    ):
        recipes = MergeRecipes(checkpoint, lora)
        recipes.check_mergeable()
        dtype = checkpoint.plain_dtype(config)
        size = _plain_size(checkpoint, dtype)
        with new_folder(target, size) as aside:
            copy_texts(base_folder, aside)
            _copy_tokenizer(folder, aside)
            if checkpoint.gguf is not None:
                _write_texts(base_folder, config, aside)
            weights = _Weights(checkpoint, lora, recipes, dtype)
            samples = weights.write(aside, size, progress)
            copy_pregates(folder if has_pregates(folder) else base_folder, aside, samples)
        changed = len(lora.keys) + len(lora.stacks)
    return Merged(str(target), str(folder), str(base_folder), changed, size)


def copy_texts(base: Path, out: Path) -> None:
    """Copies config, tokenizer, chat templates and the like."""
    for pattern in _TEXTS:
        for file in texts_of(base).glob(pattern):
            other = file.name == ADAPTER_CONFIG or file.name.endswith(".index.json")
            if file.is_file() and (file.name == INDEX or not other):
                shutil.copyfile(file, out / file.name)
    if (texts_of(base) / _TEMPLATES).is_dir():
        shutil.copytree(texts_of(base) / _TEMPLATES, out / _TEMPLATES)


def _copy_tokenizer(adapter: Path, out: Path) -> None:
    """Replaces the tokenizer by that of the adapter if it has one."""
    own = [name for name in TOKENIZER_FILES if (adapter / name).is_file()]
    if not own:
        return
    shutil.rmtree(out / _TEMPLATES, ignore_errors=True)
    for name in TOKENIZER_FILES:  # its files must be of the same tokenizer
        (out / name).unlink(missing_ok=True)
    for name in own:
        shutil.copyfile(adapter / name, out / name)
    if (adapter / _TEMPLATES).is_dir():
        shutil.copytree(adapter / _TEMPLATES, out / _TEMPLATES)


def _write_texts(base: Path, config: Any, out: Path) -> None:
    """Writes the config and the tokenizer of a GGUF file where there are none."""
    if not (out / CONFIG).is_file():
        config.save_pretrained(out)
    if not has_tokenizer_files(out) and has_tokenizer(base):
        open_tokenizer(base).save_pretrained(out)


def _plain_size(checkpoint: CheckpointFolder, dtype: torch.dtype) -> int:
    """Return the bytes of the files of the weights, with packed weights unpacked."""
    packed = checkpoint.packed.values()
    stored = {part for tensor in packed for part in tensor.parts.values()}
    more = sum(tensor.spec.numel * dtype.itemsize for tensor in packed)
    return (
        sum(file.stat().st_size for file in checkpoint.files)
        + more
        - checkpoint.stored_bytes(stored)
    )


class _Weights:
    """Files of the weights, of which some tensors are changed. Packed weights are written in
    `dtype`."""

    def __init__(
        self,
        checkpoint: CheckpointFolder,
        lora: LoraTensors,
        recipes: MergeRecipes,
        dtype: torch.dtype,
    ) -> None:
        self._checkpoint, self._lora, self._recipes = checkpoint, lora, recipes
        self._dtype = dtype
        self._samples: dict[str, Tensor] = {}

    def write(self, out: Path, size: int, progress: Progress) -> dict[str, Tensor]:
        """Write all files and then change them. Returns samples of the changed tensors."""
        checkpoint, done = self._checkpoint, 0
        rewritten = bool(checkpoint.packed) or checkpoint.gguf is not None
        files: dict[str, str] = {}
        for file in checkpoint.files:
            name = checkpoint.plain_file(file)
            copy = out / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if rewritten:
                specs = plain_specs(checkpoint, file, self._dtype)
                write_plain(checkpoint, specs, copy)
                files |= dict.fromkeys(specs, str(name))
            else:
                shutil.copyfile(file, copy)
            replace_tensors(copy, self._changed(file))
            done += copy.stat().st_size
            progress("merging", done, size)
        if rewritten:
            write_plain_texts(out, files, size)
        return self._samples

    def _changed(self, file: Path) -> Iterator[tuple[str, Tensor]]:
        """Yield the changed tensors of one file."""
        checkpoint = self._checkpoint
        for name, key in self._lora.keys.items():
            if checkpoint.file_of(key) == file:
                tensor = self._lora.read(name).to(self._dtype_of(key))
                self._samples[name] = sample(tensor)
                yield key, tensor
        for key, tensor in self._recipes.changed(lambda key: checkpoint.file_of(key) == file):
            yield key, tensor.to(self._dtype_of(key))

    def _dtype_of(self, key: str) -> torch.dtype:
        checkpoint = self._checkpoint
        return self._dtype if key in checkpoint.packed else checkpoint.specs[key].dtype

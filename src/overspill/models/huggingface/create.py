"""`overspill create`: a checkpoint with random weights."""

import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from overspill.core.errors import BudgetError
from overspill.core.experts import ExpertId
from overspill.core.sizes import format_size
from overspill.hardware.machine import available_memory, usable_cores
from overspill.models.huggingface.checks import check_tokenizer
from overspill.models.huggingface.conversion import model_conversions
from overspill.models.huggingface.find_experts import find_experts
from overspill.models.huggingface.folder import silence
from overspill.models.huggingface.load import InitialExperts, random_dense
from overspill.models.huggingface.merge import TOKENIZER_FILES
from overspill.models.huggingface.shards import (
    LayerTensors,
    cut,
    write_index,
    write_shards,
)
from overspill.models.huggingface.skeleton import meta_model
from overspill.tiers.aside import check_new, new_folder

_SHARD_BYTES = 5 * 10**9  # as in save_pretrained
_WRITERS = 16
"""Largest number of threads that draw experts; each holds one in memory."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Created:
    """Summary of the checkpoint that was written."""

    out: str
    model_type: str
    parameters: int
    bytes: int
    """Size of the weights in bytes."""
    moe_blocks: int
    experts: int
    """Number of experts in each MoE block."""


def create(
    config: Any,
    out: str | os.PathLike[str],
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    tokenizer: str | os.PathLike[str] | None = None,
    shard_bytes: int = _SHARD_BYTES,
    progress: Progress = lambda what, done, total: None,
) -> Created:
    """Writes a checkpoint of the model of `config`, a config of transformers, with random weights
    to the new folder `out`.

    The weights are drawn as transformers does, and depend on `seed` and `dtype` only. The dense
    part is in memory at once; experts are drawn and written one by one. The folder has no
    tokenizer, unless `tokenizer` is a folder to copy one from.
    """
    target = Path(out).expanduser()
    check_new(target)
    if tokenizer is not None:
        check_tokenizer(Path(tokenizer).expanduser(), "--tokenizer")
    plain = meta_model(config).eval()
    found = find_experts(plain)
    total = sum(tensor.numel() for tensor in plain.parameters())
    n_experts = sum(layer.n_experts * layer.shape.numel for layer in found)
    size, dense = (count * dtype.itemsize for count in (total, total - n_experts))
    if dense > (free := available_memory()):
        raise BudgetError(
            f"the dense part of this model takes {format_size(dense)}, and {format_size(free)} of "
            "memory is free; create a smaller model: fewer layers, or a smaller d_model"
        )
    with new_folder(target, size) as folder:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            progress("creating", 0, size)
            made, model = random_dense(config, dtype, train=False)
            initial = InitialExperts(found, torch.device("cpu"))
        made.restore(model)
        with silence():
            model.save_pretrained(folder, max_shard_size=shard_bytes)
        if tokenizer is not None:
            _copy_tokenizer(Path(tokenizer).expanduser(), folder)
        conversions = model_conversions(model)
        layers = [
            LayerTensors(
                model, conversions, layer.path, layer.shape, dtype, layer.places, layer.n_experts,
                range(layer.n_experts), partial(_draw, initial, position),
            )
            for position, layer in enumerate(found)
        ]  # fmt: skip
        shards = cut(layers, shard_bytes)
        files = dict(zip(write_index(folder, shards, "model"), shards, strict=True))
        counted = _Counter(dense, size, progress)
        write_shards(folder, layers, files, min(usable_cores(), _WRITERS), written=counted)
    return Created(
        out=str(target),
        model_type=str(config.model_type),
        parameters=total,
        bytes=size,
        moe_blocks=len(found),
        experts=found[0].n_experts,
    )


def _draw(initial: InitialExperts, layer: int, index: int, record: torch.Tensor) -> None:
    initial.fill(ExpertId(layer, index), record)


def _copy_tokenizer(source: Path, out: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


class _Counter:
    """Sum of the bytes that several threads have written."""

    def __init__(self, done: int, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress = done, total, progress
        self._lock = threading.Lock()

    def __call__(self, size: int) -> None:
        with self._lock:
            self._done += size
            self._progress("creating", self._done, self._total)

"""The model of a run, for inference."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import CheckpointError, ConfigError
from overspill.core.experts import ExpertId, ExpertShape
from overspill.core.json_text import parse_json
from overspill.models.budgets import Budgets
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.models.huggingface.packed.quantized import (
    build_format,
    check_quantization,
    pack_record,
)
from overspill.models.offload import move_experts, offload_within
from overspill.models.presets import get_preset
from overspill.moe.layer import MoE
from overspill.tiers.layout import NO_LOW_RANKS
from overspill.tiers.safetensors_stream import StreamReader
from overspill.train import checkpoint
from overspill.train.checkpoint import TrainState
from overspill.train.checkpoint_tensors import read_dense, read_model
from overspill.train.config import TrainConfig
from overspill.train.run_folder import RunFolder
from overspill.train.tokenizer import Tokenizer, load_tokenizer
from overspill.train.train_spec import shape_of

_MODELS = ("final", "best")


def find_model(path: Path) -> Path:
    """The folder of the model of a run of `overspill finetune` or `pregate`: the final one, or
    before its end the best one; any other path unchanged."""
    model = _finetuned(RunFolder(path))
    if model is None:
        return path
    for name in _MODELS:
        if (path / name).is_dir():
            return path / name
    raise ConfigError(
        f"{path} is a run of overspill finetune or pregate that has no model yet; finish it with "
        f"--resume --out {path}"
    )


def model_name(folder: Path) -> str:
    """The name of a model's folder; for models of `overspill finetune` the name of the run."""
    path = folder.resolve()
    is_output = path.name in _MODELS and _finetuned(RunFolder(path.parent)) is not None
    return path.parent.name if is_output else path.name


def find_checkpoint(run: Path) -> tuple[TrainConfig, Path]:
    """The settings of a run and its newest checkpoint."""
    folder = RunFolder(run)
    if not folder.config.is_file():
        raise ConfigError(
            f"RUN {run} is not the folder of a run (it has no {folder.config.name}); give the "
            "--out of overspill train"
        )
    if (model := _finetuned(folder)) is not None:
        there = [str(run / name) for name in _MODELS if (run / name).is_dir()]
        lora = bool(model.get("lora"))
        what = "LoRA adapters" if lora else "checkpoints of Hugging Face"
        advice = f"; overspill merge {run} OUT makes a checkpoint" if lora and there else ""
        raise ConfigError(
            f"RUN {run} is a run of overspill finetune or pregate, which writes {what}: "
            + (f"they are in {' and '.join(there)}" if there else "it has none yet")
            + advice
        )
    folder.check_links()
    newest = checkpoint.newest(folder.checkpoints)
    if newest is None:
        raise ConfigError(
            f"RUN {run} has no checkpoint yet; continue with overspill train --resume --out {run}"
        )
    return TrainConfig.make(TrainConfig.read_file(folder.config)), newest


def _finetuned(folder: RunFolder) -> dict[str, Any] | None:
    """The settings of the model if the run has trained a checkpoint of Hugging Face."""
    try:
        model = parse_json(folder.config.read_text(encoding="utf-8"))["model"]
        return dict(model) if "checkpoint" in model else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # reading the settings gives the reason


def find_shape(config: TrainConfig, state: TrainState, path: Path) -> GPTConfig:
    """The shape of the model of a checkpoint."""
    try:
        seq_len = int(state.facts["seq_len"] or 0)
        return shape_of(state.facts, max(get_preset(config.model.preset).max_seq, seq_len))
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} does not describe its model ({error}); use the version of overspill that "
            "wrote it"
        ) from error


class RunCodec:
    """The tokenizer of a run."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        separator = tokenizer.separator
        self.ends = frozenset(() if separator is None else (separator,))
        self.library: Any = tokenizer.library

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text)]

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)

    def token_bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token)


@dataclass(frozen=True)
class Trained:
    """Newest checkpoint of a run, with its shape, data type and tokenizer."""

    path: Path
    shape: GPTConfig
    dtype: torch.dtype
    codec: RunCodec


def read_trained(run: Path) -> Trained:
    config, path = find_checkpoint(run)
    state = checkpoint.read_state(path)
    shape = find_shape(config, state, path)
    dtype = getattr(torch, str(state.facts["dtype"]))
    return Trained(path, shape, dtype, RunCodec(load_tokenizer(config.data.tokenizer)))


def load_trained(trained: Trained, budgets: Budgets, quantize: str | None = None) -> Any:
    """The model of a run; with `quantize` its experts are packed while they are read."""
    model: Any = GPTMoE(
        trained.shape,
        checkpoint=False,
        meta_experts=True,
        device=budgets.compute_device,
        dtype=trained.dtype,
    )
    model.requires_grad_(False).eval()
    path = trained.path / "model.safetensors"
    if quantize is None:
        offload_within(model, budgets)
        read_model(path, model, model.overspill)
        return model
    with StreamReader(path) as reader:
        modules = model.named_modules()
        layers: dict[str, Any] = {name: part for name, part in modules if isinstance(part, MoE)}
        source = _QuantizedRun(reader, trained, [*layers], quantize)
        move_experts(model, [*layers.values()], budgets, source=source)
        read_dense(path, model, model.overspill)
    return model


class _QuantizedRun:
    """Experts of a run, packed as export packs them for its checkpoint."""

    ranks = NO_LOW_RANKS

    def __init__(
        self, reader: StreamReader, trained: Trained, layers: Sequence[str], quantize: str
    ) -> None:
        """`layers` are the names of modules with experts."""
        check_quantization(quantize)
        config = trained.shape
        self._reader, self._layers = reader, layers
        self._shape = shape = ExpertShape(config.d_model, config.d_hidden, config.gated)
        dtypes = [trained.dtype] * len(shape.sizes)
        names = self._names(ExpertId(0, 0))
        self.format = build_format(shape, quantize, shape.gated, dtypes, names)

    @property
    def buffer_bytes(self) -> int:
        """Memory of one expert in two dtypes, and of its packed tensors."""
        return 8 * self._shape.numel + self.format.nbytes

    def _names(self, expert: ExpertId) -> list[str]:
        return [f"{self._layers[expert.layer]}.{part}" for part in ("w_in", "w_out")]

    def fill(self, expert: ExpertId, record: Tensor) -> None:
        names, tensors = self._names(expert), []
        for name, size in zip(names, self._shape.sizes, strict=True):
            part = torch.empty(size, dtype=self._reader.specs[name].dtype)
            self._reader.read_piece(name, expert.index * part.numel(), part)
            tensors.append(part.float())
        pack_record(self.format, tensors, names, record)

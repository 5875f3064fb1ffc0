"""Checkpoints: complete or not there, streamed expert by expert, nothing pickled.

A checkpoint is a folder `step-00000100` with model.safetensors (named as the state_dict of a plain
GPTMoE names its tensors; experts of other models are stacked likewise), optimizer.safetensors and
state.json. It is written into a sibling
whose name begins with `.tmp-`, forced to the disk and renamed. So whatever has the right name is
whole, at whatever moment the process or the machine died.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from overspill.core.errors import CheckpointError, DiskError
from overspill.core.experts import ExpertId, ExpertShape
from overspill.moe.state_dict import dense_tensors, split_record
from overspill.tiers.aside import sync
from overspill.tiers.safetensors_stream import StreamReader, StreamWriter, TensorSpec
from overspill.train.generators import read_generators, set_generators

FORMAT = "overspill-checkpoint"
VERSION = 1
_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_TMP = ".tmp-"

Fact = str | int | float | bool | None


class ExpertWeights(Protocol):
    """What a checkpoint needs of the engine."""

    @property
    def n_layers(self) -> int: ...

    @property
    def n_experts(self) -> int: ...

    @property
    def shape(self) -> ExpertShape: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def flush(self) -> None: ...

    def read_weights(self, expert: ExpertId, out: torch.Tensor) -> None: ...

    def write_weights(self, expert: ExpertId, fill: Callable[[torch.Tensor], None]) -> None: ...


class OptimizerStates(Protocol):
    """What a checkpoint needs of the optimizer."""

    def expert_sections(self) -> list[tuple[str, torch.dtype]]: ...

    def read_expert_state(self, expert: ExpertId, name: str, out: torch.Tensor) -> None: ...

    def write_expert_state(self, expert: ExpertId, name: str, value: torch.Tensor) -> None: ...

    def dense_state_dict(self) -> dict[str, torch.Tensor]: ...

    def load_dense_state_dict(self, state: dict[str, torch.Tensor]) -> None: ...


@dataclass(frozen=True)
class TrainState:
    """Where a run stands, beside its tensors."""

    step: int
    """Optimizer steps that are in the weights."""
    position: int
    """Sequences of the data that were read."""
    data_digest: str
    facts: dict[str, Fact]
    """The model's settings: a checkpoint fits only where these are equal."""


def newest(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step in `folder`."""
    return max(_complete(folder), key=_step_of, default=None)


def save(
    folder: Path,
    state: TrainState,
    model: torch.nn.Module,
    engine: ExpertWeights,
    optimizer: OptimizerStates,
    keep: int,
) -> Path:
    """Write the checkpoint of `state.step`; then remove all but the newest `keep`."""
    target = folder / f"step-{state.step:08d}"
    if target.exists():
        return target  # the same step of the same run: the same bytes
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clean(folder)
        aside = folder / f"{_TMP}{target.name}-{os.getpid()}"
        aside.mkdir()
        engine.flush()
        _write_model(aside / _MODEL, model, engine)
        _write_optimizer(aside / _OPTIMIZER, engine, optimizer)
        _write_state(aside, state)
        sync(aside)
        os.rename(aside, target)
        sync(folder)
        for old in sorted(_complete(folder), key=_step_of)[:-keep]:
            _remove(old)
    except OSError as error:
        clean(folder)  # what was half written may be what filled the disk
        if isinstance(error, DiskError):
            raise
        raise DiskError(
            f"checkpoint {target} cannot be written ({error.strerror}); free some space or give "
            "another --out; the checkpoints that were complete still are"
        ) from error
    return target


def clean(folder: Path) -> None:
    """Remove what a killed run left half written or half removed."""
    for leftover in folder.glob(f"{_TMP}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def read_state(path: Path) -> TrainState:
    """The plain part of a checkpoint, without its tensors; also checks that the files are there."""
    content = _read_state_file(path)
    return TrainState(
        step=content["step"],
        position=content["position"],
        data_digest=content["data_digest"],
        facts=content["facts"],
    )


def check_fits(path: Path, facts: Mapping[str, Fact]) -> None:
    """Raise when the checkpoint is of a model with other settings, and name the setting."""
    written = read_state(path).facts
    for name in sorted(written.keys() | facts.keys()):
        if written.get(name) != facts.get(name):
            raise CheckpointError(
                f"{path} was written with {name}={written.get(name)}; this run has "
                f"{name}={facts.get(name)}; resume with the settings it was written with, or give "
                "another --out"
            )


def load(
    path: Path, model: torch.nn.Module, engine: ExpertWeights, optimizer: OptimizerStates
) -> TrainState:
    """Bring model, optimizer and random generators to where the checkpoint was written."""
    content = _read_state_file(path)
    engine.flush()
    _read_model(path / _MODEL, model, engine)
    _read_optimizer(path / _OPTIMIZER, engine, optimizer)
    try:
        set_generators(content["rng"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise _corrupt(path, f"the state of a random generator in {_STATE} is broken") from error
    return read_state(path)


# -- the model -----------------------------------------------------------------------------------


def _write_model(path: Path, model: torch.nn.Module, engine: ExpertWeights) -> None:
    dense, layers = _names(model)
    specs = {name: TensorSpec(value.dtype, tuple(value.shape)) for name, value in dense.items()}
    specs.update(_expert_specs(layers, engine))
    with StreamWriter(path, specs, {"format": "pt"}) as writer:
        for name, value in dense.items():
            writer.write(name, value)
        record = torch.empty(engine.shape.numel, dtype=engine.dtype)
        for expert in _experts(engine):
            engine.read_weights(expert, record)
            for name, offset, part in _parts(layers, engine.shape, expert, record):
                writer.write_piece(name, offset, part)


def _read_model(path: Path, model: torch.nn.Module, engine: ExpertWeights) -> None:
    dense, layers = _names(model)
    with StreamReader(path, advice=_advice(path)) as reader:
        specs = {name: TensorSpec(value.dtype, tuple(value.shape)) for name, value in dense.items()}
        specs.update(_expert_specs(layers, engine))
        _check_specs(path, reader, specs)
        with torch.no_grad():
            for name, value in dense.items():
                value.copy_(reader.read(name))
        record = torch.empty(engine.shape.numel, dtype=engine.dtype)

        def fill(out: torch.Tensor) -> None:
            out.copy_(record)

        for expert in _experts(engine):
            for name, offset, part in _parts(layers, engine.shape, expert, record):
                reader.read_piece(name, offset, part)
            engine.write_weights(expert, fill)


def _names(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The dense tensors as a state_dict names them, and the MoE layers' names, lowest first."""
    layers: dict[str, None] = {}  # a layer may have one placeholder or one for each weight
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if hasattr(parameter, "is_expert_placeholder"):
            layers[name.rpartition(".")[0]] = None
    return dense_tensors(model), list(layers)


_PARTS = ("w_in", "w_out", "b_in", "b_out")


def _expert_specs(layers: list[str], engine: ExpertWeights) -> dict[str, TensorSpec]:
    """The experts of a layer stacked, a tensor for each part of their records."""
    return {
        f"{layer}.{part}": TensorSpec(engine.dtype, (engine.n_experts, *size))
        for layer in layers
        for part, size in zip(_PARTS, engine.shape.sizes, strict=False)
    }


def _parts(
    layers: list[str], shape: ExpertShape, expert: ExpertId, record: torch.Tensor
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Where the parts of an expert's record lie in the stacked tensors of its layer."""
    layer = layers[expert.layer]
    for name, part in zip(_PARTS, split_record(record, shape), strict=False):
        yield f"{layer}.{name}", expert.index * part.numel(), part


def _experts(engine: ExpertWeights) -> Iterator[ExpertId]:
    for layer in range(engine.n_layers):
        for index in range(engine.n_experts):
            yield ExpertId(layer, index)


# -- the optimizer -------------------------------------------------------------------------------


def expert_state_specs(engine: ExpertWeights, optimizer: OptimizerStates) -> dict[str, TensorSpec]:
    """The experts' states in a file: a stack for each layer and state."""
    return {
        _section(layer, section): TensorSpec(dtype, (engine.n_experts, engine.shape.numel))
        for layer in range(engine.n_layers)
        for section, dtype in optimizer.expert_sections()
    }


def _dense(name: str) -> str:
    return f"dense.{name}"


def _section(layer: int, section: str) -> str:
    return f"experts.{layer}.{section}"


def _write_optimizer(path: Path, engine: ExpertWeights, optimizer: OptimizerStates) -> None:
    dense = optimizer.dense_state_dict()
    specs = expert_state_specs(engine, optimizer)
    specs.update({_dense(name): TensorSpec(v.dtype, tuple(v.shape)) for name, v in dense.items()})
    with StreamWriter(path, specs, {"format": "pt"}) as writer:
        for name, value in dense.items():
            writer.write(_dense(name), value)
        write_expert_states(writer, engine, optimizer)


def write_expert_states(
    writer: StreamWriter, engine: ExpertWeights, optimizer: OptimizerStates
) -> None:
    for section, dtype in optimizer.expert_sections():
        piece = torch.empty(engine.shape.numel, dtype=dtype)
        for expert in _experts(engine):
            optimizer.read_expert_state(expert, section, piece)
            offset = expert.index * piece.numel()
            writer.write_piece(_section(expert.layer, section), offset, piece)


def _read_optimizer(path: Path, engine: ExpertWeights, optimizer: OptimizerStates) -> None:
    with StreamReader(path, advice=_advice(path)) as reader:
        # Which dense states there are is the file's to say: an optimizer that has not stepped yet
        # has none.
        dense = [name for name in reader.specs if name.startswith(_dense(""))]
        specs = {name: reader.specs[name] for name in dense}
        _check_specs(path, reader, {**specs, **expert_state_specs(engine, optimizer)})
        optimizer.load_dense_state_dict(
            {name.removeprefix(_dense("")): reader.read(name) for name in dense}
        )
        read_expert_states(reader, engine, optimizer)


def read_expert_states(
    reader: StreamReader, engine: ExpertWeights, optimizer: OptimizerStates
) -> None:
    for section, dtype in optimizer.expert_sections():
        piece = torch.empty(engine.shape.numel, dtype=dtype)
        for expert in _experts(engine):
            offset = expert.index * piece.numel()
            reader.read_piece(_section(expert.layer, section), offset, piece)
            optimizer.write_expert_state(expert, section, piece)


def _check_specs(path: Path, reader: StreamReader, wanted: Mapping[str, TensorSpec]) -> None:
    for name, spec in wanted.items():
        there = reader.specs.get(name)
        if there != spec:
            has = "no such tensor" if there is None else f"{there.dtype} {list(there.shape)}"
            raise CheckpointError(
                f"{path}: {name} should be {spec.dtype} {list(spec.shape)}, and there is {has}; "
                "resume with the settings it was written with, or give another --out"
            )
    foreign = sorted(reader.specs.keys() - wanted.keys())
    if foreign:
        raise CheckpointError(
            f"{path} holds {foreign[0]}, which this model has not; resume with the settings it was "
            "written with, or give another --out"
        )


# -- the rest ------------------------------------------------------------------------------------


def _write_state(folder: Path, state: TrainState) -> None:
    content = {
        "format": FORMAT,
        "version": VERSION,
        "step": state.step,
        "position": state.position,
        "data_digest": state.data_digest,
        "facts": state.facts,
        "files": {name: (folder / name).stat().st_size for name in (_MODEL, _OPTIMIZER)},
        "rng": read_generators(),
    }
    with open(folder / _STATE, "w", encoding="utf-8") as out:
        json.dump(content, out, indent=1)
        out.flush()
        os.fsync(out.fileno())


def _read_state_file(path: Path) -> dict[str, Any]:
    file = path / _STATE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path} is not a checkpoint of overspill ({_STATE}: {error.strerror}); give the --out "
            "of a run"
        ) from error
    except ValueError as error:
        raise _corrupt(path, f"{_STATE} cannot be parsed") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a checkpoint of overspill; give the --out of a run that is"
        )
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has format version {content.get('version')}; this overspill reads {VERSION}; "
            "use the version of overspill that wrote it"
        )
    kinds = {"step": int, "position": int, "data_digest": str, "facts": dict, "files": dict}
    for name, kind in kinds.items():
        if type(content.get(name)) is not kind:
            raise _corrupt(path, f"{_STATE} has no {name}")
    for name, size in content["files"].items():
        file = path / name
        there = file.stat().st_size if file.is_file() else 0
        if there != size:
            raise _corrupt(path, f"{name} is truncated, {there} of {size} bytes are there")
    return content


def _advice(file: Path) -> str:
    return f"remove {file.parent} and resume from the checkpoint before it"


def _corrupt(path: Path, what: str) -> CheckpointError:
    before = [other for other in _complete(path.parent) if _step_of(other) < _step_of(path)]
    then = f"to resume from {max(before, key=_step_of).name}" if before else "to start anew"
    return CheckpointError(f"{path} is corrupt: {what}; remove that folder {then}")


def _complete(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _remove(path: Path) -> None:
    # Renamed first: a kill in the middle must not leave half a folder with a complete one's name.
    doomed = path.parent / f"{_TMP}old-{path.name}"
    os.rename(path, doomed)
    shutil.rmtree(doomed)

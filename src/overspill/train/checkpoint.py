"""Checkpoints: complete or absent, streamed expert by expert, nothing pickled.

A checkpoint is a folder `step-00000100` with model.safetensors (tensors named as in the state_dict
of a plain GPTMoE; experts of other models are stacked in the same way), optimizer.safetensors and
state.json. It is written to a sibling folder whose name begins with `.tmp-`, synced and renamed. A
folder with the final name is therefore complete, whenever the process or the machine stopped.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from overspill.core.errors import CheckpointError, DiskError, RankError
from overspill.core.json_text import parse_json
from overspill.models.joint_writing import is_first, together
from overspill.moe.engine import Engine
from overspill.optim.adamw import AdamW
from overspill.tiers.aside import remove, sync
from overspill.train.checkpoint_tensors import (
    read_model,
    read_optimizer,
    trains_experts,
    write_model,
    write_optimizer,
)
from overspill.train.generators import read_generators, set_generators

FORMAT = "overspill-checkpoint"
VERSION = 1
_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_NAME = re.compile(r"step-(\d{8,})")
_TMP = ".tmp-"

Fact = str | int | float | bool | None


@dataclass(frozen=True)
class TrainState:
    """The progress of a run, besides its tensors."""

    step: int
    """Optimizer steps taken."""
    position: int
    """Sequences that have been read."""
    data_digest: str
    facts: dict[str, Fact]
    """Settings that must be equal to resume from the checkpoint."""


def newest(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step in `folder`."""
    found = max(_named(folder), key=_step_of, default=None)
    if found is not None and found.is_symlink() and not found.exists():
        raise CheckpointError(
            f"{found} is a link to {os.readlink(found)}, which does not exist; mount its disk, or "
            f"remove the link {_restart(found)}"
        )
    return max(_complete(folder), key=_step_of, default=None)


def save(
    folder: Path,
    state: TrainState,
    model: torch.nn.Module,
    engine: Engine,
    optimizer: AdamW,
    keep: int,
) -> Path:
    """Write the checkpoint of `state.step`, then remove all but the newest `keep`. Each rank writes
    its experts, and the first one the rest; with several nodes only the first node writes."""
    target = folder / f"step-{state.step:08d}"
    aside = folder / f"{_TMP}{target.name}"
    first = is_first(engine)
    exists = [target.exists()] if engine.ranks is None else engine.ranks.gather(target.exists())
    if exists[0]:
        return target  # the same step of the same run has the same bytes
    try:
        with together(engine, f"preparing checkpoint {target}"):
            engine.flush()
            if first:
                folder.mkdir(parents=True, exist_ok=True)
                clean(folder)
                aside.mkdir()
        write_model(aside / _MODEL, model, engine)
        write_optimizer(aside / _OPTIMIZER, engine, optimizer)
        with together(engine, f"completing checkpoint {target}"):
            if first:
                _write_state(aside, state)
                sync(aside)
                os.rename(aside, target)
                sync(folder)
                for old in sorted(_complete(folder), key=_step_of)[:-keep]:
                    _remove(old)
    except (OSError, RankError, KeyboardInterrupt) as error:
        if first:
            clean(folder)  # an incomplete checkpoint may have filled the disk
        if isinstance(error, DiskError | RankError | KeyboardInterrupt):
            raise
        raise DiskError(
            f"checkpoint {target} cannot be written ({error.strerror}); free some space or give "
            "another --out; earlier checkpoints are still complete"
        ) from error
    return target


def clean(folder: Path) -> None:
    """Removes incomplete checkpoints that a killed run left."""
    for leftover in folder.glob(f"{_TMP}*"):
        remove(leftover)


def read_state(path: Path) -> TrainState:
    """The state of a checkpoint without its tensors; checks that its files are complete."""
    content = _read_state_file(path)
    return TrainState(
        step=content["step"],
        position=content["position"],
        data_digest=content["data_digest"],
        facts=content["facts"],
    )


def check_fits(path: Path, facts: Mapping[str, Fact]) -> None:
    """Raises an error that names the first setting that differs from the checkpoint's."""
    written = read_state(path).facts
    for name in sorted(written.keys() | facts.keys()):
        if written.get(name) != facts.get(name):
            raise CheckpointError(
                f"{path} was written with {name}={written.get(name)}; this run has "
                f"{name}={facts.get(name)}; resume with the settings it was written with, or give "
                "another --out"
            )


def load(path: Path, model: torch.nn.Module, engine: Engine, optimizer: AdamW) -> TrainState:
    """Restores model, optimizer and random generators from the checkpoint."""
    content = _read_state_file(path)
    engine.flush()
    read_model(path / _MODEL, model, engine, trains_experts(model))
    read_optimizer(path / _OPTIMIZER, engine, optimizer)
    try:
        set_generators(content["rng"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise _corrupt(path, f"{_STATE} has an invalid random generator state") from error
    return read_state(path)


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
        content = parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path} is not a checkpoint of overspill ({_STATE}: {error.strerror}); give the --out "
            "of a run"
        ) from error
    except ValueError as error:
        raise _corrupt(path, f"{_STATE} cannot be parsed") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of overspill; give the --out of a run")
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
            raise _corrupt(path, f"{name} is truncated ({there} of {size} bytes)")
    return content


def _corrupt(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is corrupt: {what}; remove that folder {_restart(path)}")


def _restart(path: Path) -> str:
    """The advice of an error: the step at which a run goes on without this checkpoint."""
    before = [other for other in _complete(path.parent) if _step_of(other) < _step_of(path)]
    return f"to resume from {max(before, key=_step_of).name}" if before else "to start again"


def _complete(folder: Path) -> list[Path]:
    return [path for path in _named(folder) if path.is_dir()]


def _named(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _remove(path: Path) -> None:
    # Renamed first: a kill must not leave an incomplete folder with the final name.
    doomed = path.parent / f"{_TMP}old-{path.name}"
    try:
        os.rename(path, doomed)
    except OSError as error:
        raise DiskError(
            f"the old checkpoint {path} cannot be removed ({error.strerror}), the new one is "
            "complete; remove the old one, or continue with a higher --keep"
        ) from error
    remove(doomed)

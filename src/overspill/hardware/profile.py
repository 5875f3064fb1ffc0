"""What this machine was measured to do, as plain data, and the file that keeps it.

`overspill.probe` measures; the planners read. A profile belongs to one machine and one version: of
any other it is not trusted, and measured again.
"""

import bisect
import dataclasses
import hashlib
import json
import logging
import math
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from overspill.core.experts import ExpertShape
from overspill.hardware.machine import gpu, total_memory, usable_cores
from overspill.hardware.native import cache_folder

_log = logging.getLogger("overspill")
_FORMAT = 1
_Record = TypeVar("_Record", "ExpertShape", "Transfer", "MachineProfile", "ExpertCosts")


@dataclass(frozen=True)
class Curve:
    """Seconds over tokens, as measured at some numbers of tokens; straight lines in between."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.seconds):
            raise ValueError(f"{len(self.tokens)} numbers of tokens, {len(self.seconds)} times")
        if list(self.tokens) != sorted({*self.tokens}) or self.tokens[0] < 1:
            raise ValueError(f"the numbers of tokens must rise from 1 or more: {self.tokens}")
        if not all(math.isfinite(time) and time >= 0 for time in self.seconds):
            raise ValueError(f"not all of these are times: {self.seconds}")

    def __call__(self, tokens: int) -> float:
        """No tokens cost nothing; beyond the last point time grows as between the last two."""
        if tokens <= 0:
            return 0.0
        if tokens <= self.tokens[0] or len(self.tokens) == 1:
            return self.seconds[0]
        right = min(bisect.bisect_left(self.tokens, tokens), len(self.tokens) - 1)
        (t0, t1), (s0, s1) = self.tokens[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return max(s0, s0 + (s1 - s0) * (tokens - t0) / (t1 - t0))


@dataclass(frozen=True)
class ExpertCosts:
    """What one expert of a shape and dtype costs here, in seconds."""

    shape: ExpertShape
    dtype: str
    threads: int
    """Cores that compute experts and run the optimizer."""
    load: float
    """Upload of its weights, nothing else going on."""
    load_beside: float
    """The same while the CPU computes experts."""
    cpu_forward: Curve
    cpu_backward: Curve
    """Gradients of the tokens only, pre-activations recomputed."""
    cpu_train: Curve
    """Gradients of the weights too."""
    cpu_beside: float
    """How many times longer all of these take while uploads go on."""
    gpu_forward: Curve
    gpu_backward: Curve
    """As cpu_backward."""
    gpu_train: Curve
    """As cpu_train."""
    update: float
    """The optimizer's pass over it."""
    update_beside: float
    """The same while uploads go on."""
    round_trip: float
    """Handing a few tokens to the CPU and their results back, whatever is computed."""


@dataclass(frozen=True)
class Transfer:
    """Bytes a second between pinned host memory and the GPU, in copies of `size` bytes."""

    size: int
    up: float
    down: float
    up_both: float
    """Both directions at once."""
    down_both: float


@dataclass(frozen=True)
class MachineProfile:
    """The machine itself, whatever runs on it. None: it has no such thing, or it was not asked."""

    cores: int
    """Cores that were measured with: those that compute experts."""
    kernel: str
    """Instruction set of the CPU kernels."""
    transfers: tuple[Transfer, ...]
    host_read: float
    """Bytes a second that these cores together read from host memory."""
    host_read_beside: float | None
    """The same while uploads go on, …"""
    upload_beside: float | None
    """… and what is left of the uploads then."""
    ssd_read: float | None
    ssd_write: float | None
    matrix: float | None
    """bf16 operations a second of a large matrix product on the GPU."""
    matrix_cpu: float | None


@dataclass(frozen=True)
class Profile:
    """All that is known of this machine."""

    machine: str
    version: str
    limits: MachineProfile | None = None
    experts: tuple[ExpertCosts, ...] = ()

    def costs(self, shape: ExpertShape, dtype: str, threads: int) -> ExpertCosts | None:
        for known in self.experts:
            if (known.shape, known.dtype, known.threads) == (shape, dtype, threads):
                return known
        return None

    def with_costs(self, costs: ExpertCosts) -> "Profile":
        """With these instead of what was known of the same experts."""
        key = (costs.shape, costs.dtype, costs.threads)
        others = [e for e in self.experts if (e.shape, e.dtype, e.threads) != key]
        return dataclasses.replace(self, experts=(*others, costs))


def this_machine(device: str = "cuda") -> str:
    """In words: all that makes figures of one machine worthless on another. One whose GPU is not
    used, with `device` "cpu", is one without."""
    card = None if device == "cpu" else gpu()
    name = "no GPU" if card is None else f"{card.name} with {card.memory >> 20} MiB"
    memory = f"{round(total_memory() / 2**30)} GiB"
    return f"{_cpu_model()}, {usable_cores()} cores, {memory}, {name}"


def this_version() -> str:
    """In words: all of the software that the figures depend on."""
    import torch

    try:
        own = f"overspill {metadata.version('overspill')}"
    except metadata.PackageNotFoundError:
        own = "overspill from its sources"
    # what is being worked on keeps its version, but not its kernels
    package = Path(__file__).parents[1]
    sources = sorted([*package.glob("*/*.cpp"), *package.glob("*/*.h")])
    kernels = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:8]
    return f"{own}, torch {torch.__version__}, kernels {kernels}, format {_FORMAT}"


def profile_file(machine: str | None = None) -> Path:
    """A file for each machine: a home folder may be shared by several."""
    key = hashlib.sha256((machine or this_machine()).encode()).hexdigest()[:12]
    return cache_folder() / f"profile-{key}.json"


def read_profile(path: Path | None = None, machine: str | None = None) -> Profile:
    """What is known of this machine; empty if nothing is, or if the file tells of another machine
    or version or cannot be read, which is said."""
    empty = Profile(machine or this_machine(), this_version())
    path = path or profile_file(empty.machine)
    try:
        known = _from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return empty
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("the profile %s cannot be read (%r); measuring again", path, error)
        return empty
    if known.machine != empty.machine:
        _log.warning("the profile %s is of %s; measuring again", path, known.machine)
        return empty
    if known.version != empty.version:
        _log.warning("the profile %s is of %s; measuring again", path, known.version)
        return empty
    return known


def write_profile(profile: Profile, path: Path | None = None) -> Path:
    """Written aside and renamed, so another process reads a whole profile or the old one."""
    path = path or profile_file(profile.machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.part")
    try:
        aside.write_text(json.dumps(dataclasses.asdict(profile), indent=2) + "\n")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def _from_json(data: dict[str, Any]) -> Profile:
    limits = data["limits"]
    if limits is not None:
        transfers = tuple(_checked(Transfer(**row)) for row in limits["transfers"])
        limits = _checked(MachineProfile(**{**limits, "transfers": transfers}))
    experts = tuple(_expert_costs(row) for row in data["experts"])
    return Profile(data["machine"], data["version"], limits, experts)


def _expert_costs(row: dict[str, Any]) -> ExpertCosts:
    curves = {
        name: Curve(tuple(value["tokens"]), tuple(value["seconds"]))
        for name, value in row.items()
        if isinstance(value, dict) and "tokens" in value
    }
    shape = _checked(ExpertShape(**row["shape"]))
    return _checked(ExpertCosts(**{**row, **curves, "shape": shape}))


def _checked(record: _Record) -> _Record:
    """As it is; ValueError if a field is of another kind or no measurement can have given it."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.type == float | None and value is None:
            continue
        if field.type in (float, float | None):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            right = is_number and math.isfinite(value) and value > 0
        elif field.type is int:
            right = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        elif isinstance(field.type, type):
            right = isinstance(value, field.type)
        else:
            right = True  # the tuple of transfers, made from checked ones
        if not right:
            raise ValueError(f"{field.name} cannot be {value!r}")
    return record


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

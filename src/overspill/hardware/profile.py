"""Measurements of this machine, and the file that stores them.

`overspill.probe` measures; the planners read. A profile of another machine or version is measured
again.
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
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from overspill.core.experts import ExpertShape
from overspill.core.json_text import parse_json
from overspill.hardware.machine import gpu, total_memory, usable_cores
from overspill.hardware.native import cache_folder

_log = logging.getLogger("overspill")
_FORMAT = 4


@dataclass(frozen=True)
class Curve:
    """Seconds by number of tokens, interpolated linearly between measured points."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.seconds):
            raise ValueError(f"{len(self.tokens)} token counts for {len(self.seconds)} times")
        if list(self.tokens) != sorted({*self.tokens}) or self.tokens[0] < 1:
            raise ValueError(f"token counts must be at least 1 and rise: {self.tokens}")
        if not all(math.isfinite(time) and time >= 0 for time in self.seconds):
            raise ValueError(f"times must be finite and at least 0: {self.seconds}")

    def __call__(self, tokens: int) -> float:
        """0 without tokens; beyond the last point the last segment is extended."""
        if tokens <= 0:
            return 0.0
        if tokens <= self.tokens[0] or len(self.tokens) == 1:
            return self.seconds[0]
        right = min(bisect.bisect_left(self.tokens, tokens), len(self.tokens) - 1)
        (t0, t1), (s0, s1) = self.tokens[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return max(s0, s0 + (s1 - s0) * (tokens - t0) / (t1 - t0))


@dataclass(frozen=True)
class ExpertCosts:
    """Times of one expert of a shape and dtype on this machine, in seconds."""

    shape: ExpertShape
    dtype: str
    threads: int
    """Cores that compute experts."""
    load: float
    """Time of an upload of its weights on an otherwise idle machine."""
    load_beside: float
    """Time of an upload while the CPU computes experts."""
    cpu_forward: Curve
    cpu_backward: Curve
    """Time on the CPU of the gradients of the tokens only, with pre-activations recomputed."""
    cpu_training: Curve
    """Time on the CPU of the gradients of tokens and weights; the latter are in host memory."""
    cpu_beside: float
    """Factor by which CPU times grow during uploads."""
    gpu_forward: Curve
    gpu_backward: Curve
    """Time on the GPU of the gradients of the tokens only, with pre-activations recomputed."""
    gpu_training: Curve
    """Time on the GPU of the gradients of tokens and weights; the latter are in GPU memory."""
    round_trip: float
    """Passing a few tokens to the CPU and their results back, without computing."""


@dataclass(frozen=True)
class MachineProfile:
    """Speeds of reading experts in host memory, by which serving chooses between CPU and GPU."""

    cores: int
    """Cores used by the measurements."""
    kernel: str
    """Instruction set of the CPU kernels."""
    link: float
    """Bytes a second that are copied from pinned host memory to the GPU."""
    host_read: float
    """Bytes a second that these cores together read from host memory."""


@dataclass(frozen=True)
class Profile:
    """All measurements of one machine."""

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
        """The profile with these costs in place of those of the same kind of expert."""
        key = (costs.shape, costs.dtype, costs.threads)
        others = [e for e in self.experts if (e.shape, e.dtype, e.threads) != key]
        return dataclasses.replace(self, experts=(*others, costs))


def this_machine(device: str = "cuda") -> str:
    """A description of the hardware that measurements depend on. With `device` "cpu" the machine
    counts as one without a GPU."""
    card = None if device == "cpu" else gpu()
    name = "no GPU" if card is None else f"{card.name} with {card.memory >> 20} MiB"
    memory = f"{round(total_memory() / 2**30)} GiB"
    return f"{_cpu_model()}, {usable_cores()} cores, {memory}, {name}"


def this_version() -> str:
    """A description of the software that measurements depend on."""
    import torch

    try:
        own = f"overspill {metadata.version('overspill')}"
    except metadata.PackageNotFoundError:
        own = "overspill from its sources"
    # during development the kernels change while the version does not
    package = Path(__file__).parents[1]
    sources = sorted([*package.glob("*/*.cpp"), *package.glob("*/*.h")])
    kernels = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:8]
    return f"{own}, torch {torch.__version__}, kernels {kernels}, format {_FORMAT}"


def profile_file(machine: str | None = None) -> Path:
    """One file per machine: several may share a home folder."""
    key = hashlib.sha256((machine or this_machine()).encode()).hexdigest()[:12]
    return cache_folder() / f"profile-{key}.json"


def read_profile(path: Path | None = None, machine: str | None = None) -> Profile:
    """The stored profile of this machine. It is empty, with a warning, if the file is of another
    machine or version or cannot be read; and without one if there is no file."""
    empty = Profile(machine or this_machine(), this_version())
    path = path or profile_file(empty.machine)
    try:
        data = parse_json(path.read_text())
        for expected, stored in (
            (empty.machine, data["machine"]),
            (empty.version, data["version"]),
        ):
            if stored != expected:
                _log.warning("the profile %s is of %s and is ignored", path, stored)
                return empty
        known: Profile = _parse(Profile, data)
    except FileNotFoundError:
        return empty
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("the profile %s cannot be read (%r) and is ignored", path, error)
        return empty
    return known


def write_profile(profile: Profile, path: Path | None = None) -> Path:
    """Writes to a temporary file and renames it, so that other processes never read a partial
    profile."""
    path = path or profile_file(profile.machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.part")
    try:
        temporary.write_text(json.dumps(dataclasses.asdict(profile), indent=2) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _parse(kind: Any, value: Any) -> Any:
    """`value` from JSON as a `kind`; ValueError if it has another type or is not positive."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else _parse(args[0], value)
    if origin is tuple and isinstance(value, list):
        return tuple(_parse(args[0], item) for item in value)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        if value.keys() == hints.keys():
            fields = {name: _parse(hint, value[name]) for name, hint in hints.items()}
            return kind(**fields)  # type: ignore[operator]
    if kind in (int, float) and isinstance(value, int | kind) and not isinstance(value, bool):
        if 0 < value < math.inf:
            return kind(value)
    elif kind in (str, bool) and isinstance(value, kind):
        return value
    raise ValueError(f"{value!r} is not a valid {getattr(kind, '__name__', kind)}")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

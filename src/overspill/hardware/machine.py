"""The memory, cores, GPU and disk of this machine, and the device that computes."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overspill.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Gpu:
    """A CUDA device: its name and its total memory in bytes."""

    name: str
    memory: int


def available_memory(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Bytes of host memory that this process can allocate without swapping or being killed: the
    machine's free memory, or what a container's limit leaves."""
    memory = _meminfo(proc)
    headroom = _cgroup_headroom(proc, cgroup, memory["MemTotal"])
    return max(0, min([memory["MemAvailable"], *headroom]))


def total_memory(proc: Path = _PROC) -> int:
    return _meminfo(proc)["MemTotal"]


def usable_cores() -> int:
    """Cores this process may run on; taskset and containers can restrict them."""
    return len(os.sched_getaffinity(0))


def cpu_threads(wanted: int | None = None) -> int:
    """Threads for compute-bound work: all cores but four, which drive GPU and disk, and at least
    three quarters of them."""
    cores = usable_cores()
    return wanted or max(1, cores - 4, cores * 3 // 4)


def peak_resident_memory() -> int:
    """The most bytes of host memory that this process has used."""
    return _kilobytes((_PROC / "self" / "status").read_text())["VmHWM"]


def gpu() -> Gpu | None:
    """The current CUDA device, or None."""
    import torch  # slow to import, and not needed elsewhere here

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(name=str(properties.name), memory=int(properties.total_memory))


def choose_device(device: "str | torch.device | None" = None) -> "torch.device":
    """The device that computes: `device` with its index, or by default the GPU if there is one."""
    import torch

    has_gpu = torch.cuda.is_available()
    if device is None:
        device = "cuda" if has_gpu else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"--device {device} is unknown; give cuda or cpu") from error
    if found.type == "cpu":
        return found
    if found.type != "cuda":
        raise ConfigError(f"--device {device} is not supported; give cuda or cpu")
    if not has_gpu:
        raise ConfigError(
            f"--device {device}: torch {torch.__version__} finds no CUDA GPU; use device='cpu' "
            "(--device cpu)"
        )
    index = torch.cuda.current_device() if found.index is None else found.index
    return torch.device("cuda", index)


def disk_free(folder: str | os.PathLike[str]) -> int:
    """Free bytes on the disk of `folder`, which need not exist."""
    return shutil.disk_usage(_existing(folder)).free


def is_on_root(folder: str | os.PathLike[str], root: str | os.PathLike[str] = "/") -> bool:
    """Whether `folder`, which need not exist, is on the file system of `root`."""
    return os.stat(_existing(folder)).st_dev == os.stat(root).st_dev


def _existing(folder: str | os.PathLike[str]) -> Path:
    """The nearest existing folder: `folder` itself or one of its parents."""
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    return path


def _meminfo(proc: Path) -> dict[str, int]:
    return _kilobytes((proc / "meminfo").read_text())


def _kilobytes(text: str) -> dict[str, int]:
    """The `Name:  123 kB` lines of a /proc file, in bytes."""
    sizes = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            sizes[name] = int(words[0]) * 1024
    return sizes


def _cgroup_headroom(proc: Path, cgroup: Path, total: int) -> list[int]:
    """The unused part of each memory limit that is below the machine's memory, of this process's
    cgroups and their parents."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    headroom = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            root, limit, usage = cgroup, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root = cgroup / "memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = root / name.lstrip("/")
        while True:
            left = _headroom(folder, limit, usage, total)
            if left is not None:
                headroom.append(left)
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent
    return headroom


def _headroom(folder: Path, limit: str, usage: str, total: int) -> int | None:
    try:
        most = int((folder / limit).read_text())
        if most >= total:
            return None  # cgroups without a limit have a large number
        used = int((folder / usage).read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return None  # the level is not visible from inside a container, or its limit is "max"
    counters = dict(line.split() for line in stat.splitlines() if len(line.split()) == 2)
    # the page cache counts as used, but the kernel reclaims it before it kills a process
    cache = int(counters.get("inactive_file", 0)) + int(counters.get("active_file", 0))
    return most - used + cache

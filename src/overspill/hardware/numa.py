"""Binds a process to the cores near its GPU, as `torchrun --numa-binding` does."""

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal

from overspill.core.errors import ConfigError

logger = logging.getLogger(__name__)

NumaBinding = Literal["node", "socket", "exclusive", "core-complex"]
_SYS = Path("/sys")


def bind_rank(binding: NumaBinding, gpus: Sequence[str], rank: int, sys: Path = _SYS) -> int | None:
    """Bind this process near the GPU of its rank; return the number of ranks that share its cores.
    On a machine with one NUMA node it is not bound: then warn, and return None.

    `gpus` are the PCI addresses of the GPUs of all ranks on this machine, such as "0000:dc:00.0".
    """
    if _numa_nodes(sys) == 1:
        logger.warning(
            "--numa-binding %s: this machine has one NUMA node; ranks are not bound", binding
        )
        return None
    cores = near_cores(binding, gpus, os.sched_getaffinity(0), sys)
    bind(cores[rank])
    return sum(not cores[rank].isdisjoint(others) for others in cores)


def _numa_nodes(sys: Path) -> int:
    try:
        return len(_numbers(sys / "devices/system/node/online"))
    except OSError:  # this kernel has no NUMA
        return 1


def near_cores(
    binding: NumaBinding, gpus: Sequence[str], allowed: Collection[int], sys: Path = _SYS
) -> list[set[int]]:
    """The cores for the process of each GPU, among the `allowed` ones."""
    nodes, found = [_node(gpu, binding, sys) for gpu in gpus], []
    cpus = sys / "devices/system/cpu"
    for gpu, node in enumerate(nodes):
        cores = _numbers(sys / f"devices/system/node/node{node}/cpulist") & {*allowed}
        if not cores:
            raise ConfigError(
                f"--numa-binding {binding}: no core of NUMA node {node}, which has GPU {gpu}, may "
                "be used by this process; allow some (taskset, cpuset), or omit the flag"
            )
        sharing = [other for other, its in enumerate(nodes) if its == node]
        place = sharing.index(gpu)
        if binding == "socket":
            package = _package(min(cores), cpus)
            cores = {core for core in allowed if _package(core, cpus) == package}
        elif binding == "exclusive":  # hardware threads of a core stay together
            physical = _groups(cores, lambda core: _threads_of_core(cpus / f"cpu{core}"))
            if len(physical) < len(sharing):
                raise ConfigError(
                    f"--numa-binding exclusive: NUMA node {node} has {len(physical)} cores for "
                    f"{len(sharing)} ranks; give node"
                )
            first, end = (len(physical) * part // len(sharing) for part in (place, place + 1))
            cores = set[int]().union(*physical[first:end])
        elif binding == "core-complex":  # the larger ones first, as part of one may not be allowed
            complexes = _groups(cores, lambda core: _last_cache(cpus / f"cpu{core}"))
            complexes.sort(key=lambda group: -len(group))
            cores = complexes[place % len(complexes)]
        found.append(cores)
    return found


def bind(cores: Collection[int]) -> None:
    """Bind all threads of this process, and those that they start."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread), cores)


def _node(gpu: str, binding: NumaBinding, sys: Path) -> int:
    file = sys / "bus/pci/devices" / gpu / "numa_node"
    try:
        node = int(file.read_text())
    except OSError:
        node = -1
    if node < 0:  # as in some virtual machines
        raise ConfigError(
            f"--numa-binding {binding}: the system does not tell the NUMA node of the GPU at {gpu} "
            f"({file}); omit the flag, or start each rank with numactl"
        )
    return node


def _package(core: int, cpus: Path) -> int:
    return int((cpus / f"cpu{core}/topology/physical_package_id").read_text())


def _threads_of_core(cpu: Path) -> Path:
    return cpu / "topology/thread_siblings_list"


def _last_cache(cpu: Path) -> Path:
    """The file that lists the cores which share the last level of cache with one."""
    last = max(cpu.glob("cache/index*"), key=lambda cache: int((cache / "level").read_text()))
    return last / "shared_cpu_list"


def _groups(cores: Collection[int], file: Callable[[int], Path]) -> list[set[int]]:
    """`cores` divided as the file of each one lists its group."""
    groups = {frozenset(_numbers(file(core)) & {*cores}) for core in cores}
    return [{*group} for group in sorted(groups, key=min)]


def _numbers(file: Path) -> set[int]:
    """Numbers of a list such as 0-3,8,10-11."""
    numbers = set[int]()
    for part in filter(None, file.read_text().strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers

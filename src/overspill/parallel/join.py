"""Joining the other ranks in a process that was started as one, and its end."""

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overspill.core.errors import BudgetError, ConfigError, OverspillError, RankError
from overspill.core.options import Device
from overspill.hardware.machine import choose_device, cpu_threads, usable_cores
from overspill.hardware.numa import NumaBinding, bind_rank
from overspill.parallel.launcher import RankPlace
from overspill.parallel.ranks import Ranks
from overspill.parallel.watchdog import LATE, Page, Watchdog, report

_TIMEOUT = timedelta(days=1)
"""Timeout of calls to other ranks. The first rank may tokenize for hours; the watchdog notices
failures."""
_PR_SET_PDEATHSIG = 1
LAUNCHER_FIRST = 2.0
"""Seconds in which a launcher may name a rank that was killed, and its signal, and end all."""


@dataclass(frozen=True)
class Joined:
    """The connections of a rank to the others."""

    mesh: DeviceMesh
    ranks: Ranks
    watchdog: Watchdog
    threads: int | None = None
    """This rank's share of the cores that it is bound to; None: it is not bound."""


@contextlib.contextmanager
def joined(
    place: RankPlace,
    device: Device | None,
    stage_ranks: Callable[[int], int] = lambda node_size: 1,
    numa_binding: NumaBinding | None = None,
) -> Iterator[Joined]:
    """Let the ranks work together within the block. `device` is the --device of all ranks; each has
    its own GPU, unless it names one. `stage_ranks` gives the number of a node's ranks that divide
    pipeline stages. With `numa_binding` each rank runs on cores near its GPU. If it or the block
    fails, the process ends, and one rank reports the cause."""
    _end_with_parent(place.launcher)
    if place.rank > 0:  # one rank shows what all would
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
    torch.set_num_threads(max(1, usable_cores() // place.node_size))
    store, page = _meet(place)
    first = place.rank - place.node_rank
    watchdog = Watchdog(page, place.node_rank, first=first, size=place.size)
    watchdog.start(lambda wrong: _abort(page, wrong))
    with _reported(page, place.rank):
        # None may fail before all can see its report. The watchdog names a rank that is missing.
        store.set(f"overspill/joined/{place.rank}", "")
        store.wait([f"overspill/joined/{rank}" for rank in range(place.size)], _TIMEOUT)
        chosen = _choose_device(device, place)
        own_gpu = chosen.type == "cuda" and not _is_shared(device)
        if own_gpu:
            torch.cuda.set_device(chosen)
        threads = _bind(place, numa_binding, own_gpu)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if own_gpu else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=_TIMEOUT,
        )
        mesh = _mesh(place, "cuda" if own_gpu else "cpu", stage_ranks, chosen)
        ranks = Ranks(mesh, chosen)
        watchdog.follow(ranks)
        yield Joined(mesh, ranks, watchdog, threads)
        ranks.gather(None)  # none ends before all have ended their work
    watchdog.stop()
    dist.destroy_process_group()


def _mesh(
    place: RankPlace, kind: str, stage_ranks: Callable[[int], int], device: torch.device
) -> DeviceMesh:
    """The ranks of a node divide the stages and the experts; nodes divide the batch alone."""
    n_stages = stage_ranks(place.node_size)
    # ranks with different flags would wait for each other while they make the mesh
    line = Ranks(init_device_mesh(kind, (place.size,)), device, line=True)
    line.check_same({"the ranks that divide stages (--stages, --stage-gpus)": str(n_stages)})
    sizes = {"data": place.size // place.node_size, "stage": n_stages}
    shape = {name: size for name, size in sizes.items() if size > 1}
    if tuple(shape) != ("stage",) or n_stages < place.node_size:
        shape["expert"] = place.node_size // n_stages
    return init_device_mesh(kind, tuple(shape.values()), mesh_dim_names=tuple(shape))


def _meet(place: RankPlace) -> tuple[dist.Store, Page]:
    """The store through which ranks find each other, and the page of the watchdogs of a node."""
    key, first = f"overspill/page/{place.node}", place.rank - place.node_rank
    late = f"or has not started within {LATE} s"
    try:
        address = _store_address(place)
        if place.rank > 0:
            _await_listener(address)
        # The first rank does not wait for the others here ("world_size=1"), but with its watchdog,
        # which names those that are missing.
        store, _, _ = next(dist.rendezvous("env://?world_size=1", timeout=timedelta(seconds=LATE)))
    except (RuntimeError, OSError) as error:
        raise RankError(
            f"rank 0 has failed, {late}: rank {place.rank} cannot join it ({error})"
        ) from error
    if place.node_rank == 0:
        try:
            page = Page.create(place.node_size)
        except OSError as error:
            raise BudgetError(
                f"rank {place.rank}: the system refused a page of memory that ranks share (memfd): "
                f"{error}; allow memfd_create, or train in one process"
            ) from error
        store.set(key, page.path)
    else:
        try:
            page = Page.open(store.get(key).decode(), place.node_size)
        except (RuntimeError, OSError) as error:
            raise RankError(
                f"rank {first} has failed, {late}: rank {place.rank} cannot join it ({error})"
            ) from error
    store.set_timeout(_TIMEOUT)
    return store, page


def _store_address(place: RankPlace) -> tuple[str, int]:
    try:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"RANK={place.rank} and WORLD_SIZE={place.size} are set, but not MASTER_ADDR and "
            f"MASTER_PORT ({error}); start ranks with --gpus or torchrun, or unset WORLD_SIZE"
        ) from error


def _await_listener(address: tuple[str, int]) -> None:
    """Until the first rank, or torchrun, listens. The store's own client would try for LATE
    seconds twice, and print its attempts."""
    deadline = time.monotonic() + LATE
    while True:
        try:
            socket.create_connection(address, timeout=LATE).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _is_shared(device: Device | None) -> bool:
    """Whether --device names one GPU for all ranks."""
    return str(device).startswith("cuda:")


def _choose_device(device: Device | None, place: RankPlace) -> torch.device:
    if device is not None:
        chosen = choose_device(device)
        if chosen.type == "cpu" or _is_shared(device):
            return chosen
    count = torch.cuda.device_count()
    if count < place.node_size:
        raise ConfigError(
            f"--gpus {place.node_size}: this machine has {count} GPUs; give at most that, "
            "--device cpu for processes that compute on the CPU, or --device cuda:0 with "
            "--gpu-memory for ranks that share a GPU"
        )
    return choose_device(f"cuda:{place.node_rank}")


def _bind(place: RankPlace, binding: NumaBinding | None, own_gpu: bool) -> int | None:
    """Bind this rank to cores near its GPU, before it allocates memory; return the number of
    threads for its share of them."""
    if binding is None:
        return None
    if not own_gpu:
        raise ConfigError(
            f"--numa-binding {binding} needs a GPU for each rank, and these ranks compute on the "
            "CPU or share a GPU; omit the flag"
        )
    gpus = [_pci_address(number) for number in range(place.node_size)]
    ranks = bind_rank(binding, gpus, place.node_rank)
    if ranks is None:
        return None
    torch.set_num_threads(max(1, usable_cores() // ranks))
    return max(1, cpu_threads() // ranks)


def _pci_address(gpu: int) -> str:
    found: Any = torch.cuda.get_device_properties(gpu)  # its types lack these numbers
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


# -- the end --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _reported(page: Page, rank: int) -> Iterator[None]:
    """If the block fails, the first rank that fails says so, and this process ends at once: others
    may wait for it, and it must not wait for them."""
    try:
        yield
    except OverspillError as error:
        if isinstance(error, RankError):  # the rank that has failed says more
            _await_report(page, 5.0)
        report(page, f"rank {rank}: {error}", 2)
        time.sleep(0.3)  # the first rank may hold the store that others still read
    except KeyboardInterrupt:
        page.claim(130)  # no failure: the others need not say that this rank is gone
    except Exception as error:
        if isinstance(error, (RuntimeError, OSError)):  # as those of torch.distributed are
            # The cause may be that another rank is gone: it, the launcher or the watchdog says why.
            _await_report(page, 3.0)
        if report(page, f"rank {rank}: {type(error).__name__}: {error}", 1):
            traceback.print_exc()
    else:
        return
    _exit(page.exit_code)


def _await_report(page: Page, seconds: float) -> None:
    """Wait until another rank has reported a failure, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while not page.claimed and time.monotonic() < deadline:
        time.sleep(0.05)


def _abort(page: Page, wrong: str) -> None:
    """Report a failure that the watchdog has found, and end the process."""
    time.sleep(LAUNCHER_FIRST)
    report(page, wrong, 1)
    _exit(page.exit_code)


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_parent(launcher: int | None) -> None:
    """Let the system kill this process when its launcher ends, or does so if it has ended by now:
    importing torch has taken seconds."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if launcher not in (None, os.getppid()):
        os.kill(os.getpid(), signal.SIGKILL)

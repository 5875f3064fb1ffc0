"""Real processes with gloo. They are forked from a server that has torch imported."""

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.fork_server import fork_server

_TIMEOUT = 100.0  # seconds until a rank that waits for another one fails


FAMILY_NAMES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
_IMPORTS = [  # else each rank would do it
    "torch._dynamo",  # imported by torch.optim
    *(f"transformers.models.{name}.modeling_{name}" for name in FAMILY_NAMES),
]


def run_ranks(
    n_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    method: str = "fork",
    timeout: float = _TIMEOUT,
) -> list[Any]:
    """The results of `function(mesh, *args)` on each rank, or the exceptions it has raised. Forked
    processes may not be able to use a GPU; with the method "spawn" they can."""
    if method == "spawn":
        return _run_ranks(n_ranks, function, args, method, timeout)
    task = (n_ranks, function, args, method, timeout)
    fork_server().preload(_IMPORTS)
    results: list[Any] = fork_server().call(_run_ranks, *task)
    return results


def _run_ranks(
    n_ranks: int, function: Callable[..., Any], args: tuple[Any, ...], method: str, timeout: float
) -> list[Any]:
    context: Any = multiprocessing.get_context(method)
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(n_ranks):
                receiver, sender = context.Pipe(duplex=False)
                target = (rank, n_ranks, Path(folder) / "store", timeout, sender, function, args)
                process = context.Process(target=_run, args=target, daemon=True)
                process.start()
                sender.close()
                pipes.append(receiver)
                processes.append(process)
            return [pickle.loads(pipe.recv_bytes()) for pipe in pipes]
        finally:
            for process in processes:
                process.join(timeout)
                process.kill()


def _run(
    rank: int,
    n_ranks: int,
    store: Path,
    timeout: float,
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=n_ranks,
        timeout=timedelta(seconds=timeout),
    )
    mesh: DeviceMesh = init_device_mesh("cpu", (n_ranks,), mesh_dim_names=("expert",))
    try:
        result: Any = function(mesh, *args)
    except Exception as error:
        traceback.print_exc()
        result = error
    sender.send_bytes(pickle.dumps(result))
    sender.close()
    dist.destroy_process_group()

"""Real processes with gloo. They are forked from a server that has imported torch once."""

import multiprocessing
import os
import pickle
import sys
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

_TIMEOUT = 20.0  # seconds until a rank that waits for another one fails


def run_ranks(n_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of `function(mesh, *args)` on each rank, or the exceptions it has raised."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.parallel.training", "torch._dynamo"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # of the server, when it starts
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(n_ranks):
                receiver, sender = context.Pipe(duplex=False)
                target = (rank, n_ranks, Path(folder) / "store", sender, function, args)
                process = context.Process(target=_run, args=target, daemon=True)
                process.start()
                sender.close()
                pipes.append(receiver)
                processes.append(process)
            return [pickle.loads(pipe.recv_bytes()) for pipe in pipes]
        finally:
            for process in processes:
                process.join(_TIMEOUT)
                process.kill()
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


def _run(
    rank: int,
    n_ranks: int,
    store: Path,
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
        timeout=timedelta(seconds=_TIMEOUT),
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

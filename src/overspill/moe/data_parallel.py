"""Several GPUs or processes for one model: refused where experts would be left out."""

from typing import NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overspill.core.errors import OrderError


def refuse_replicas(module: nn.Module) -> None:
    """Makes torch.nn.DataParallel raise when it copies a module whose experts are offloaded."""
    # an instance attribute without a reference to the module, which keeps its class and lifetime
    module._replicate_for_data_parallel = _no_replica  # type: ignore[method-assign]


def _no_replica() -> NoReturn:
    raise OrderError(
        "torch.nn.DataParallel copies a model to several GPUs, but offloaded experts exist once; "
        "start one process per GPU, each with a model of its own and CUDA_VISIBLE_DEVICES set to "
        "one GPU"
    )


def check_processes() -> None:
    """A forward that trains experts: raises inside a DistributedDataParallel of several processes,
    which would train the experts of each on its own batches."""
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is not None and (size := wrapper.process_group.size()) > 1:
        raise OrderError(
            f"DistributedDataParallel averages the gradients of {size} processes, but not those "
            "of offloaded experts, which are not tensors of the model; freeze the experts "
            "(adapters are averaged), or give a mesh to overspill.offload in its place"
        )

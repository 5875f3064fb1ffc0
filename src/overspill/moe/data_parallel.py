"""Several GPUs or processes for one model: refused where experts would be left out."""

from collections.abc import Sequence
from typing import NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overspill.core.errors import OrderError


def refuse_replicas(module: nn.Module) -> None:
    """Make torch.nn.DataParallel raise when it copies a module whose experts are offloaded."""
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


def check_ignored(experts: Sequence[nn.Parameter]) -> None:
    """Raise in a forward inside a DistributedDataParallel that treats the experts of this rank as
    copies of other ranks' experts."""
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is None or wrapper.process_group.size() == 1:
        return
    ids = {id(expert) for expert in experts}
    ignored = wrapper.parameters_to_ignore
    names = [
        name
        for name, parameter in wrapper.module.named_parameters()
        if id(parameter) in ids and name not in ignored
    ]
    if names:
        raise OrderError(
            f"DistributedDataParallel has replaced {', '.join(names)} by the experts of the first "
            "rank, but each rank has experts of its own; set "
            "model._ddp_params_and_buffers_to_ignore to the names of all expert parameters before "
            "wrapping the model"
        )

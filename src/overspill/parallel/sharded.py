"""Dense tensors that ranks divide: each holds a part of a `DTensor`.

Every function also accepts a tensor that is not divided, and then treats it as it is.
"""

from typing import Any, cast

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")  # without an import of torch.distributed.tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part, which may be empty. Without gradients."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A copy of all parts, or the tensor itself. Entered by all ranks."""
    if not is_sharded(tensor):
        return tensor
    if tensor.dtype == torch.int16:  # gloo and NCCL cannot send it: the same bits as another type
        return whole(as_sharded(local(tensor).view(torch.bfloat16), tensor)).view(torch.int16)
    gathered: Tensor = cast(Any, tensor).full_tensor()
    return gathered


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds, if it is divided as `like` is."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = cast(Any, like).device_mesh, cast(Any, like).placements
    # All ranks have the whole tensor: each takes its own part.
    return local(distribute_tensor(whole, mesh, placements, src_data_rank=None))


def as_sharded(part: Tensor, like: Tensor) -> Tensor:
    """The tensor of which each rank holds a part, divided as `like` is."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = cast(Any, like).device_mesh, cast(Any, like).placements
    found: Tensor = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return found

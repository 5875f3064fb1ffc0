"""Dense gradients of several ranks."""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.parallel.ranks import Ranks


def average_gradients(ranks: Ranks, parameters: Sequence[Tensor], numbers: object) -> None:
    """Replaces the gradient of each parameter by its mean over ranks. A rank without one counts as
    zero, as in DistributedDataParallel. `numbers` of the step must be the same on all ranks."""
    digest = zlib.crc32(repr(numbers).encode())
    has = [parameter.grad is not None for parameter in parameters]
    most, minus_least, *has_any = ranks.largest([digest, -digest, *has])
    if most != -minus_least:
        raise ConfigError(
            f"the optimizer's numbers differ between ranks, here they are {numbers}; give all "
            "ranks the same learning rate, betas, eps, weight_decay and max_grad_norm"
        )
    trained = [p for p, found in zip(parameters, has_any, strict=True) if found]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    ranks.average_([parameter.grad for parameter in trained if parameter.grad is not None])

"""Dense gradients of several ranks."""

import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.parallel.ranks import Ranks

_BUCKET = 1 << 24  # elements that are averaged at once


def average_gradients(ranks: Ranks, parameters: Sequence[Tensor], numbers: object) -> None:
    """Replace the gradient of each parameter by its mean over ranks. A rank without one counts as
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
    average_(ranks, [parameter.grad for parameter in trained if parameter.grad is not None])


def average_(ranks: Ranks, tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its mean over ranks: the same bits on all. Sums are float32."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1).float() for tensor in bucket])
        flat = ranks.total(flat).mul_(1 / ranks.size)
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket

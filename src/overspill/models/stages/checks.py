"""Checks of the arguments of a step in stages, before or while it computes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overspill.core.errors import ConfigError
from overspill.models.ranks import checksum, digest
from overspill.models.stages.step import MicroBatch
from overspill.parallel.ranks import Ranks


def checked_batches(micro_batches: Iterable[MicroBatch]) -> list[MicroBatch]:
    """Return the micro-batches as a list."""
    if isinstance(micro_batches, Mapping):
        raise ConfigError(
            "micro_batches is one mapping; give a list with one for each micro-batch, the keyword "
            "arguments of the model"
        )
    batches = list(micro_batches)
    if not batches:
        raise ConfigError("a pass in stages needs at least one micro-batch")
    for number, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"micro-batch {number} is a {type(batch).__name__}; give a mapping, the keyword "
                "arguments of the model"
            )
    return batches


def check_count(ranks: Ranks, count: int) -> None:
    """Raises on all ranks along stages if one has another number of micro-batches: they would wait
    for each other."""
    most, minus_least = ranks.largest([count, -count])
    if most != -minus_least:
        raise ConfigError(
            f"ranks along stages must get the same micro-batches: one has {most}, another "
            f"{-minus_least}"
        )


def check_same(ranks: Ranks, batches: Sequence[MicroBatch]) -> None:
    """Raises on all ranks along stages if their micro-batches differ: the first stage would compute
    the tokens of one rank, and the last the labels of another."""
    tensors = [
        [(n, tuple(v.shape), checksum(v)) for n, v in sorted(batch.items()) if torch.is_tensor(v)]
        for batch in batches
    ]
    ranks.check_same({"a digest of the micro-batches along stages": digest(tensors)})


def check_optimizer(model: nn.Module, optimizer: object) -> None:
    """Raises if the experts are trained and `optimizer` is not theirs."""
    if optimizer is not None and not hasattr(optimizer, "accumulate"):
        raise ConfigError(
            f"optimizer={type(optimizer).__name__} does not train experts; give the "
            "overspill.AdamW of the model"
        )
    trained = any(
        hasattr(p, "is_expert_placeholder") for p in model.parameters() if p.requires_grad
    )
    if trained and optimizer is None:
        raise ConfigError(
            "the experts are trained; give backward() their optimizer, overspill.AdamW(model, ...)"
        )


def loss_of(number: int, output: Any) -> Tensor:
    """Return the loss that the model has computed."""
    loss = getattr(output, "loss", None)
    if loss is None:
        raise ConfigError(
            f"the model returns no loss for micro-batch {number}; put labels in it, or give "
            "backward() a function loss"
        )
    return checked_loss(number, loss)


def checked_loss(number: int, loss: Tensor) -> Tensor:
    """Return `loss`; raise if a backward cannot begin from it."""
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"the loss of micro-batch {number} is a {type(loss).__name__}; return a tensor"
        )
    if loss.numel() != 1:
        raise ConfigError(
            f"the loss of micro-batch {number} has the shape {tuple(loss.shape)}; return one number"
        )
    if not loss.requires_grad:
        raise ConfigError(
            f"the loss of micro-batch {number} needs no gradient: it was detached, all parameters "
            "are frozen, or backward() was called within torch.no_grad()"
        )
    return loss

"""The learning rate by step: linear warm-up, then cosine decay to a share of the highest."""

import math

import torch


def lr_share(step: int, warmup: int, steps: int, min_share: float) -> float:
    """The share of the highest learning rate at step `step`, counted from 0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return min_share + (1 - min_share) * 0.5 * (1 + math.cos(math.pi * done))


def make_scheduler(
    optimizer: torch.optim.Optimizer, done: int, warmup: int, steps: int, min_share: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """The scheduler of a run that has taken `done` steps."""
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # torch needs it to resume a schedule
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_share(step, warmup, steps, min_share), last_epoch=done - 1
    )

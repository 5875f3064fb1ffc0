"""Which parameters of optimizers are pre-gates. Refuses to train a model with pre-gates that no
optimizer updates.

Checked once for each optimizer of torch, before its first step. An optimizer for the pre-gates may
be another one: all optimizers of the process are looked at before an error is raised.
"""

import gc
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from overspill.core.errors import ConfigError

_LOCK = threading.Lock()  # guards all below
_CHAINS: weakref.WeakSet["Chain"] = weakref.WeakSet()
_TRAINED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Stacks with pre-gates that have run a forward with gradients."""
_CHECKED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_HOOKS: list[Any] = []


class Chain(Protocol):
    """Gates of MoE blocks, some of them pre-gates."""

    @property
    def pregates(self) -> Iterable[nn.Module]: ...


def add(chain: Chain) -> None:
    """A model has got pre-gates. From now on, steps of optimizers are checked."""
    with _LOCK:
        _CHAINS.add(chain)
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_pre_hook(_check))


def note(stack: nn.Module) -> None:
    """The stack runs a forward with gradients."""
    with _LOCK:
        _TRAINED.add(stack)


def are_pregates(parameters: Iterable[nn.Parameter]) -> list[bool]:
    """Whether each of them belongs to a pre-gate."""
    with _LOCK:
        chains = list(_CHAINS)
    known = {id(p) for chain in chains for gate in chain.pregates for p in gate.parameters()}
    return [id(parameter) in known for parameter in parameters]


def _check(optimizer: Optimizer, *_: object) -> None:
    with _LOCK:
        stacks = [] if optimizer in _CHECKED else list(_TRAINED)
    if not stacks:
        return
    mine = _parameters(optimizer)
    for stack in stacks:
        if not mine.isdisjoint(map(id, stack.parameters())):
            _check_stack(stack, mine)
    with _LOCK:
        _CHECKED.add(optimizer)


def _check_stack(stack: nn.Module, mine: set[int]) -> None:
    missing = {id(p): name for name, p in _pregates(stack) if id(p) not in mine}
    if missing:
        for other in gc.get_objects():
            if issubclass(type(other), Optimizer):
                for covered in _parameters(other):
                    missing.pop(covered, None)
    if missing:
        raise ConfigError(
            f"{next(iter(missing.values()))} is a pre-gate, and no optimizer has it: it would stay "
            "as it is while the model is trained. Give all parameters of the model to the "
            "optimizer, or freeze the pre-gates with requires_grad_(False)"
        )


def _pregates(stack: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for path, gate in stack.named_modules():
        position = vars(gate).get("pregating")
        if position is not None and position.is_pregate:
            for name, parameter in gate.named_parameters(path):
                if parameter.requires_grad:
                    yield name, parameter


def _parameters(optimizer: Optimizer) -> set[int]:
    groups = getattr(optimizer, "param_groups", [])
    return {id(parameter) for group in groups for parameter in group["params"]}

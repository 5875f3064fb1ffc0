"""Check of the parameters of optimizers for pre-gates. Refuses to train a model with pre-gates that
no optimizer updates.

Checked once for each optimizer of torch, before its second step: an optimizer for the pre-gates may
be another one, which has taken its first step by then.
"""

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
_STEPPED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
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
        is_second = optimizer in _STEPPED and optimizer not in _CHECKED
        _STEPPED.add(optimizer)
        stacks, optimizers = list(_TRAINED), list(_STEPPED)
    if not is_second or not stacks:
        return
    mine = _parameters(optimizer)
    covered = set().union(*map(_parameters, optimizers))
    for stack in stacks:
        if mine.isdisjoint(map(id, stack.parameters())):
            continue
        missing = next((name for name, p in _pregates(stack) if id(p) not in covered), None)
        if missing is not None:
            raise ConfigError(
                f"{missing} is a pre-gate, and no optimizer that has taken a step has it: it would "
                "stay as it is while the model is trained. Give all parameters of the model to the "
                "optimizer, freeze the pre-gates with requires_grad_(False), or let their own "
                "optimizer take a step first"
            )
    with _LOCK:
        _CHECKED.add(optimizer)


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

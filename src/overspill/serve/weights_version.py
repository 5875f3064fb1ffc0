"""Detection of changes of a model's weights between two batches."""

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from overspill.moe.engine import Engine
from overspill.moe.placeholder import ExpertPlaceholder


class WeightsVersion:
    """Version of all weights of a model: keys and values of an earlier version are out of date.

    Experts change through the engine, which counts changes. Dense weights and buffers are ordinary
    tensors, whose versions count changes in place. Fused optimizers do not change these versions,
    so steps of all optimizers are counted too. Changes of `parameter.data` are not detected.
    """

    def __init__(self, model: Any) -> None:
        self._engine: Engine = model.overspill
        self._dense = [pair for module in model.modules() for pair in _tensors_of(module)]
        self._ids = {id(tensors[name]) for tensors, name in self._dense}
        self._steps = 0  # of optimizers that have dense weights
        hook = register_optimizer_step_post_hook(_counter(weakref.ref(self)))
        weakref.finalize(self, hook.remove)
        self._known = self._engine.records.n_changes, self._steps
        self._versions = self._read()

    def _read(self) -> list[tuple[int, int]]:
        """Return the address and the version of each dense tensor."""
        return [_version(parameters[name]) for parameters, name in self._dense]

    def changed(self, dense: bool) -> bool:
        """Return whether weights have changed since the last call. Without `dense` only counters
        are compared, which takes no time. Returns when all updates of experts have ended."""
        known, versions = (self._engine.records.n_changes, self._steps), self._versions
        if dense or known != self._known:
            versions = self._read()
        if (known, versions) == (self._known, self._versions):
            return False
        self._engine.flush()
        self._known, self._versions = known, versions
        return True

    def after_forward(self) -> None:
        """Accept changes of buffers by the model's own forward: otherwise no request would end."""
        for number, (tensors, name) in enumerate(self._dense):
            if not isinstance(tensors[name], nn.Parameter):
                self._versions[number] = _version(tensors[name])

    def after_step(self, optimizer: Optimizer) -> None:
        """Count a step of an optimizer that has tensors of this model."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self._steps += any(id(parameter) in self._ids for parameter in parameters)

    def addresses(self) -> list[int]:
        """Return the addresses of the dense tensors at the last call of `changed`."""
        return [address for address, _ in self._versions]


def _tensors_of(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the dense weights of a module, and the buffers that are saved with it: other buffers
    may change in a forward."""
    for name, parameter in module._parameters.items():
        if parameter is not None and not isinstance(parameter, ExpertPlaceholder):
            yield module._parameters, name
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield module._buffers, name


def _counter(version: "weakref.ref[WeightsVersion]") -> Any:
    """Return a hook of all optimizers that does not keep the model alive."""

    def count(optimizer: Optimizer, *_: Any) -> None:
        found = version()
        if found is not None:
            found.after_step(optimizer)

    return count


def _version(parameter: Tensor | None) -> tuple[int, int]:
    if parameter is None:
        return 0, 0
    return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version

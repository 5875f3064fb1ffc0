"""Changes of a model's weights between two batches."""

from typing import Any

from torch import Tensor

from overspill.moe.engine import Engine
from overspill.moe.placeholder import ExpertPlaceholder


class WeightsVersion:
    """Version of all weights of a model: keys and values of another version are wrong.

    Experts change through the engine, which counts. Dense weights are ordinary tensors, whose own
    versions count what changes them in place. Changes of `parameter.data` are not seen.
    """

    def __init__(self, model: Any) -> None:
        self._engine: Engine = model.overspill
        self._dense = [
            (module._parameters, name)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and not isinstance(parameter, ExpertPlaceholder)
        ]
        self._experts = self._engine.records.n_changes
        self._versions = self._read()

    def _read(self) -> list[tuple[int, int]]:
        """The address and the version of each dense tensor."""
        return [_version(parameters[name]) for parameters, name in self._dense]

    def changed(self, dense: bool) -> bool:
        """Whether weights have changed since the last call. Without `dense` only experts are
        compared, which takes no time. Returns when all updates of experts have ended."""
        experts, versions = self._engine.records.n_changes, self._versions
        if dense or experts != self._experts:
            versions = self._read()
        if (experts, versions) == (self._experts, self._versions):
            return False
        self._engine.flush()
        self._experts, self._versions = experts, versions
        return True

    def addresses(self) -> list[int]:
        """Of the dense tensors, as of the last call of `changed`."""
        return [address for address, _ in self._versions]


def _version(parameter: Tensor | None) -> tuple[int, int]:
    if parameter is None:
        return 0, 0
    return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version

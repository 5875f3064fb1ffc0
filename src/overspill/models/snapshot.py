"""Snapshots of models, to restore them if offloading fails."""

import copy
from typing import Any

from torch import nn


class ModelSnapshot:
    """References to all modules, parameters and buffers of a model, without copies of tensors."""

    def __init__(self, model: nn.Module) -> None:
        # also the configs: transformers changes them with the implementation of the experts
        found = [*model.modules(), *(getattr(module, "config", None) for module in model.modules())]
        owners = {id(owner): owner for owner in found if _is_changeable(owner)}
        self._owners = [(owner, type(owner), _attributes(owner)) for owner in owners.values()]
        tensors = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
        self._data = [(tensor, tensor.data) for tensor in tensors]

    def restore(self) -> None:
        for owner, kind, attributes in self._owners:
            if type(owner) is not kind:
                owner.__class__ = kind
            vars(owner).clear()
            vars(owner).update(attributes)
        for tensor, data in self._data:
            if tensor.device != data.device or tensor.data_ptr() != data.data_ptr():
                tensor.data = data


def _is_changeable(owner: Any) -> bool:
    return isinstance(getattr(owner, "__dict__", None), dict)


def _attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object, with shallow copies of dictionaries and sets."""
    return {
        name: copy.copy(value) if isinstance(value, dict | set) else value
        for name, value in vars(owner).items()
    }

"""Tensors that are read when somebody looks at their numbers, and not before."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_ATTRIBUTES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_meta", "nbytes")
_METHODS = ("size", "dim", "numel", "element_size", "is_floating_point")
_KNOWN = {getattr(Tensor, name).__get__ for name in _ATTRIBUTES}
_KNOWN |= {getattr(Tensor, name) for name in _METHODS}
"""What can be told without reading."""


class LateTensor(Tensor):
    """Has its size and dtype at once; its numbers come from `read`, once, at first use.

    A state dict of such tensors costs nothing to those who want its names: transformers asks every
    model for them before it loads shards, and peft before it saves adapters.
    """

    _read: Callable[[], Tensor]
    _value: Tensor | None

    @staticmethod
    def __new__(
        cls, size: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]
    ) -> "LateTensor":
        cpu = torch.device("cpu")
        self: LateTensor = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=cpu)
        self._read, self._value = read, None
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What Python code does with the tensor."""
        if func in _KNOWN:
            known: Any = super().__torch_function__
            return known(func, types, args, kwargs or {})
        return _with_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What torch itself does with it."""
        return _with_values(func, args, kwargs)


def _with_values(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*tree_map(_value_of, args), **tree_map(_value_of, kwargs or {}))


def _value_of(thing: Any) -> Any:
    if not isinstance(thing, LateTensor):
        return thing
    if thing._value is None:
        thing._value = thing._read()
    return thing._value

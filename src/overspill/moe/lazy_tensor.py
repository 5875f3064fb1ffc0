"""Tensors whose values are read on first use."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_ATTRIBUTES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_meta", "nbytes")
_METHODS = ("size", "dim", "numel", "element_size", "is_floating_point")
_METADATA = {getattr(Tensor, name).__get__ for name in _ATTRIBUTES}
_METADATA |= {getattr(Tensor, name) for name in _METHODS}


class LazyTensor(Tensor):
    """Has its size and dtype at once; `read` gives its values, once, on first use.

    A state dict of lazy tensors makes names and shapes available at no cost: transformers requests
    them before it loads shards, and peft before it saves adapters.
    """

    _read: Callable[[], Tensor]
    _value: Tensor | None

    @staticmethod
    def __new__(
        cls, size: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]
    ) -> "LazyTensor":
        cpu = torch.device("cpu")
        self: LazyTensor = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=cpu)
        self._read, self._value = read, None
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Operations called from Python."""
        if func in _METADATA:
            known: Any = super().__torch_function__
            return known(func, types, args, kwargs or {})
        return _with_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Operations called from C++."""
        return _with_values(func, args, kwargs)


def _with_values(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*tree_map(_value_of, args), **tree_map(_value_of, kwargs or {}))


def _value_of(thing: Any) -> Any:
    if not isinstance(thing, LazyTensor):
        return thing
    if thing._value is None:
        thing._value = thing._read()
    return thing._value

"""The highest memory of a training step: on a GPU by the allocator of torch, on the CPU, for smoke
tests, by counting the storages of all results of operations."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from mpipe_layers import Layer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class _Storages(TorchDispatchMode):
    """Bytes of the storages that were made since this mode began, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known or storage.nbytes() == 0:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size


def training_peak(spec: Layer, tokens: int, build: Callable[[], nn.Module]) -> int:
    """Bytes of a training step with AdamW: the layer, its gradients and states, the batch, its
    gradient, and all that is between them."""

    def train(begin_last: Callable[[], object]) -> None:
        layer = build()
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-4, fused=True)
        x, dy = spec.rows(tokens).requires_grad_(), spec.rows(tokens)
        # before the step that is measured: the optimizer makes its states in the first
        warm = 2 if spec.device.type == "cuda" else 1
        for number in range(warm + 1):
            if number == warm:
                begin_last()
            x.grad = None
            y, _ = layer(x)
            y.backward(dy)
            del y
            optimizer.step()
            optimizer.zero_grad()

    if spec.device.type != "cuda":
        storages = _Storages()
        with storages:
            train(lambda: setattr(storages, "most", storages.now))
        return storages.most
    gc.collect()  # what is freed later would be subtracted
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    train(torch.cuda.reset_peak_memory_stats)
    return torch.cuda.max_memory_allocated() - before

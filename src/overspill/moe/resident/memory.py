"""Memory of experts that are all on the compute device."""

import torch
from torch import Tensor

from overspill.core.lifetime import Lifetime
from overspill.tiers.layout import RecordLayout


class ResidentMemory:
    """Records side by side: row `layer * n_local + position` of each tensor is one expert's."""

    def __init__(self, count: int, layout: RecordLayout, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self._size = (count, layout.shape.numel)
        self.lifetime = Lifetime()
        self.weights = self._zeros(layout.dtype)
        self.states: dict[str, Tensor] = {}
        self.grads: Tensor | None = None

    def allocate_states(self, state_dtype: torch.dtype) -> None:
        """Allocates the optimizer states, once."""
        if not self.states:
            shape, dtype = self.layout.shape, self.layout.dtype
            self.layout = RecordLayout(shape, dtype, state_dtype)
            self.states = {s.name: self._zeros(s.dtype) for s in self.layout.sections}

    def allocate_grads(self) -> Tensor:
        """Allocates memory for kept gradients, once."""
        if self.grads is None:
            self.grads = self._zeros(self.layout.dtype)
        return self.grads

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self._size, dtype=dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        tensors = [self.weights, *self.states.values()]
        if self.grads is not None:
            tensors.append(self.grads)
        return sum(tensor.nbytes for tensor in tensors)

    def wait(self) -> None:
        self.lifetime.check()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        self.lifetime.closed = True
        # new tensors: a slice would keep all of the memory
        self.weights = self.weights.new_empty(0, self.layout.shape.numel)
        self.states.clear()
        self.grads = None

"""The dense part of an offloaded model: memory of its weights, gradients and optimizer states."""

import weakref

import torch
from torch import Tensor, nn

from overspill.core.lifetime import Lifetime
from overspill.moe.dense_memory import DenseMemory
from overspill.moe.dense_weights import DenseWeights
from overspill.optim.parameters import is_placeholder
from overspill.parallel.sharded import local
from overspill.plan.budget import Placement
from overspill.trace.recorder import Recorder
from overspill.transfer.streams import CopyStream, Inject


class DensePart:
    """Weights, gradients and states of dense parameters, on the device or in host memory."""

    def __init__(
        self,
        device: torch.device,
        lifetime: Lifetime,
        placement: Placement,
        recorder: Recorder,
        inject: Inject | None,
    ) -> None:
        self._device = device
        self._placement = placement
        self._recorder, self._inject = recorder, inject
        self._memory = DenseMemory(device, lifetime)
        self._weights: DenseWeights | None = None
        self._model: weakref.ref[nn.Module] | None = None

    def hold(self, model: nn.Module) -> None:
        """Take the dense parameters of `model`, and move them to host memory if the placement puts
        them there."""
        self._model = weakref.ref(model)
        if self._placement.dense_weights:
            copies = CopyStream("upload", self._device, self._recorder, self._inject)
            self._weights = DenseWeights(self._device, self._memory, copies)
            self._weights.hold(model)

    def new_state(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Zeros for an optimizer state of a parameter, where the placement puts them."""
        return self._memory.zeros(parameter, dtype, self._placement.dense_states > 0)

    @property
    def host_bytes(self) -> int:
        return self._memory.host_bytes

    def device_bytes(self) -> int:
        """Bytes on the compute device between two passes."""
        states = self._memory.device_bytes
        return states if self._placement.dense_weights else states + self._parameter_bytes()

    def _parameter_bytes(self) -> int:
        """GPU memory of weights and gradients."""
        model = None if self._model is None else self._model()
        if model is None:
            return 0
        dense = [p for p in model.parameters() if not is_placeholder(p)]
        tensors = [*dense, *(p.grad for p in dense if p.grad is not None)]
        return sum(local(tensor.detach()).nbytes for tensor in tensors if tensor.is_cuda)

    def close(self) -> None:
        """Release memory as soon as no tensor refers to it, after the engine was closed."""
        if self._weights is not None:
            self._weights.close()
        self._memory.close()

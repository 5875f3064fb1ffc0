"""GPipe as a baseline: a plain transformers model in stages, on the device as a whole or with a
naive offload that copies the weights of each stage before it computes, and waits for it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from overspill.models.stages.blocks import Passing, StagedBlocks, entering


class GPipe:
    """All micro-batches pass a stage before the next one. Without `offload` everything is on the
    device. With it, weights, gradients and optimizer states are in host memory."""

    def __init__(
        self, model: Any, stages: Sequence[range], device: torch.device, offload: bool
    ) -> None:
        self._model, self._stages, self._device, self._offload = model, stages, device, offload
        self._blocks = StagedBlocks(model)
        inside = {id(p) for n in range(len(self._blocks)) for p in self._blocks[n].parameters()}
        self._outside = [p for p in model.parameters() if id(p) not in inside]
        self._homes: dict[nn.Parameter, Tensor] = {}
        self.bytes_moved = 0
        if not offload:
            model.to(device)
            return
        for parameter in model.parameters():
            home = parameter.data.cpu()
            self._homes[parameter] = home.pin_memory() if device.type == "cuda" else home
            parameter.data = self._homes[parameter]
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)

    @contextmanager
    def _loaded(self, blocks: range) -> Iterator[None]:
        """The parameters of a stage, and those outside of stages, on the device."""
        if not self._offload:
            yield
            return
        parameters = [*self._outside]
        for number in blocks:
            parameters += self._blocks[number].parameters()
        for parameter in parameters:
            parameter.data = self._homes[parameter].to(self._device)
            self.bytes_moved += parameter.nbytes
        yield
        for parameter in parameters:
            parameter.data = self._homes[parameter]
            if parameter.grad is not None:
                self.bytes_moved += parameter.grad.nbytes
                parameter.grad = parameter.grad.cpu()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Activations in host memory, as torch does it."""
        if not self._offload:
            yield
            return
        with torch.autograd.graph.save_on_cpu(pin_memory=self._device.type == "cuda"):
            yield

    def backward(self, micro_batches: Sequence[dict[str, Any]]) -> float:
        """The passes of a step; returns the mean loss."""
        passed: list[Any] = [None] * len(micro_batches)
        ends: list[list[Any]] = []
        grads: list[Tensor | None] = [None] * len(micro_batches)
        total = 0.0
        for stage in self._stages:
            outputs: list[Any] = []
            with self._loaded(stage):
                for number, batch in enumerate(micro_batches):
                    with self._saving():
                        out = self._forward(stage, number, batch, passed[number], grads)
                    if stage.stop == len(self._blocks):
                        loss = out.loss / len(micro_batches)
                        total += loss.item()
                        outputs.append(loss)
                    else:
                        outputs.append(out)
                        passed[number] = out.detach()
                if stage.stop == len(self._blocks):
                    for loss in outputs:
                        loss.backward()
            ends.append(outputs)
        for stage, outputs in list(zip(self._stages, ends, strict=True))[-2::-1]:
            with self._loaded(stage):
                for number, out in enumerate(outputs):
                    grad, grads[number] = grads[number], None
                    torch.autograd.backward([out], [grad])
                    outputs[number] = None
        return total

    def _forward(
        self, stage: range, number: int, batch: Any, hidden: Tensor | None, grads: list[Any]
    ) -> Any:
        def receive(grad: Tensor) -> None:
            grads[number] = grad

        incoming = None if hidden is None else Passing([entering(hidden, receive)])
        result = self._blocks.run(stage, incoming, lambda: self._model(**batch))
        return result.tensors[0] if isinstance(result, Passing) else result

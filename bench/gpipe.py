"""Baselines for training in stages: a plain model, and torch's AdamW.

- GPipe: everything is on the device.
- GPipe with offload: weights, gradients and optimizer states of blocks are in host memory. The
  weights of a stage are copied before it computes, and it waits for them; gradients are copied
  after it. What is outside of blocks, such as the embedding, stays on the device.
- As in Mobius: the same, but all weights of the next stage are copied while a stage computes, the
  experts in any order, and its gradients while the next one computes.

On one GPU, for transformers models and GPT-MoE.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from overspill.models.stages.blocks import Passing, StagedBlocks, entering


@dataclass
class _Loaded:
    """Weights of a stage on the device, or on their way."""

    parameters: list[nn.Parameter]
    tensors: list[Tensor]
    arrived: Any


class GPipe:
    """All micro-batches pass a stage before the next one."""

    def __init__(
        self,
        model: Any,
        stages: Sequence[range],
        device: torch.device,
        offload: bool,
        overlap: bool = False,
    ) -> None:
        """`overlap` copies beside compute."""
        self._model, self._stages, self._device, self._offload = model, stages, device, offload
        self._blocks = StagedBlocks(model)
        self._homes: dict[nn.Parameter, Tensor] = {}
        self._grads: dict[nn.Parameter, Tensor] = {}  # in host memory
        self._next: tuple[range, _Loaded] | None = None
        cuda = device.type == "cuda"
        self._copies = torch.cuda.Stream() if cuda and overlap else None
        self._overlap = overlap
        self._pinned = cuda
        self.bytes_moved = 0
        model.to(device)
        for number in range(len(self._blocks)) if offload else ():
            for parameter in self._blocks[number].parameters():
                home = parameter.data.cpu()
                self._homes[parameter] = home.pin_memory() if cuda else home
                parameter.data = self._homes[parameter]

    # -- weights and gradients ------------------------------------------------------------------

    def _load(self, blocks: range) -> _Loaded:
        """Begins to copy the parameters of a stage."""
        parameters = [p for number in blocks for p in self._blocks[number].parameters()]
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            tensors = [
                self._homes[parameter].to(self._device, non_blocking=self._overlap)
                for parameter in parameters
            ]
            arrived = None if self._copies is None else torch.cuda.current_stream().record_event()
        self.bytes_moved += sum(parameter.nbytes for parameter in parameters)
        return _Loaded(parameters, tensors, arrived)

    @contextmanager
    def _loaded(self, blocks: range, following: range | None = None) -> Iterator[None]:
        """Hold the parameters of a stage on the device within the block; meanwhile copy those of
        the `following` one."""
        if not self._offload:
            yield
            return
        known, self._next = self._next, None
        loaded = known[1] if known is not None and known[0] == blocks else self._load(blocks)
        if loaded.arrived is not None:
            torch.cuda.current_stream().wait_event(loaded.arrived)
        for parameter, tensor in zip(loaded.parameters, loaded.tensors, strict=True):
            if self._copies is not None:
                tensor.record_stream(torch.cuda.current_stream())
            parameter.data = tensor
        if self._overlap and following is not None:
            self._next = following, self._load(following)
        yield
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream())
        for parameter in loaded.parameters:
            parameter.data = self._homes[parameter]
            if parameter.grad is not None:
                self._unload(parameter, parameter.grad)

    def _unload(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Copies a gradient to host memory; `backward` waits for it at the end."""
        self.bytes_moved += grad.nbytes
        if parameter not in self._grads:
            self._grads[parameter] = torch.empty(
                grad.shape, dtype=grad.dtype, pin_memory=self._pinned
            )
        host = self._grads[parameter]
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            host.copy_(grad, non_blocking=self._overlap)
            if self._copies is not None:
                grad.record_stream(self._copies)
        parameter.grad = host

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Activations in host memory, as torch does it."""
        if not self._offload:
            yield
            return
        with torch.autograd.graph.save_on_cpu(pin_memory=self._pinned):
            yield

    # -- passes ---------------------------------------------------------------------------------

    def backward(self, micro_batches: Sequence[dict[str, Any]]) -> float:
        """The passes of a step; returns the mean loss."""
        count, stages, total = len(micro_batches), self._stages, 0.0
        passed: list[Passing | None] = [None] * count
        # by stage and micro-batch: outputs of a stage, and their gradients
        ends: list[list[list[Tensor]]] = [[] for _ in stages]
        grads: list[list[dict[int, Tensor]]] = [[{} for _ in micro_batches] for _ in stages]
        for place, stage in enumerate(stages):
            last = place == len(stages) - 1
            after = stages[place - 1 if last else place + 1] if len(stages) > 1 else None
            with self._loaded(stage, after):
                for number, batch in enumerate(micro_batches):
                    with self._saving():
                        incoming = _enter(passed[number], grads[place - 1][number])
                        result = self._run(stage, incoming, batch)
                    if last:
                        loss = result.loss / count
                        total += loss.item()
                        ends[place].append([loss])
                    else:
                        ends[place].append(list(result.tensors))
                        passed[number] = Passing([t.detach() for t in result.tensors])
                for (loss,) in ends[place] if last else ():
                    loss.backward()
        for place in range(len(stages) - 2, -1, -1):
            # the weights of the first stage are updated before they are used again
            with self._loaded(stages[place], stages[place - 1] if place else None):
                for number, outputs in enumerate(ends[place]):
                    back = grads[place][number]
                    kept = [n for n in range(len(outputs)) if n in back]
                    torch.autograd.backward([outputs[n] for n in kept], [back[n] for n in kept])
                    outputs.clear()
                    back.clear()
        if self._copies is not None:
            self._copies.synchronize()
        return total

    def _run(self, stage: range, incoming: Passing | None, batch: dict[str, Any]) -> Any:
        return self._blocks.run(stage, incoming, lambda: self._model(**batch))


def _enter(passed: Passing | None, grads: dict[int, Tensor]) -> Passing | None:
    """The input of a stage; a backward leaves its gradients in `grads`."""
    if passed is None:
        return None

    def entered(number: int, tensor: Tensor) -> Tensor:
        return entering(tensor, lambda grad: grads.__setitem__(number, grad))

    return Passing([entered(number, tensor) for number, tensor in enumerate(passed.tensors)])

"""Memory of the resident experts, which live on the compute device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from overspill.optim.arguments import RecordState
from overspill.tiers.layout import RecordLayout
from overspill.transfer.streams import Inject, StreamEvent, record_event, wait_event


@dataclass
class LayerRecords:
    """The records of a layer's resident experts: row `position` of each tensor."""

    weights: Tensor
    states: dict[str, Tensor] = field(default_factory=dict)
    grads: Tensor | None = None  # kept gradients

    @property
    def nbytes(self) -> int:
        tensors = [self.weights, *self.states.values(), self.grads]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def record(self, experts: slice, elements: slice) -> RecordState:
        """Some elements of the records of some experts, as rows."""
        low = self.states.get("low")
        return RecordState(
            self.weights[experts, elements],
            None if low is None else low[experts, elements],
            self.states["exp_avg"][experts, elements],
            self.states["exp_avg_sq"][experts, elements],
        )


class Residents:
    """The first `counts[layer]` experts of each layer live on the compute device: their
    weights and optimizer states are there and nowhere else.

    The experts of a layer are adjacent in memory, so that they compute and are updated as one. The
    store changes `counts`; there may be memory for more experts.
    """

    def __init__(self, counts: Sequence[int], layout: RecordLayout, device: torch.device) -> None:
        self.counts = counts
        self.layout = layout
        self.device = device
        self.has_states = False
        self._layers = [
            LayerRecords(self._zeros(count, *layout.stored_in(layer)))
            for layer, count in enumerate(counts)
        ]
        self._stream: torch.cuda.Stream | None = None  # of updates beside computation
        self._updated: dict[int, StreamEvent | None] = {}  # the last of these updates, by layer

    def __len__(self) -> int:
        """The number of layers."""
        return len(self._layers)

    def __getitem__(self, layer: int) -> LayerRecords:
        """The records of a layer, for which the current stream waits if they are being updated."""
        if layer in self._updated:
            event = self._updated[layer]
            if event is None:  # an interrupt came before it was recorded
                torch.cuda.current_stream(self.device).wait_stream(self._side_stream())
            else:
                wait_event(self.device, event)
        return self._layers[layer]

    def _side_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def update_beside(
        self, layer: int, updates: Sequence[Callable[[LayerRecords], None]], inject: Inject | None
    ) -> None:
        """Updates of a layer's records that run beside compute, one after another, until the
        records are needed. Each begins with an upload. On a CPU they run at once, unless `inject`
        defers them."""
        records = self._layers[layer]
        if self.device.type != "cuda":
            for update in updates:
                defer = None if inject is None else inject("upload")
                if defer is None:
                    update(records)
                else:
                    self._updated[layer] = event = StreamEvent()
                    event.event = defer(partial(update, records))
            return
        stream = self._side_stream()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        self._updated[layer] = None
        with torch.cuda.stream(stream):
            for update in updates:
                if inject is not None:
                    inject("upload")
                update(records)
            self._updated[layer] = record_event(self.device)

    def _zeros(self, count: int, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, numel, dtype=dtype, device=self.device)

    def allocate_states(self, state_dtype: torch.dtype) -> None:
        """Allocate the optimizer states, once."""
        if not self.has_states:
            self.layout = replace(self.layout, state_dtype=state_dtype)
            for layer in self._layers:
                for section in self.layout.sections:
                    size = len(layer.weights), self.layout.shape.numel
                    layer.states[section.name] = self._zeros(*size, section.dtype)
            self.has_states = True

    def grads(self, layer: int, count: int) -> Tensor:
        """Memory for the kept gradients of the first `count` experts of a layer, allocated when it
        is needed."""
        records = self[layer]
        if records.grads is None or len(records.grads) < count:
            records.grads = None  # first: not both at once
            records.grads = self._zeros(count, self.layout.shape.numel, self.layout.dtype)
        return records.grads

    def release_grads(self) -> None:
        for records in self._layers:
            records.grads = None

    def resize(self, layer: int, count: int) -> None:
        """Make room for `count` experts of a layer; experts that stay keep their records. Tensor by
        tensor, to need as little memory as possible. Kept gradients are lost."""
        records = self[layer]
        records.grads = None
        records.weights = self._resized(records.weights, count)
        for name, state in records.states.items():
            records.states[name] = self._resized(state, count)

    def _resized(self, tensor: Tensor, count: int) -> Tensor:
        if self.device.type == "cuda":
            # gives unused memory back, so that the next allocation gets memory of just its size: in
            # a part of a larger piece it would make the rest useless for anything as large
            torch.cuda.empty_cache()
        new = self._zeros(count, tensor.shape[1], tensor.dtype)
        common = min(count, len(tensor))
        new[:common] = tensor[:common]
        return new

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers)

    def wait(self) -> None:
        """Wait for everything that the device computes."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        else:
            for event in self._updated.values():
                assert event is not None
                event.wait()
        self._updated.clear()

    def close(self) -> None:
        # new tensors: a slice would keep all of the memory
        numel, dtype = self.layout.stored
        empty = torch.empty(0, numel, dtype=dtype)
        self._layers = [LayerRecords(empty) for _ in self._layers]

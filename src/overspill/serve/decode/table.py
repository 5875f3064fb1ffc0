"""Addresses of experts on the device, for decoding steps that find them without the host."""

import numpy as np
import torch

from overspill.compute.activation import Activation, form_of
from overspill.compute.activation_form import Form
from overspill.compute.decode.constants import ABSENT
from overspill.compute.decode.low_rank import low_rank_records
from overspill.compute.decode.packing import PackedRecords, packed_records, why_not_packed
from overspill.compute.record_format import layer_formats
from overspill.moe.engine import Engine
from overspill.plan.eviction import Mask
from overspill.serve.decode.staging import Staging

_COPIES = 4
"""Tables in pinned memory: more than there are steps whose copy may not have ended."""


class ExpertTable:
    """A number for each expert in memory of the device: the offset of its weights, or `ABSENT`.
    Changes are made on the host and take effect for the steps after `apply`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        shape = engine.n_layers, engine.n_experts
        # aligned like records
        self.base = torch.empty(64, dtype=engine.layout.stored[1], device=engine.device)
        """Offsets are relative to it, in elements."""
        self._formats = layer_formats(engine.layout.format, engine.n_layers)
        """Of each layer, if experts are packed."""
        self.low_rank = low_rank_records(engine.layout, self.base)
        """How kernels read the low-rank parts of experts; None if they have none."""
        self._packed: dict[tuple[int, Form], PackedRecords] = {}
        self.offsets = torch.full(shape, ABSENT, device=engine.device)
        self.pinned = torch.full(shape, ABSENT, device=engine.device)
        """Where experts are in host memory, as the device finds them."""
        self._numbers = np.full(shape, ABSENT)
        count = engine.n_layers * engine.n_experts
        self._staging = [Staging(count, engine.device) for _ in range(_COPIES)]
        self._changed = True

    @property
    def present(self) -> Mask:
        """Which experts are on the device, by layer and id."""
        present: Mask = self._numbers != ABSENT
        return present

    def why_not_packed(self, activation: Activation | None) -> str | None:
        """Why kernels cannot read packed experts; None if they can, or need not."""
        form = form_of(activation, self._engine.shape.gated)
        if form is None:
            return None
        reasons = (why_not_packed(format, form) for format in self._formats)
        return next((reason for reason in reasons if reason is not None), None)

    def packed(self, layer: int, form: Form) -> PackedRecords | None:
        """How kernels read the packed experts of a layer, which have this activation; None if
        experts are plain."""
        if not self._formats:
            return None
        if (layer, form) not in self._packed:
            self._packed[layer, form] = packed_records(self._formats[layer], form, self.base)
        return self._packed[layer, form]

    def set(self, layer: int, expert: int, address: int | None) -> None:
        self._numbers[layer, expert] = self._offset(address)
        self._changed = True

    def _offset(self, address: int | None) -> int:
        if not address:
            return ABSENT
        return (address - self.base.data_ptr()) // self.base.element_size()

    def set_all(self, addresses: list[list[int | None]]) -> None:
        for layer, row in enumerate(addresses):
            for expert, address in enumerate(row):
                self.set(layer, expert, address)

    def set_pinned(self, addresses: list[list[int]]) -> None:
        """The addresses in host memory of all experts that are there; 0 for the others."""
        offsets = [[self._offset(address) for address in row] for row in addresses]
        self.pinned.copy_(torch.tensor(offsets))

    def apply(self) -> None:
        """The steps that follow on the current stream see the changes."""
        if self._changed:
            self._staging.append(self._staging.pop(0))
            self._staging[-1].host.numpy()[:] = self._numbers.reshape(-1)
            self._staging[-1].copy_to(self.offsets.view(-1))
            self._changed = False

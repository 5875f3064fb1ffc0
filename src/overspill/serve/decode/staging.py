"""Numbers that the host writes for the next steps."""

import torch
from torch import Tensor

from overspill.transfer.mapped import can_map, on_device


class Staging:
    """Whole numbers in pinned memory, on their way to the device. A kernel copies them where that
    is possible: the copy engine would let them wait for the experts that it uploads."""

    def __init__(self, length: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        with torch.inference_mode(False):  # they outlive it
            self.host = torch.zeros(length, dtype=torch.int64, pin_memory=on_gpu)
            self._mapped: Tensor | None = None
            if on_gpu and can_map(device):
                self._mapped = on_device(self.host.view(torch.uint8), device).view(torch.int64)
        self._parts: dict[tuple[int, int], Tensor] = {}  # as the device sees them

    def copy_to(self, memory: Tensor, first: int = 0) -> None:
        """Copy the numbers from `first` on to `memory` on the current stream, as many as it has
        room for. They must not change before the copy has ended."""
        place = first, len(memory)
        source = self._parts.get(place)
        if source is None:
            whole = self.host if self._mapped is None else self._mapped
            source = self._parts[place] = whole[first : first + len(memory)]
        if self._mapped is None:
            memory.copy_(source, non_blocking=True)
        else:
            torch.bitwise_or(source, 0, out=memory)

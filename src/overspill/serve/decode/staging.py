"""Numbers that the host writes for the next steps."""

import torch
from torch import Tensor

from overspill.transfer.mapped import can_map, on_device


class Staging:
    """Whole numbers in pinned memory. A kernel copies them to the device where that is possible:
    the copy engine would let them wait for the experts that it uploads."""

    def __init__(self, length: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        with torch.inference_mode(False):  # they outlive it
            self.host = torch.zeros(length, dtype=torch.int64, pin_memory=on_gpu)
            self._mapped: Tensor | None = None
            if on_gpu and can_map(device):
                self._mapped = on_device(self.host.view(torch.uint8), device).view(torch.int64)

    def copy_to(self, memory: Tensor) -> None:
        """The first numbers, on the current stream; they must not change before it has done it."""
        count = len(memory)
        if self._mapped is None:
            memory.copy_(self.host[:count], non_blocking=True)
        else:
            torch.bitwise_or(self._mapped[:count], 0, out=memory)

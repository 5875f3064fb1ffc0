"""Memory to measure with: so much of it that no cache holds what comes next."""

from pathlib import Path

import torch
from torch import Tensor

from overspill.core.sizes import round_up
from overspill.hardware.machine import available_memory
from overspill.tiers.layout import ALIGN
from overspill.tiers.slab import HostSlab

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_LEAST, _MOST = 256 << 20, 1 << 30
_PATTERN = 1 << 20


class Pool:
    """Rows of host memory, given in turn."""

    def __init__(self, rows: int, row_bytes: int, pinned: bool) -> None:
        self._slab = HostSlab("measuring", rows, round_up(row_bytes, ALIGN), pinned)
        self._next = 0

    def close(self) -> None:
        self._slab.close()

    def take(self) -> Tensor:
        """The row that was given longest ago."""
        row = self._slab[self._next]
        self._next = (self._next + 1) % len(self._slab)
        return row

    @property
    def rows(self) -> Tensor:
        return self._slab.rows


def cold_bytes() -> int:
    """Three times the last cache, within what may be taken for a moment."""
    wanted = min(max(_LEAST, 3 * last_cache()), _MOST)
    return min(wanted, available_memory() // 8)


def last_cache(folder: Path = _CACHES) -> int:
    """Bytes of the largest cache of a core; 0 where the system does not tell."""
    sizes = [0]
    for file in folder.glob("index*/size"):
        text = file.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes)


def fill_with_noise(into: Tensor, scale: float) -> None:
    """Small random numbers of its dtype: zeros would be faster than weights on some machines, and
    numbers too small to be normal slower. A million of them, over and over."""
    flat = into.view(-1)
    size = min(_PATTERN, flat.numel())
    own = torch.Generator().manual_seed(0)  # whoever offloads a model has his own in use
    pattern = (torch.randn(size, generator=own) * scale).to(into.dtype)
    whole = flat.numel() // size
    flat[: whole * size].view(whole, size).copy_(pattern)
    flat[whole * size :] = pattern[: flat.numel() - whole * size]

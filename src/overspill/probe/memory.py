"""Memory for measurements, larger than the caches."""

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


def buffers(count: int, size: int, pinned: bool) -> HostSlab:
    return HostSlab("measuring", count, round_up(size, ALIGN), pinned)


def cold_bytes() -> int:
    """Three times the last-level cache, at most an eighth of the free memory."""
    wanted = min(max(_LEAST, 3 * last_cache()), _MOST)
    return min(wanted, available_memory() // 8)


def last_cache(folder: Path = _CACHES) -> int:
    """Bytes of the largest cache of a core; 0 if unknown."""
    sizes = [0]
    for file in folder.glob("index*/size"):
        text = file.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes)


def fill_with_noise(into: Tensor, scale: float) -> None:
    """Fills with a repeated pattern of random numbers: on some machines zeros are faster than
    weights, and denormal numbers slower."""
    flat = into.view(-1)
    size = min(_PATTERN, flat.numel())
    own = torch.Generator().manual_seed(0)  # the global generator is the user's
    pattern = (torch.randn(size, generator=own) * scale).to(into.dtype)
    whole = flat.numel() // size
    flat[: whole * size].view(whole, size).copy_(pattern)
    flat[whole * size :] = pattern[: flat.numel() - whole * size]

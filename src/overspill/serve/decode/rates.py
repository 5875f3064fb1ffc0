"""Who reads experts in host memory faster: the CPU, which computes them there, or the device."""

from typing import NamedTuple

import torch

from overspill.hardware.profile import read_profile, this_machine


class ReadRates(NamedTuple):
    """Bytes a second."""

    cpu: float
    link: float

    @property
    def link_share(self) -> int:
        """Sixteenths that the device reads over the link while the CPU reads the rest, so that both
        end at the same time."""
        return round(16 * self.link / (self.cpu + self.link))


_TYPICAL = ReadRates(cpu=120e9, link=55e9)
"""Of a server with PCIe 5 and 16 cores."""


def read_rates(device: torch.device) -> ReadRates:
    """As `overspill probe` has measured them on this machine; typical ones if it has not."""
    if device.type != "cuda":
        return _TYPICAL
    limits = read_profile(machine=this_machine()).limits
    if limits is None:
        return _TYPICAL
    return ReadRates(limits.host_read, limits.link)

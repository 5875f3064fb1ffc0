"""The rates at which the CPU and the device read experts in host memory."""

from typing import NamedTuple

import torch

from overspill.hardware.profile import read_profile, this_machine


class ReadRates(NamedTuple):
    """Rates of reads of host memory, in bytes per second."""

    cpu: float
    link: float

    @property
    def link_share(self) -> int:
        """Sixteenths of the bytes that the device reads over the link while the CPU reads the
        others, so that both end at the same time."""
        return round(16 * self.link / (self.cpu + self.link))


_TYPICAL = ReadRates(cpu=120e9, link=55e9)
"""Rates of a server with PCIe 5 and 16 cores."""


def read_rates(device: torch.device) -> ReadRates:
    """Return the rates that `overspill probe` has measured on this machine, or typical ones."""
    if device.type != "cuda":
        return _TYPICAL
    limits = read_profile(machine=this_machine()).limits
    if limits is None:
        return _TYPICAL
    return ReadRates(limits.host_read, limits.link)

"""What is known of this machine: read from its profile, or measured and written there."""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from overspill.core.experts import ExpertShape
from overspill.hardware.profile import (
    ExpertCosts,
    MachineProfile,
    Profile,
    profile_file,
    read_profile,
    this_machine,
    write_profile,
)
from overspill.probe.experts import dtype_name, measure_expert
from overspill.probe.measure import measure_disk, measure_machine
from overspill.tiers.slab import Progress

_log = logging.getLogger("overspill")


def known_costs(
    shape: ExpertShape,
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
    progress: Progress | None = None,
) -> ExpertCosts:
    """What an expert costs on this machine; measured in a few seconds the first time."""
    return Known(device, threads).costs(shape, dtype, progress)


class Known:
    """The profile of this machine with `threads` cores at work. `again`: nothing in it is taken
    as known."""

    def __init__(self, device: torch.device, threads: int, again: bool = False) -> None:
        self._device = device
        self._threads = threads
        self._again = again
        machine = this_machine(device.type)
        self.file = profile_file(machine)
        self.profile = read_profile(self.file, machine)
        self.measured = False
        """Whether anything had to be."""

    def costs(
        self, shape: ExpertShape, dtype: torch.dtype, progress: Progress | None = None
    ) -> ExpertCosts:
        known = self.profile.costs(shape, dtype_name(dtype), self._threads)
        if known is not None and not self._again:
            return known
        costs = measure_expert(shape, dtype, self._device, self._threads, progress)
        self._keep(self.profile.with_costs(costs))
        return costs

    def limits(self, disk: Path | None = None, progress: Progress | None = None) -> MachineProfile:
        """Those of the disk too if a folder on it is given, and then always measured: nobody knows
        whether it was this disk before."""
        known = self.profile.limits
        if known is None or known.cores != self._threads or self._again:
            limits = measure_machine(self._device, self._threads, disk, progress)
            if disk is None and known is not None:
                limits = replace(limits, ssd_read=known.ssd_read, ssd_write=known.ssd_write)
        elif disk is None:
            return known
        else:
            ssd_read, ssd_write = measure_disk(disk)
            limits = replace(known, ssd_read=ssd_read, ssd_write=ssd_write)
        self._keep(replace(self.profile, limits=limits))
        return limits

    def _keep(self, profile: Profile) -> None:
        self.profile = profile
        self.measured = True
        try:
            write_profile(profile, self.file)
        except OSError as error:
            _log.warning("the profile %s cannot be written (%s) and is not kept", self.file, error)
            return
        if is_temporary(self.file):
            _log.warning("there is no folder to keep the profile in; it is gone after this process")


def is_temporary(file: Path) -> bool:
    """Whether the cache folder is one for this process only, because the usual is not writable."""
    return file.parent.name != "overspill"

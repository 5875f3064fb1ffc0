"""The profile of this machine: read from its file, or measured and written there."""

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
from overspill.probe.measure import measure_machine
from overspill.tiers.slab import Progress

_log = logging.getLogger("overspill")


def known_costs(
    shape: ExpertShape,
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
    progress: Progress | None = None,
) -> ExpertCosts:
    """The costs of an expert on this machine; the first time they are measured in a few seconds."""
    return Known(device, threads).costs(shape, dtype, progress)


class Known:
    """The profile of this machine for `threads` cores. `again`: ignores stored measurements."""

    def __init__(self, device: torch.device, threads: int, again: bool = False) -> None:
        self._device = device
        self._threads = threads
        self._again = again
        machine = this_machine(device.type)
        self.file = profile_file(machine)
        self.profile = read_profile(self.file, machine)
        self.measured = False
        """Whether anything was measured."""

    def costs(
        self, shape: ExpertShape, dtype: torch.dtype, progress: Progress | None = None
    ) -> ExpertCosts:
        known = self.profile.costs(shape, dtype_name(dtype), self._threads)
        if known is not None and not self._again:
            return known
        costs = measure_expert(shape, dtype, self._device, self._threads, progress)
        self._keep(self.profile.with_costs(costs))
        return costs

    def limits(self, progress: Progress | None = None) -> MachineProfile:
        known = self.profile.limits
        if known is not None and known.cores == self._threads and not self._again:
            return known
        limits = measure_machine(self._device, self._threads, progress)
        self._keep(replace(self.profile, limits=limits))
        return limits

    def _keep(self, profile: Profile) -> None:
        self.profile = profile
        self.measured = True
        try:
            write_profile(profile, self.file)
        except OSError as error:
            _log.warning("the profile %s cannot be written (%s)", self.file, error)
            return
        if is_temporary(self.file):
            _log.warning("no cache folder is writable: the profile is lost at exit")


def is_temporary(file: Path) -> bool:
    """Whether the profile is in a folder that is removed at exit."""
    return file.parent.name.startswith("overspill-tmp-")

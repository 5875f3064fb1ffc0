"""Access to the records of experts: weights and optimizer states, for loading and checkpoints."""

import abc
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from overspill.core.expert_map import ExpertMap
from overspill.core.experts import ExpertId
from overspill.tiers.layout import RecordLayout


class ExpertRecords(abc.ABC):
    """Reads and writes whole records by global expert id, while no step is running."""

    def __init__(self, n_layers: int, experts: ExpertMap) -> None:
        self.n_layers = n_layers
        self.experts = experts
        self._saved_to: Path | None = None

    @property
    @abc.abstractmethod
    def layout(self) -> RecordLayout: ...

    @property
    def weights_bytes(self) -> int:
        return self.n_layers * self.experts.n_local * self.layout.weight_bytes

    def ids(self) -> Iterator[ExpertId]:
        """All local experts, lowest layer first."""
        for layer in range(self.n_layers):
            for global_id in self.experts.local_ids:
                yield ExpertId(layer, global_id)

    @property
    def saved_to(self) -> Path | None:
        """The folder that holds the current weights, if one does."""
        return self._saved_to

    def mark_saved(self, folder: Path) -> None:
        """The current weights were written to `folder`."""
        self._saved_to = folder

    def mark_changed(self) -> None:
        """The weights differ from those in any folder."""
        self._saved_to = None

    @abc.abstractmethod
    def fill(
        self, fill: Callable[[ExpertId, Tensor], None], workers: int = 1, on_host: bool = False
    ) -> None:
        """Before the first use: lets `fill` write the flat weights [numel] of every expert in
        place, in `workers` threads. Experts on disk, and with `on_host` those on the device, are
        written through a host buffer."""

    @abc.abstractmethod
    def read_weights(self, expert: ExpertId, out: Tensor) -> None:
        """Copies an expert's flat weights into `out` [numel]."""

    @abc.abstractmethod
    def write_weights(self, expert: ExpertId, fill: Callable[[Tensor], None]) -> None:
        """Lets `fill` write an expert's flat weights [numel] in place."""

    @abc.abstractmethod
    def read_state(self, expert: ExpertId, name: str, out: Tensor) -> None:
        """Copies one optimizer state of an expert into `out` [numel]."""

    @abc.abstractmethod
    def write_state(self, expert: ExpertId, name: str, value: Tensor) -> None:
        """Sets one optimizer state of an expert."""

"""How a layer reaches the other ranks."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from overspill.core.errors import ConfigError, OrderError
from overspill.moe.pipeline.activations import HostCopies
from overspill.parallel.exchange.choice import exchange_for
from overspill.parallel.exchange.interface import Exchange

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Link:
    """The mesh of a layer and its exchange. Copies of the layer share it."""

    def __init__(
        self, mesh: "DeviceMesh | None", exchange: Exchange | None, config: object
    ) -> None:
        """`config` must be the same on all ranks."""
        self._mesh, self._given = mesh, exchange
        self._config = repr(config)
        self._exchanges: dict[torch.device, Exchange] = {}
        self._copies: dict[torch.device, HostCopies] = {}
        self.rank, self.size = 0, 1
        if exchange is not None:
            self.rank, self.size = exchange.rank, exchange.size
        if mesh is not None:
            if mesh.ndim != 1:
                exchange_for(mesh, torch.device("cpu"))  # raises
            self.rank, self.size = mesh.get_local_rank(), mesh.size()
            if exchange is not None and exchange.size != self.size:
                raise ConfigError(
                    f"the exchange has {exchange.size} ranks, the mesh {self.size}; leave out one"
                )

    @property
    def exchanges(self) -> bool:
        """Whether token rows travel at all."""
        return self._mesh is not None or self._given is not None

    def agree_on(self, seed: int | None) -> int:
        """The same seed on all ranks, that of the first; raises if their layers differ."""
        # 62 bits from torch's generator, so that torch.manual_seed makes it repeatable
        own = seed if seed is not None else int(torch.randint(2**62, (1,), device="cpu"))
        if self._mesh is None:
            return own
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (own, self._config), group=self._mesh.get_group())
        for rank, (_, config) in enumerate(found):
            if config != found[0][1]:
                raise ConfigError(
                    f"a MoELayer must be the same on all ranks: rank 0 has {found[0][1]}, rank "
                    f"{rank} {config}"
                )
        return int(found[0][0])

    def on(self, device: torch.device) -> Exchange:
        """The exchange of tensors on a device. Must be called on all ranks."""
        if self._given is not None:
            if self._given.device.type != device.type:
                raise ConfigError(
                    f"the exchange is for {self._given.device}, and the layer is on {device}"
                )
            return self._given
        if device not in self._exchanges:
            self._exchanges[device] = exchange_for(self._mesh, device)
        return self._exchanges[device]

    def copies(self, exchange: Exchange) -> HostCopies:
        """Copies to host memory beside the exchange."""
        if exchange.device not in self._copies:
            self._copies[exchange.device] = HostCopies(
                exchange.device, exchange.recorder, exchange.inject
            )
        return self._copies[exchange.device]

    def __deepcopy__(self, memo: object) -> "Link":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.exchanges:
            raise OrderError(
                "a MoELayer with a mesh or an exchange cannot be pickled: it belongs to running "
                "processes; save layer.state_dict() and load it into a new layer"
            )
        return Link, (None, None, self._config)

"""The connection of a layer to the other ranks."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from overspill.core.errors import ConfigError, OrderError, RankError
from overspill.moe.pipeline.activations import HostCopies
from overspill.moe.pipeline.arguments import Arguments
from overspill.parallel.exchange.choice import exchange_for
from overspill.parallel.exchange.interface import Exchange

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class RankLink:
    """The mesh of a layer and its exchange. Copies of the layer share it."""

    def __init__(self, mesh: "DeviceMesh | None", exchange: Exchange | None) -> None:
        self._mesh, self._given = mesh, exchange
        self._exchanges: dict[torch.device, Exchange] = {}
        self._copies: dict[torch.device, HostCopies] = {}
        self.rank, self.size = 0, 1
        if exchange is not None:
            if not isinstance(exchange, Exchange):
                raise ConfigError(
                    f"exchange={exchange!r} must be an object of overspill.parallel.exchange"
                )
            self.rank, self.size = exchange.rank, exchange.size
        if mesh is not None:
            self._check_mesh(mesh)
            self.rank, self.size = mesh.get_local_rank(), mesh.size()

    def _check_mesh(self, mesh: "DeviceMesh") -> None:
        from torch.distributed.device_mesh import DeviceMesh

        if not isinstance(mesh, DeviceMesh):
            raise ConfigError(
                f"mesh={mesh!r} must be a DeviceMesh; make one with "
                "torch.distributed.device_mesh.init_device_mesh"
            )
        if mesh.ndim != 1:
            exchange_for(mesh, torch.device("cpu"))  # raises
        place, given = (mesh.get_local_rank(), mesh.size()), self._given
        if given is not None and (given.rank, given.size) != place:
            raise ConfigError(
                f"the exchange is for rank {given.rank} of {given.size}, the mesh has rank "
                f"{place[0]} of {place[1]}; leave out one"
            )

    @property
    def exchanges(self) -> bool:
        """Whether token rows travel at all."""
        return self._mesh is not None or self._given is not None

    def agree_on(self, arguments: Arguments) -> int:
        """Check the arguments of all ranks. Raises on all ranks if those of one are wrong, or if
        they differ. Returns the seed of the first."""
        failure: ConfigError | None = None
        try:
            arguments.check()
        except ConfigError as error:
            failure = error
        own = arguments.seed
        if own is None:  # 62 bits from torch's generator: torch.manual_seed makes it repeatable
            own = int(torch.randint(2**62, (1,), device="cpu"))
        found = self._gather((own, arguments, None if failure is None else str(failure)))
        if failure is not None:
            raise failure
        for rank, (_, other, failed) in enumerate(found):
            if failed is not None:
                raise RankError(f"the MoELayer of rank {rank} was refused there: {failed}")
            _check_same(found[0][1], other, rank)
        return int(found[0][0])

    def _gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        if self._mesh is None:
            ranks = None if self._given is None else self._given.ranks
            return [value] if ranks is None else ranks.gather(value)
        found: list[Any] = [None] * self.size
        with waiting("a new MoELayer"):
            dist.all_gather_object(found, value, group=self._mesh.get_group())
        return found

    def on(self, device: torch.device) -> Exchange:
        """The exchange of tensors on a device. Must be called on all ranks."""
        if self._given is not None:
            if not _same_device(self._given.device, device):
                raise ConfigError(
                    f"the exchange is for {self._given.device}, and the layer is on {device}; move "
                    "the layer, or make an exchange for its device"
                )
            return self._given
        if device not in self._exchanges:
            self._exchanges[device] = exchange_for(self._mesh, device)
        return self._exchanges[device]

    def copies(self, exchange: Exchange) -> HostCopies:
        """The copies to host memory beside the exchange."""
        if exchange.device not in self._copies:
            self._copies[exchange.device] = HostCopies(
                exchange.device, exchange.recorder, exchange.inject
            )
        return self._copies[exchange.device]

    def __deepcopy__(self, memo: object) -> "RankLink":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.exchanges:
            raise OrderError(
                "a MoELayer with a mesh or an exchange cannot be pickled: it belongs to running "
                "processes; save layer.state_dict() and load it into a new layer"
            )
        return RankLink, (None, None)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Around a call that waits for other ranks: says so if it fails."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            f"{what} waited for other ranks, and one of them has ended, or has not come within the "
            f"timeout of the process group; see the errors of the others ({error})"
        ) from error


def _check_same(first: Arguments, other: Arguments, rank: int) -> None:
    for name, value in dataclasses.asdict(other).items():
        if value != getattr(first, name):
            raise ConfigError(
                f"{name} of a MoELayer must be the same on all ranks: rank 0 has "
                f"{getattr(first, name)!r}, rank {rank} {value!r}"
            )


def _same_device(one: torch.device, other: torch.device) -> bool:
    indices = one.index, other.index
    return one.type == other.type and (None in indices or indices[0] == indices[1])

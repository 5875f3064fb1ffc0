"""The processes that train one model, and their collective calls.

All ranks must make the same calls in the same order. A rank that waits for another one which has
died or makes other calls fails after the timeout of the process group.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from overspill.core.errors import ConfigError, RankError
from overspill.transfer.streams import to_host

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Ranks:
    """The ranks of a mesh. Token rows and gradients travel through the group of the mesh, numbers
    that the host needs through gloo.

    The dimensions of a mesh are ("expert",), or ("data", "expert") for several nodes, either one
    with "stage" before "expert". Ranks along "expert" divide the experts of a layer, and token rows
    are exchanged among them alone. Ranks along "data" are replicas: they hold the same experts.
    Ranks along "stage" divide the layers. All ranks have all dense parameters.
    """

    def __init__(self, mesh: "DeviceMesh", device: torch.device, line: bool = False) -> None:
        """`line` ignores the names of the dimensions."""
        names = ("expert",) if line else _dimensions(mesh)
        self._node: Ranks | None = None
        self.replicas: Ranks | None = None
        """The ranks that hold the experts of this one, itself included; None: no other does."""
        self.stages: Ranks | None = None
        """The ranks that divide the layers with this one, itself included; None: none do."""
        if len(names) > 1 or names == ("stage",):
            self._node = Ranks(mesh["expert"] if "expert" in names else _alone(mesh), device, True)
        if "data" in names and mesh["data"].size() > 1:
            self.replicas = Ranks(mesh["data"], device, True)
        if "stage" in names and mesh["stage"].size() > 1:
            self.stages = Ranks(mesh["stage"], device, True)
        self._group, self.device_type = _group_of(mesh), mesh.device_type
        self.rank: int = dist.get_rank(self._group)
        self.size: int = dist.get_world_size(self._group)
        self._calls = 0
        backends = dist.get_backend_config(self._group)
        # gloo sends from host memory
        self.through_host = device.type == "cuda" and "cuda:nccl" not in backends
        """Whether tensors of the device travel through host memory."""
        self._host_group = self._group
        if "cpu:gloo" not in backends:
            self._host_group = self.new_group()

    def new_group(self, backend: str = "gloo") -> dist.ProcessGroup:
        """Another group of the same ranks. Called by all of them."""
        members = dist.get_process_group_ranks(self._group)
        return dist.new_group(members, backend=backend, use_local_synchronization=True)

    @property
    def node(self) -> "Ranks":
        """The ranks that divide the experts: all, or those of one node."""
        return self if self._node is None else self._node

    @property
    def n_stages(self) -> int:
        """The number of ranks that divide the layers."""
        return 1 if self.stages is None else self.stages.size

    @property
    def on_machine(self) -> int:
        """The number of ranks that share a machine: they divide the experts and the layers."""
        return self.node.size * self.n_stages

    @property
    def copies(self) -> int:
        """The number of ranks that hold each expert."""
        return 1 if self.replicas is None else self.replicas.size

    @property
    def writes_experts(self) -> bool:
        """Whether checkpoints get the experts of this rank, and not those of a replica."""
        return self.replicas is None or self.replicas.rank == 0

    @property
    def calls(self) -> int:
        """Grows by one when a call to other ranks begins and by one when it ends: an odd number
        means that this rank waits for others."""
        parts = (self._node, self.replicas, self.stages)
        return self._calls + sum(ranks.calls for ranks in parts if ranks is not None)

    def line(self) -> "DeviceMesh":
        """All ranks as a mesh of one dimension."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self._group, self.device_type)

    # -- tensors of the compute device --------------------------------------------------------

    def all_to_all_into(
        self, out: Tensor, rows: Tensor, sent: list[int], received: list[int]
    ) -> None:
        """Send the first `sent[0]` rows to rank 0, the next to rank 1, and so on; received rows
        come into `out`, in the order of their ranks. The group must be able to send both
        tensors."""
        with self.calling():
            dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self._group)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over ranks: the same bits on all. `tensor` may be changed."""
        total = to_host(tensor) if self.through_host else tensor
        with self.calling():
            dist.all_reduce(total, group=self._group)
        return total.to(tensor.device, non_blocking=True)

    def total_of_batch(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that divide a batch: not over those along stages, which compute
        the same part of it. `tensor` may be changed."""
        for ranks in (self.node, self.replicas):
            if ranks is not None and ranks.size > 1:
                tensor = ranks.total(tensor)
        return tensor

    # -- from one rank to another -------------------------------------------------------------

    def global_rank(self, rank: int) -> int:
        """The number of a rank among all processes."""
        return int(dist.get_global_rank(self._group, rank))

    # -- numbers of the host ------------------------------------------------------------------

    def gather_numbers(self, numbers_N: Tensor) -> Tensor:
        """The numbers of each rank, as many on all, [ranks, N]."""
        out = numbers_N.new_empty(self.size, len(numbers_N))
        with self.calling():
            dist.all_gather(list(out.unbind()), numbers_N, group=self._host_group)
        return out

    def sums(self, values: Sequence[float]) -> list[float]:
        """The sum over ranks of each value."""
        totals = torch.tensor(values, dtype=torch.float64)
        with self.calling():
            dist.all_reduce(totals, group=self._host_group)
        return [float(total) for total in totals.tolist()]

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """The largest over ranks of each number."""
        most = torch.tensor(numbers, dtype=torch.int64)
        with self.calling():
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self._host_group)
        return [int(number) for number in most.tolist()]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        found = [value] * self.size
        with self.calling():
            dist.all_gather_object(found, value, group=self._host_group)
        return found

    def meet(self, what: str, seconds: float = 120.0) -> None:
        """Raise if not all ranks do `what` within some time. For calls that users easily make on
        one rank alone."""
        try:
            dist.monitored_barrier(
                self._host_group, timedelta(seconds=seconds), wait_all_ranks=True
            )
        except RuntimeError as error:
            raise RankError(
                f"{what} must be called on all ranks; rank {self.rank} has waited {seconds:g} s "
                f"for others ({str(error).splitlines()[0]})"
            ) from error

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Raise on all ranks if a fact is not the same on all."""
        for rank, other in enumerate(everyone := self.gather(dict(facts))):
            for name, value in everyone[0].items():
                if other.get(name) != value:
                    raise ConfigError(
                        f"{name} must be the same on all ranks: rank 0 has {value}, rank {rank} "
                        f"{other.get(name)}"
                    )

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[Callable[[], None]]:
        """Make a block fail on all ranks or on none: if one fails, the others raise RankError at
        the end of the block, or where they call the function that is yielded. Call it before ranks
        wait for each other in another way, and before steps that cannot be undone."""
        known = False  # whether all ranks know of a failure

        def agree() -> None:
            nonlocal known
            known = True
            self._report(what, None)
            known = False

        try:
            yield agree
        except Exception as error:
            if not known:
                with contextlib.suppress(RuntimeError):  # the cause may be that a rank is gone
                    self._report(what, f"{type(error).__name__}: {error}")
            raise
        agree()

    def _report(self, what: str, failure: str | None) -> None:
        (failed,) = self.largest([failure is not None])
        if not failed:
            return
        failures = self.gather(failure)
        if failure is None:
            rank = next(n for n, found in enumerate(failures) if found is not None)
            name = self.global_rank(rank)
            raise RankError(f"{what} failed on rank {name}: {failures[rank]}")

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Mark the block as a wait of the main thread for other ranks."""
        self._calls += 1
        yield
        self._calls += 1


_MESHES = (
    ("expert",),
    ("stage",),
    ("data", "expert"),
    ("stage", "expert"),
    ("data", "stage", "expert"),
)


def _dimensions(mesh: "DeviceMesh") -> tuple[str, ...]:
    names = mesh.mesh_dim_names
    if mesh.ndim == 1 and names != ("stage",):
        return ("expert",)
    if names not in _MESHES:
        raise ConfigError(
            f"the mesh has {mesh.ndim} dimensions, named {names}; give one of them, or several "
            'with mesh_dim_names=("data", "expert"), ("stage", "expert") or ("data", "stage", '
            '"expert")'
        )
    return tuple(names)


def _alone(mesh: "DeviceMesh") -> "DeviceMesh":
    """This rank alone as a mesh."""
    from torch.distributed.device_mesh import DeviceMesh

    backend = dist.get_backend(mesh.get_group())
    group = dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)
    return DeviceMesh.from_group(group, mesh.device_type)


def _group_of(mesh: "DeviceMesh") -> dist.ProcessGroup:
    """The group of all ranks of a mesh."""
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    members = mesh.mesh.flatten().tolist()
    return dist.new_group(members, use_local_synchronization=True)

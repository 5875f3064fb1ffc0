"""The processes of a run: several ranks, or one process alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from overspill.core.errors import ConfigError
from overspill.moe.engine import Engine
from overspill.parallel.join import Joined

T = TypeVar("T")


class Team:
    """The ranks of a run. The first one displays, logs and chooses; all train."""

    def __init__(self, joined: Joined | None = None) -> None:
        """`joined` is None in a run of one process."""
        self._joined = joined
        self.mesh: DeviceMesh | None = None
        self.rank = 0
        self.size = 1
        self.node_size = 1
        """Ranks on this machine, which divide the model."""
        self.n_stages = 1
        """Ranks that divide the pipeline stages."""
        self.parts = 1
        """Parts into which the ranks divide a batch. Ranks along stages have the same part."""
        self.part = 0
        """Number of this rank's part."""
        self.threads: int | None = None
        """Threads of a rank that is bound to cores; None: it is not bound."""
        if joined is not None:
            ranks, self.mesh, self.threads = joined.ranks, joined.mesh, joined.threads
            self.rank, self.size, self.node_size = ranks.rank, ranks.size, ranks.on_machine
            self.n_stages = ranks.n_stages
            self.parts = ranks.size // ranks.n_stages
            node = 0 if ranks.replicas is None else ranks.replicas.rank
            self.part = node * ranks.node.size + ranks.node.rank

    @property
    def has_nodes(self) -> bool:
        """Whether there are several nodes."""
        return self.node_size < self.size

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    # -- collective calls: all ranks make them, in the same order --------------------------------

    def sums(self, values: Sequence[float]) -> list[float]:
        """The sum over ranks of each value."""
        return list(values) if self._joined is None else self._joined.ranks.sums(values)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks."""
        return [value] if self._joined is None else self._joined.ranks.gather(value)

    def gather_parts(self, value: T | None) -> list[T]:
        """The value of each part of a batch, in order. A rank gives None if another rank has the
        value of its part."""
        found = {
            part: value for part, value in self.gather((self.part, value)) if value is not None
        }
        return [found[part] for part in range(self.parts)]

    def first_decides(self, decide: Callable[[], T]) -> T:
        """The result of `decide`, which only the first rank calls."""
        return cast(T, self.gather(decide() if self.is_first else None)[0])

    def any(self, value: bool) -> bool:
        """Whether `value` is true on at least one rank."""
        return value if self._joined is None else self._joined.ranks.largest([value]) == [1]

    def check_same(self, facts: Mapping[str, str]) -> None:
        if self._joined is not None:
            self._joined.ranks.check_same(facts)

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """Let the first rank run the block before the others, which find its files. Nodes may have
        separate disks: then the first rank of each node runs the block, then the other ranks."""
        turn = 0 if self.is_first else 1 if self.rank % self.node_size == 0 else 2
        for _ in range(turn):
            self.gather(None)
        yield
        for _ in range(turn, 2):
            self.gather(None)

    # -- what each rank works on ----------------------------------------------------------------

    def own_sequences(self, batch_BS: Tensor, pieces: int) -> Tensor:
        """This rank's sequences of a batch of `pieces` micro-batches: an equal part of each."""
        length = batch_BS.shape[1]
        return batch_BS.view(pieces, self.parts, -1, length)[:, self.part].flatten(0, 1)

    def check_batch(self, batch: int) -> None:
        """Raise unless each rank gets equally many sequences of a micro-batch."""
        if batch % self.parts:
            raise ConfigError(
                f"--batch {batch} must be a multiple of the {self.parts} ranks that share it"
            )

    def own(self, items: Sequence[T]) -> tuple[Sequence[T], int]:
        """This rank's part of `items`, and the number of its items that count. All ranks must run
        the model equally often: one without a part gets the first item, which does not count."""
        each, more = divmod(len(items), self.parts)
        first = self.part * each + min(self.part, more)
        count = each + (self.part < more)
        return (items[first : first + count], count) if count else (items[:1], 0)

    def seed_step(self, seed: int, step: int) -> None:
        """Let ranks draw different random numbers, for dropout. Checkpoints have the generator of
        the first rank; the others depend on the step alone, so any number of ranks can resume."""
        if not self.is_first:
            torch.manual_seed((seed * 1_000_003 + step) * 4099 + self.rank)

    # -- the watchdog ---------------------------------------------------------------------------

    def follow(self, engine: Engine) -> None:
        """Count the calls and transfers of `engine` as progress from now on."""
        if self._joined is not None and engine.ranks is not None:
            self._joined.watchdog.follow(engine.ranks, engine.recorder.total_bytes)

    def steps(self) -> AbstractContextManager[Any]:
        """A block in which every rank makes progress; otherwise the watchdog ends all ranks."""
        return nullcontext() if self._joined is None else self._joined.watchdog.steps()

"""The processes of a run: several ranks, or one process alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from overspill.core.errors import ConfigError
from overspill.moe.engine import Engine
from overspill.parallel.join import Joined

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """The ranks of a run. The first one displays, logs and chooses; all train."""

    joined: Joined | None = None
    """None: one process."""

    @property
    def mesh(self) -> DeviceMesh | None:
        return None if self.joined is None else self.joined.mesh

    @property
    def rank(self) -> int:
        return 0 if self.joined is None else self.joined.ranks.rank

    @property
    def size(self) -> int:
        return 1 if self.joined is None else self.joined.ranks.size

    @property
    def parts(self) -> int:
        """Into how many parts ranks divide a batch. Ranks along stages have the same part."""
        return 1 if self.joined is None else self.size // self.n_stages

    @property
    def n_stages(self) -> int:
        """How many ranks divide pipeline stages."""
        return 1 if self.joined is None else self.joined.ranks.n_stages

    @property
    def part(self) -> int:
        """Which part this rank has."""
        if self.joined is None:
            return 0
        ranks = self.joined.ranks
        node = 0 if ranks.replicas is None else ranks.replicas.rank
        return node * ranks.node.size + ranks.node.rank

    @property
    def node_size(self) -> int:
        """Ranks that share a machine, and divide the model."""
        return 1 if self.joined is None else self.joined.ranks.on_machine

    @property
    def has_nodes(self) -> bool:
        """Whether there are several nodes."""
        return self.node_size < self.size

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    # -- what ranks tell each other: all must call these, in the same order ---------------------

    def sums(self, values: Sequence[float]) -> list[float]:
        """The sum over ranks of each value."""
        return list(values) if self.joined is None else self.joined.ranks.sums(values)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks."""
        return [value] if self.joined is None else self.joined.ranks.gather(value)

    def gather_parts(self, value: T | None) -> list[T]:
        """The values of all parts of a batch, in order; None: another rank has that of the part."""
        found = {
            part: value for part, value in self.gather((self.part, value)) if value is not None
        }
        return [found[part] for part in range(self.parts)]

    def first_decides(self, decide: Callable[[], T]) -> T:
        """What `decide` returns on the first rank."""
        return cast(T, self.gather(decide() if self.is_first else None)[0])

    def any(self, value: bool) -> bool:
        """Whether it is true on one of the ranks."""
        return value if self.joined is None else self.joined.ranks.largest([value]) == [1]

    def check_same(self, facts: Mapping[str, str]) -> None:
        if self.joined is not None:
            self.joined.ranks.check_same(facts)

    @contextmanager
    def first_before_others(self) -> Iterator[None]:
        """The other ranks run the block after the first one has, and find its files. Nodes may have
        disks of their own: the first rank of each runs it before the others there."""
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
        """Raises unless each rank gets equally many sequences of a micro-batch."""
        if batch % self.parts:
            raise ConfigError(
                f"--batch {batch} must be a multiple of the {self.parts} ranks that share it"
            )

    def own(self, items: Sequence[T]) -> tuple[Sequence[T], int]:
        """This rank's part of `items`, and how many of it count. All ranks must run the model
        equally often: one without a part gets the first item, which does not count."""
        each, more = divmod(len(items), self.parts)
        first = self.part * each + min(self.part, more)
        count = each + (self.part < more)
        return (items[first : first + count], count) if count else (items[:1], 0)

    def seed_step(self, seed: int, step: int) -> None:
        """Lets ranks draw different numbers, for dropout. Those of the first rank are in
        checkpoints; the others' depend on the step alone, so any number of ranks can resume."""
        if not self.is_first:
            torch.manual_seed((seed * 1_000_003 + step) * 4099 + self.rank)

    # -- the watchdog ---------------------------------------------------------------------------

    def follow(self, engine: Engine) -> None:
        """From now on what the engine does counts as progress."""
        if self.joined is not None and engine.ranks is not None:
            self.joined.watchdog.follow(engine.ranks, engine.recorder.total_bytes)

    def steps(self) -> AbstractContextManager[Any]:
        """A block in which every rank makes progress, or all end."""
        return nullcontext() if self.joined is None else self.joined.watchdog.steps()

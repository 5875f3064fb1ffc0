"""Files that the ranks of a model write together."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from overspill.moe.engine import Engine
from overspill.parallel.ranks import Ranks
from overspill.tiers.safetensors_stream import StreamWriter, TensorSpec


def is_first(engine: Engine) -> bool:
    """Return whether this process writes files that are equal on all ranks: it is the first rank,
    or alone."""
    return engine.ranks is None or engine.ranks.rank == 0


def together(engine: Engine, what: str) -> AbstractContextManager[object]:
    """Context of an action that all ranks complete, or none; see `Ranks.together`."""
    return nullcontext() if engine.ranks is None else engine.ranks.together(what)


def writes_experts(engine: Engine) -> bool:
    """Return whether this process writes its experts. Of the ranks with the same experts in several
    nodes, one does."""
    return engine.ranks is None or engine.ranks.writes_experts


@contextmanager
def shared_writer(
    path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str], ranks: Ranks | None
) -> Iterator[StreamWriter | None]:
    """Context in which each rank writes its own part of the tensors; together they must write all.
    If one fails, all raise. Yields None to ranks whose experts other ranks write. Without `ranks`,
    this process writes all."""
    if ranks is None:
        with StreamWriter(path, specs, metadata) as writer:
            yield writer
        return
    with ranks.together(f"creating {path}"):
        if ranks.rank == 0:
            StreamWriter(path, specs, metadata).abandon()
    total = left = sum(spec.numel for spec in specs.values())
    with ranks.together(f"writing {path}"):
        if ranks.writes_experts:  # others may not see the file: it is on the disk of a node
            with StreamWriter(path, specs, metadata, True) as writer:
                yield writer
            left = writer.unwritten
        else:
            yield None
    written = ranks.sums([total - left])[0]
    assert written == total, f"{path}: the ranks have written {written:.0f} of {total} elements"

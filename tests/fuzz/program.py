"""Random programs: what is trained how, and a list of operations, all from one seed."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

# What faults.py can make fail: jobs of the engine by their kind in `Settings.inject`, calls of the
# operating system, and any function call of Overspill in the main thread.
TRANSFERS = ("upload", "download", "optimizer", "ssd read", "ssd write", "cpu")
FAULTS = (*TRANSFERS, "file", "call")

GRAPHS = 2
BATCHES = 6


@dataclass(frozen=True)
class Fault:
    """The `nth` event of its kind in an operation (0 is the first) raises OSError, or the main
    thread gets a KeyboardInterrupt."""

    kind: str
    nth: int
    interrupt: bool


@dataclass(frozen=True)
class Op:
    """One operation. It uses the fields that it needs; `settle` compares all weights and moments
    after it, which waits for the engine."""

    name: str
    graph: int = 0
    batch: int = 0
    layer: int = 0
    settle: bool = False
    fault: Fault | None = None

    def __str__(self) -> str:
        fault = self.fault
        shown = f"{self.name} g{self.graph} b{self.batch} l{self.layer}"
        if self.settle:
            shown += " settle"
        if fault is not None:
            error = "interrupt" if fault.interrupt else "error"
            shown += f" ({error} at {fault.kind} {fault.nth})"
        return shown


@dataclass(frozen=True)
class Case:
    """A model and how it is offloaded."""

    model: str = "gpt"
    dtype: str = "float32"
    n_layers: int = 2
    n_experts: int = 4
    top_k: int = 2
    gated: bool = True
    checkpoint: bool = False
    mode: str = "host"
    slots: int | None = 2
    host_slots: int | None = None
    resident: float = 0.0
    """Share of the experts that live on the compute device."""
    room: float | None = None
    """Memory for resident experts and sums of gradients, as a share of all records. It changes from
    pass to pass."""
    clip: float | None = None
    frozen: bool = False
    """All experts are frozen."""
    on_cpu: bool = False
    """The CPU computes some of the experts, and forms their weight gradients."""
    stateless: bool = False
    """The optimizer has the dense parameters alone: experts may be swapped at any time."""
    delays: int | None = None
    """Seed of random delays of all jobs."""
    late: int | None = None
    """On a CPU, seed of random times by which copies end after they were issued, as on a GPU."""
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    seed: int
    case: Case
    ops: tuple[Op, ...]

    def with_ops(self, kept: list[int]) -> "Program":
        """The program with the operations of these numbers alone."""
        return replace(self, ops=tuple(self.ops[number] for number in kept))


def program_of(seed: int, faults: bool = True) -> Program:
    """The program of a seed. One in two programs has a fault, one in eight of these two."""
    rng = random.Random(seed)
    case = _case(rng)
    ops = _operations(rng, case)
    if faults and rng.random() < 0.5:
        for _ in range(2 if rng.random() < 0.12 else 1):
            number = rng.randrange(len(ops))
            ops[number] = replace(ops[number], fault=_fault(rng, case, ops[number]))
    return Program(seed, case, tuple(ops))


def _case(rng: random.Random) -> Case:
    mode = rng.choice(("gpu", "host", "host", "disk", "disk"))
    frozen = rng.random() < 0.15
    settings: dict[str, Any] = {
        "activations": rng.choice(("recompute", "recompute", "keep")),
        "overlap_updates": rng.random() < 0.8,
        "overlap_uploads": rng.random() < 0.8,
        "waves": rng.random() < 0.8,
        "max_rows": rng.choice((None, None, 3)),
        "uploader": rng.choice(("thread", "native")) if mode == "host" else "auto",
        "threads": rng.choice((1, 3)),
    }
    model = "mixtral" if rng.random() < 0.1 else "gpt"
    # many experts on disk, few of which have tokens, and more on the GPU than in host memory
    scarce = mode == "disk" and rng.random() < 0.4
    # gradients of resident experts that wait in the host slots which the experts have left
    kept = mode == "host" and not frozen and rng.random() < 0.25
    # transformers rounds bf16 products at other places: only fp32 can be compared
    dtypes = ("float32", "float32", "float32", "bfloat16" if model == "gpt" else "float32")
    case = Case(
        model=model,
        dtype=rng.choice(dtypes),
        n_layers=rng.choice((1, 2, 2, 3)),
        n_experts=5 if scarce else rng.choice((2, 3, 4, 5)),
        # with one expert per token Mixtral's router has a gradient of nothing but rounding
        top_k=2 if model == "mixtral" else 1 if scarce else rng.choice((1, 2)),
        gated=rng.random() < 0.5,
        checkpoint=rng.random() < 0.3,
        mode=mode,
        slots=None if mode == "gpu" else rng.choice((5, 12) if scarce else (2, 2, 3, 5, 12)),
        host_slots=rng.choice((2,) if scarce else (2, 3, 5, 9)) if mode == "disk" else None,
        resident=0.0 if scarce or kept else rng.choice((0.0, 0.0, 0.3, 0.6)),
        room=_room(rng, mode, scarce, kept),
        clip=rng.choice((0.5, 1e-3) if kept else (None, None, 0.5, 1e-3)),
        frozen=frozen,
        stateless=frozen and rng.random() < 0.7,
        delays=rng.randrange(1000) if rng.random() < 0.3 else None,
        late=rng.randrange(1000) if rng.random() < (0.8 if scarce else 0.4) else None,
        settings=settings,
    )
    some = frozen or case.n_experts % 2 == 0
    return replace(case, on_cpu=mode == "host" and some and settings["activations"] != "keep")


def _room(rng: random.Random, mode: str, scarce: bool, kept: bool) -> float | None:
    if scarce or mode == "gpu":
        return None
    return rng.choice((0.5, 1.0) if kept else (None, None, 0.15, 0.5))


_SINGLE = (
    "forward", "backward", "accumulate", "retain", "inputs", "grad", "drop", "step", "zero_grad",
    "model_zero_grad", "evaluate", "logits", "snapshot", "restore", "save", "load", "freeze",
    "unfreeze", "freeze_dense", "new_optimizer", "set_lr", "switch", "move", "swap",
    "poison",
)  # fmt: skip

_ACCUMULATED = " ".join(["forward accumulate forward accumulate forward backward step"] * 3)
_PHRASES: tuple[tuple[int, str], ...] = (
    (8, "forward backward step"),
    (3, "forward accumulate forward backward step"),
    (2, "forward accumulate forward accumulate step"),
    (3, _ACCUMULATED),
    (2, "forward forward1 backward backward1 step"),
    (2, "forward forward1 accumulate drop1 step"),
    (2, "forward retain backward step"),
    (1, "forward forward1 backward1 step backward"),
    (2, "forward grad backward step"),
    (1, "forward inputs zero_grad"),
    (1, "forward accumulate model_zero_grad forward backward step"),
    (2, "forward backward zero_grad"),
    (1, "forward accumulate zero_grad"),
    (1, "forward poison step"),
    (3, "evaluate"),
    (2, "logits"),
    (1, "generate"),
    (2, "snapshot"),
    (2, "restore"),
    (2, "save"),
    (1, "load"),
    (1, "save load"),
    (1, "new_optimizer"),
    (2, "freeze"),
    (2, "unfreeze"),
    (1, "freeze_dense"),
    (1, "set_lr"),
    (1, "switch"),
    (3, "move"),
    (2, "?"),
    (1, "? ? ?"),
)


def _operations(rng: random.Random, case: Case) -> list[Op]:
    weights = [weight for weight, _ in _PHRASES]
    names: list[str] = []
    if case.host_slots == 2 and rng.random() < 0.5:
        names += _ACCUMULATED.split()
    if case.mode == "host" and case.clip is not None and case.resident == 0 and case.room:
        names += ["move", *(3 * "forward backward step ").split()]
    for _ in range(rng.randint(1 if names else 2, 2 if names else 5)):
        (_, phrase) = rng.choices(_PHRASES, weights)[0]
        names += phrase.split()
    if rng.random() < 0.3:  # an unusual order
        names.insert(rng.randrange(len(names) + 1), "?")
        del names[rng.randrange(len(names))]
    if rng.random() < 0.4:  # experts get other residents between any two operations
        for _ in range(rng.randint(1, 4)):
            name = "swap" if case.stateless and rng.random() < 0.7 else "move"
            names.insert(rng.randrange(len(names) + 1), name)
    return [_operation(rng, case, name) for name in names]


def _operation(rng: random.Random, case: Case, name: str) -> Op:
    if name == "?":
        name = rng.choice(_SINGLE) + rng.choice(("", "", "1"))
    graph = 1 if name.endswith("1") else 0
    settle = rng.random() < 0.4
    batch, layer = rng.randrange(BATCHES), rng.randrange(case.n_layers)
    return Op(name.removesuffix("1"), graph, batch, layer, settle)


_FILES = ("save", "load")
_HAVE = {"gpu": ("call",), "host": ("upload", "download", "optimizer", "call")}


def _fault(rng: random.Random, case: Case, op: Op) -> Fault:
    kinds = list(_HAVE.get(case.mode, (*_HAVE["host"], "ssd read", "ssd write")))
    if case.on_cpu:
        kinds.append("cpu")
    if op.name in _FILES:
        kinds += ["file"] * 4
    kind = rng.choice(kinds)
    most = {"call": 400, "file": 30}.get(kind, 12)
    nth = int(most ** rng.random()) - 1
    return Fault(kind, nth, kind == "call" or rng.random() < 0.4)

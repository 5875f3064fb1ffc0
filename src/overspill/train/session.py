"""The model, engine and optimizer of a run: built, and resumed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import nn

from overspill.moe.engine import Engine
from overspill.optim.adamw import AdamW
from overspill.train import checkpoint
from overspill.train.checkpoint import TrainState
from overspill.train.progress import Display
from overspill.train.run_folder import RunFolder
from overspill.train.run_spec import DTYPES, RunSpec
from overspill.train.run_warnings import warnings_before


@dataclass(frozen=True)
class Session:
    """The model, engine and optimizer that a run trains."""

    model: nn.Module
    engine: Engine
    optimizer: AdamW


Builder = Callable[[RunSpec], Session]


def build_session(spec: RunSpec) -> Session:
    """Allocate the memory, and build model and optimizer."""
    optim = spec.config.optim
    model = spec.load_model()
    engine = cast(Engine, model.overspill)
    try:
        model = spec.prepare(model)
        optimizer = AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=spec.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            max_grad_norm=optim.clip or None,
            state_dtype=DTYPES[optim.state_dtype],
            ranks=engine.ranks,
        )
    except BaseException:
        engine.close()
        raise
    return Session(model=model, engine=engine, optimizer=optimizer)


@contextmanager
def open_session(
    spec: RunSpec, folder: RunFolder, display: Display, build: Builder
) -> Iterator[tuple[Session, TrainState]]:
    """Open the session of a run and the state from which it starts, while no other run uses
    `folder`."""
    first = spec.team.is_first
    with folder if first else nullcontext():
        if first and not spec.config.run.resume:
            folder.check_free()  # again: another process may have used it until now
        start = _find_start(folder, spec, display) if spec.config.run.resume else None
        if first:
            for line in warnings_before(spec):
                display.say(line)
        session = build(spec)
        try:
            spec.team.follow(session.engine)
            display.say(session.engine.describe())
            # Only now, because a run that could not be built leaves no files.
            if first:
                folder.write_config(spec.config)
            state = TrainState(0, 0, spec.data_digest, spec.facts)
            if start is not None:
                state = checkpoint.load(start, session.model, session.engine, session.optimizer)
            yield session, state
        finally:
            # Also after an error or a second Ctrl-C: this stops the threads of the engine.
            session.engine.close()


def _find_start(folder: RunFolder, spec: RunSpec, display: Display) -> Path | None:
    """The checkpoint to resume from, if any; checked before any memory is allocated."""
    if spec.team.is_first:
        checkpoint.clean(folder.checkpoints)
    start = checkpoint.newest(folder.checkpoints)
    spec.team.check_same({"the checkpoint, in a --out folder that all nodes share,": str(start)})
    if start is None:
        display.say(f"{folder.path} has no checkpoint yet: starting at step 0")
        return None
    checkpoint.check_fits(start, spec.facts)
    if checkpoint.read_state(start).data_digest != spec.data_digest:
        display.say("the data has changed since this run began: the losses will differ")
    display.say(f"resuming from {start}")
    return start

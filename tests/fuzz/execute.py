"""Runs one program on the subject and on the oracle and compares them."""

import contextlib
import gc
import os
import shutil
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from overspill.core.errors import NonFiniteError, OrderError, OverspillError
from overspill.tiers.slab import registered
from tests.fuzz.compare import compare, compare_states
from tests.fuzz.faults import INJECTED, Faults
from tests.fuzz.oracle import Difference, Oracle
from tests.fuzz.program import Op, Program
from tests.fuzz.rules import BACKWARDS, Rules
from tests.fuzz.side import Values, new_model
from tests.fuzz.subject import Subject

CHANGES = ("step", "zero_grad", "model_zero_grad", "restore", "load", "new_optimizer", "switch")
SECONDS = 50.0  # an error after a fault must arrive within: the watchdog waits for longer
# an injected error of a CPU task is raised as it is, by the next call that waits
LATE = (OverspillError, OSError)


@dataclass
class Outcome:
    """What a program did. `failure` is None if subject and oracle agree."""

    failure: str | None = None
    operations: int = 0
    refused: int = 0
    restored: int = 0
    rebuilt: int = 0
    faults: Counter[str] = field(default_factory=Counter)


def execute(program: Program, device: str = "cpu") -> Outcome:
    """Runs the program in a folder of its own and checks that nothing is left of it."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    threads, children = set(threading.enumerate()), set(_children())
    run = Run(program, torch.device(device), folder)
    try:
        with run.faults.interrupts():
            run.run()
    except Exception as error:  # every failure is reported with its program
        run.outcome.failure = f"{type(error).__name__}: {error} [{run.at}]"
    finally:
        run.subject.close()
        run.faults.close()
        run.outcome.faults = run.faults.fired
    outcome = run.outcome
    del run
    if outcome.failure is None:
        outcome.failure = _left_over(folder, threads, children)
    shutil.rmtree(folder)
    return outcome


def _without_frames(error: BaseException) -> BaseException:
    """Without tracebacks, which would keep an optimizer alive that the program deletes."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def _left_over(folder: Path, threads: set[threading.Thread], children: set[str]) -> str | None:
    """Files, open files, threads, child processes and pinned memory that the program has left."""
    files = [*folder.glob("spill/*"), *folder.glob("checkpoints/.tmp-*")]
    left = [f"file {path.relative_to(folder)}" for path in files]
    deadline = time.monotonic() + 30
    while True:
        found = left + _open_files(folder) + [c for c in _children() if c not in children]
        found += [f"thread {t.name}" for t in threading.enumerate() if _is_new(t, threads)]
        found += [f"{size} bytes of pinned memory" for size in registered.values()]
        if not found:
            return None
        if left or time.monotonic() > deadline:
            return f"left over: {', '.join(found)}"
        gc.collect()
        time.sleep(0.01)


def _is_new(thread: threading.Thread, before: set[threading.Thread]) -> bool:
    # a thread of autograd that has run Python code is a "Dummy"
    return thread not in before and not thread.name.startswith("Dummy")


def _open_files(folder: Path) -> list[str]:
    """Also those without a name, whose link still says where they were."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if target.startswith(str(folder)):
                found.append(f"open file {Path(target).name}")
    return found


def _children() -> list[str]:
    found = []
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += [f"process {number}" for number in file.read_text().split()]
    return found


class Run:
    def __init__(self, program: Program, device: torch.device, folder: Path) -> None:
        case = program.case
        self.program = program
        self.folder = folder
        self.faults = Faults(case.delays, case.late if device.type == "cpu" else None)
        self.outcome = Outcome()
        self.at = "start"
        self._choices = [deque[torch.Tensor]() for _ in range(case.n_layers)]
        self._device = device
        self.subject = self._new_subject()
        self.oracle = Oracle(case, new_model(case), device, self._choices)
        if case.frozen:
            for layer in range(case.n_layers):
                self.oracle.freeze(Op("freeze", layer=layer))
        self.rules = Rules(case, self.subject.settings.overlap_updates)
        self._base: Values = self.oracle.state()
        self._rounded = False  # a new optimizer has started from rounded weights since
        self._snapshot = self.subject.snapshot(), self._base
        self._saved: dict[int, Values] = {}

    def _new_subject(self) -> Subject:
        case = self.program.case
        return Subject(case, self._device, self.folder, self.faults, self._choices)

    def run(self) -> None:
        for number, op in enumerate(self.program.ops):
            if self.rules.left_out(op):
                continue
            self.at = f"{number}: {op}"
            self.outcome.operations += 1
            self._perform(op)
        self.at = "end"
        self._finish()

    def _finish(self) -> None:
        """A fault may still be on its way; then all slots are accounted for."""
        self.faults.disarm()
        self.subject.graphs.clear()
        self.oracle.graphs.clear()
        self.rules.graphs.clear()
        if self.rules.updated or self.rules.poisoned:
            self._perform(Op("step"))
        try:
            self.subject.engine.flush()
        except LATE as error:
            if not self.faults.pending:
                raise
            self._recover(Op("end"), error)
        self._settle()
        self.subject.engine.check_conserved()

    # -- operations -------------------------------------------------------------------------

    def _perform(self, op: Op) -> None:
        for queue in self._choices:
            queue.clear()
        began = time.monotonic()
        caught: BaseException | None = None
        try:
            with self.faults.during(op.fault):
                mine = self._subject(op)
        except (Exception, KeyboardInterrupt) as error:
            caught = _without_frames(error)
        if caught is None:
            if self.rules.must_refuse(op):
                raise Difference("a step with NaN gradients was not refused")
            self._check(mine, self._oracle(op, mine))
            self.rules.done(op)
        elif self.faults.pending:
            if time.monotonic() - began > SECONDS:
                raise Difference(f"the error came after {time.monotonic() - began:.0f} s: {caught}")
            self._recover(op, caught)
        elif self._is_refusal(op, caught):
            self.outcome.refused += 1
            self._refused(op, caught)
        else:
            raise caught
        del caught
        if op.settle:
            self._settle_between_steps(op)

    def _subject(self, op: Op) -> Values:
        subject, name = self.subject, op.name
        if name in BACKWARDS:
            return subject.backward(op)
        if name in ("freeze", "unfreeze"):
            return subject.freeze(op)
        if name == "model_zero_grad":
            return subject.zero_grad(op)
        if name == "logits":
            return subject.infer(op)
        if name == "generate":
            return {"tokens": subject.generate(op)}
        if name == "snapshot":
            self._snapshot = subject.snapshot(), subject.state()
        elif name == "restore":
            self.subject.restore(self._snapshot[0])
        elif name == "save":
            self._saved[self.outcome.operations] = subject.state()
            subject.save(self.outcome.operations)
        elif name == "load":
            if subject.saved is not None:
                self.subject.load()
        elif name == "new_optimizer":
            subject.new_optimizer()
            subject.zero_grad(op)
            subject.optimizer.state_dict()  # refused if the old one has updated experts
        elif name in ("switch", "move", "swap"):
            getattr(subject, name)(op)
        else:
            observed: Values = getattr(subject, name)(op)
            return observed
        return {}

    def _oracle(self, op: Op, mine: Values) -> Values:
        """The same operation, after the subject's."""
        oracle, name = self.oracle, op.name
        if name in BACKWARDS:
            if name == "poison":
                return oracle.drop(op)
            return self._refused_by_torch(op, oracle.backward)
        if name == "grad":
            return self._refused_by_torch(op, oracle.grad)
        if name in ("freeze", "unfreeze"):
            return oracle.freeze(op)
        if name == "model_zero_grad":
            return oracle.zero_grad(op)
        if name == "logits":
            return oracle.infer(op)
        if name == "generate":
            oracle.check_generated(mine.pop("tokens"), first=3)
            return {}
        if name in ("snapshot", "save"):
            self._settle()
        elif name == "restore":
            self._restore_oracle(self._snapshot[1])
        elif name == "load":
            saved = self.subject.saved
            if saved is not None:
                self._restore_oracle(self._saved[saved], with_lr=False)
        elif name == "new_optimizer":
            oracle.new_optimizer()
            oracle.zero_grad()
            self._rounded = True
            self.rules.ended()
        elif name in ("move", "swap"):
            pass  # changes nothing that a user sees
        elif name == "switch":
            self.rules.overlap_updates = self.subject.settings.overlap_updates
        else:
            observed: Values = getattr(oracle, name)(op)
            return observed
        return {}

    def _refused_by_torch(self, op: Op, run: Callable[[Op], Values]) -> Values:
        try:
            return run(op)
        except RuntimeError as error:
            if not self.rules.is_stale(op):
                raise
            raise Difference(f"plain PyTorch raises an error here: {error}") from error

    # -- errors -----------------------------------------------------------------------------

    def _is_refusal(self, op: Op, error: BaseException) -> bool:
        if isinstance(error, NonFiniteError):
            return self.rules.poisoned or op.name == "poison"
        if isinstance(error, OverspillError):
            return self.rules.may_refuse(op)
        # torch's own check of a graph whose weights have changed
        return isinstance(error, RuntimeError) and self.rules.is_stale(op)

    def _refused(self, op: Op, error: BaseException) -> None:
        """Continues as the error says. The oracle does not carry out the operation."""
        if isinstance(error, NonFiniteError):
            if op.name == "poison":
                self._drop(op)
            if self.program.case.clip is None:
                self._restore_all()
            else:
                self._zero_grad()
        elif op.name in ("step", "model_zero_grad", "new_optimizer"):
            self._restore_all()
        elif op.name in BACKWARDS:
            self._drop(op)
            self.oracle.set_gradients(self.subject.gradients())
        elif op.name == "forward":
            self._drop(op)

    def _recover(self, op: Op, error: BaseException) -> None:
        """Continues after a fault as the error says."""
        clear = isinstance(error, OverspillError | KeyboardInterrupt) or INJECTED in str(error)
        if not clear and not self._is_refusal(op, error):
            raise Difference(f"an unclear error: {error!r}") from error
        self.faults.disarm()
        self.faults.pending = False
        try:
            self.subject.engine.flush()
        except OverspillError:
            self._rebuild()
            return
        if op.name in BACKWARDS:
            self._drop(op)
            try:
                self._zero_grad()
            except OrderError:  # some experts were updated
                self._restore_all()
        elif op.name == "forward":
            self._drop(op)
        elif op.name in CHANGES:
            self._restore_all()
        elif op.name == "swap":
            self.rules.done(op)  # some may have been swapped
        if not self.rules.updated:
            self._settle()

    def _drop(self, op: Op) -> None:
        self.subject.drop(op)
        self.oracle.drop(op)
        self.rules.graphs.pop(op.graph, None)

    def _zero_grad(self) -> None:
        self.subject.zero_grad(Op("zero_grad"))
        self.oracle.zero_grad()
        self.rules.ended()

    def _restore_all(self) -> None:
        """Loads the last snapshot into the model, or into a new one where that is refused."""
        self.outcome.restored += 1
        try:
            self.subject.restore(self._snapshot[0])
        except OverspillError:
            self._rebuild()
        else:
            self._restore_oracle(self._snapshot[1])

    def _restore_oracle(self, state: Values, with_lr: bool = True) -> None:
        self.oracle.graphs.clear()
        self.oracle.adopt(state, with_lr)
        self.oracle.zero_grad()
        self.rules.restored()
        self._base, self._rounded = self.oracle.state(), False

    def _rebuild(self) -> None:
        """A new model in place of one whose engine has failed, from the last snapshot."""
        self.outcome.rebuilt += 1
        self.subject.close()
        self.subject = self._new_subject()
        self.rules.overlap_updates = self.subject.settings.overlap_updates
        for layer in range(self.program.case.n_layers):
            name = "freeze" if layer in self.rules.frozen else "unfreeze"
            self.subject.freeze(Op(name, layer=layer))
        mine = self.subject.dense()
        for name, parameter in self.oracle.dense().items():
            mine[name].requires_grad_(parameter.requires_grad)
        self.subject.restore(self._snapshot[0])
        self._restore_oracle(self._snapshot[1])
        self._settle()

    # -- comparisons ------------------------------------------------------------------------

    def _check(self, mine: Values, theirs: Values) -> None:
        if not self.rules.poisoned:
            compare(mine, theirs, self.program.case)

    def _settle_between_steps(self, op: Op) -> None:
        if self.rules.updated or self.rules.poisoned:
            return  # the experts may be ahead of the rest
        try:
            self._settle()
        except LATE as error:
            if not self.faults.pending:
                raise
            self._recover(Op("settle"), error)

    def _settle(self) -> None:
        """Compares all weights and moments. The oracle goes on with the subject's, so that rounding
        does not add up."""
        mine, theirs = self.subject.state(), self.oracle.state()
        compare_states(mine, theirs, self._base, self.program.case, self._rounded)
        if not self.oracle.graphs:  # whose weights must not change
            self.oracle.adopt(mine)
            self._base, self._rounded = mine, False

"""The loop of a run, whatever it trains: steps, evaluations, checkpoints, Ctrl-C, metrics."""

import abc
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from overspill.core.errors import NonFiniteError
from overspill.hardware import machine
from overspill.trace.perfetto import write_perfetto
from overspill.trace.picture import draw_timeline
from overspill.train import checkpoint
from overspill.train.checkpoint import Fact, TrainState
from overspill.train.metrics import EvalMetrics, MetricsFile, StepMetrics
from overspill.train.plot import draw_loss
from overspill.train.progress import Display, resume_command, showing
from overspill.train.run_folder import RunFolder
from overspill.train.schedule import make_scheduler
from overspill.train.session import Session
from overspill.train.signals import StopSignal
from overspill.train.summary import Summary
from overspill.train.tracer import Tracer


@dataclass(frozen=True)
class Pace:
    """What a run does when, in steps."""

    steps: int
    eval_every: int
    save_every: int
    keep: int
    log_every: int
    trace_steps: int
    warmup: int
    min_lr: float


@dataclass(frozen=True)
class Origin:
    """What a run is, for its checkpoints and its words."""

    command: str
    """The command that resumes it."""
    name: str
    """The title of its pictures."""
    lr: float
    digest: str
    """Of its data."""
    facts: dict[str, Fact]


class Loop(abc.ABC):
    """The loop. `step` steps are in the weights, `position` rows of the data have been read."""

    def __init__(
        self,
        pace: Pace,
        origin: Origin,
        folder: RunFolder,
        session: Session,
        state: TrainState,
        display: Display,
    ) -> None:
        self.pace, self.origin, self.folder, self.session = pace, origin, folder, session
        self.display = display
        self.step, self.position = state.step, state.position
        self.saved = checkpoint.newest(folder.checkpoints) if state.step else None
        self.metrics = MetricsFile(folder.metrics, state.step)
        self.optimizer = session.optimizer
        self.scheduler = make_scheduler(
            cast(torch.optim.Optimizer, session.optimizer),
            state.step,
            pace.warmup,
            pace.steps,
            pace.min_lr,
        )
        self.tracer = Tracer(session.engine.recorder, pace.log_every, pace.trace_steps)
        self.last: StepMetrics | None = None
        self.eval_loss: float | None = None
        self.timed_tokens, self.timed_seconds = 0, 0.0

    @abc.abstractmethod
    def backward(self) -> "Work":
        """The forward and backward passes of one step, from `position` on."""

    @abc.abstractmethod
    def evaluate(self) -> EvalMetrics:
        """The model as it is now on the evaluation data, in eval mode."""

    def before_steps(self) -> None:  # noqa: B027 (may be left as it is)
        """What is done before the first step of this process."""

    def after_evaluation(self, metrics: EvalMetrics) -> None:  # noqa: B027 (may be left as it is)
        """What else is done with an evaluation."""

    def run(self) -> bool:
        """Takes the steps; whether it was stopped before the last."""
        pace = self.pace
        if self.step >= pace.steps:
            self.display.say(
                f"the run has its {pace.steps} steps already; give a higher --steps to go on"
            )
        with (
            showing(self.display, pace.steps, self.step),
            StopSignal(
                lambda: self.display.say("stopping after this step (again: at once)")
            ) as stop,
        ):
            self.before_steps()
            while self.step < pace.steps and not stop.requested:
                self._take_step()
                last = self.step == pace.steps
                if pace.eval_every and (last or self.step % pace.eval_every == 0):
                    self.take_evaluation()
                if last or stop.requested or (pace.save_every and self.step % pace.save_every == 0):
                    self._save()
            # A signal may also have come after the last look at it, during an evaluation.
            if stop.requested:
                self._save()
        self.metrics.close()
        self._draw()
        return stop.requested and self.step < pace.steps

    def _take_step(self) -> None:
        began = time.perf_counter()
        self.tracer.before_step(self.step)
        lr = float(self.optimizer.param_groups[0]["lr"])
        work = self.backward()
        try:
            self.optimizer.step()
        except NonFiniteError as error:
            raise self._not_finite(str(error)) from error
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.tracer.after_step(self.step)
        self.step += 1
        self.position += work.rows
        self._record(work, lr, time.perf_counter() - began)

    def check_finite(self, loss: float) -> None:
        """Before backward: updates start inside it, and a NaN must not reach a weight."""
        if not math.isfinite(loss):
            raise self._not_finite(f"the loss is {loss}, and nothing was updated with it")

    def _not_finite(self, what: str) -> NonFiniteError:
        safe = "there is no checkpoint yet; start again"
        if self.saved is not None:
            again = resume_command(self.folder.path, self.origin.command)
            safe = f"the last good checkpoint is {self.saved}; `{again}`"
        return NonFiniteError(
            f"step {self.step + 1}: {what}; {safe} with a lower --lr (it was "
            f"{self.origin.lr:g}) or a longer --warmup"
        )

    @torch.no_grad()
    def take_evaluation(self) -> EvalMetrics:
        self.session.model.eval()
        metrics = self.evaluate()
        self.session.model.train()
        self.eval_loss = metrics.eval_loss
        self.metrics.write(metrics)
        self.display.evaluation(metrics)
        self.after_evaluation(metrics)
        return metrics

    def _save(self) -> None:
        self.metrics.sync()
        self.saved = checkpoint.save(
            self.folder.checkpoints,
            TrainState(self.step, self.position, self.origin.digest, self.origin.facts),
            self.session.model,
            self.session.engine,
            self.session.optimizer,
            self.pace.keep,
        )

    def _record(self, work: "Work", lr: float, seconds: float) -> None:
        log = self.step % self.pace.log_every == 0 or self.step in (1, self.pace.steps)
        if self.last is not None:  # the first step compiles and fills caches
            self.timed_tokens += work.tokens
            self.timed_seconds += seconds
        self.last = StepMetrics(
            step=self.step,
            loss=work.losses.loss,
            ce=work.losses.ce,
            balance=work.losses.balance,
            lr=lr,
            grad_norm=self.optimizer.total_norm,
            seconds=round(seconds, 6),
            tokens_per_s=round(work.tokens / seconds, 1),
            busy=self.tracer.busy() if log else None,
            bytes_by_tier=self.session.engine.bytes_by_tier() if log else None,
            host_peak=machine.peak_resident_memory() if log else None,
            gpu_peak=_gpu_peak() if log else None,
        )
        self.metrics.write(self.last)
        self.display.step(self.last, log)

    def _draw(self) -> None:
        name = self.origin.name
        draw_loss(self.folder.metrics, self.folder.loss_picture, f"{name}: loss")
        spans = self.tracer.recorder.spans()
        if spans:
            write_perfetto(spans, self.folder.timeline)
            draw_timeline(spans, self.folder.timeline_picture, f"{name}: the last traced steps")

    def summary(self, interrupted: bool, began: float) -> Summary:
        engine, rate = self.session.engine, None
        if self.timed_seconds > 0:
            rate = self.timed_tokens / self.timed_seconds
        return Summary(
            out=str(self.folder.path),
            steps=self.step,
            interrupted=interrupted,
            loss=self.last.loss if self.last else None,
            eval_loss=self.eval_loss,
            tokens_per_s=rate,
            seconds=time.perf_counter() - began,
            checkpoint=str(self.saved) if self.saved else None,
            placement=engine.describe(),
            bytes_by_tier=engine.bytes_by_tier(),
            host_peak=machine.peak_resident_memory(),
            gpu_peak=_gpu_peak(),
        )


@dataclass(frozen=True)
class Losses:
    """The losses of a step: what was trained on, cross-entropy alone, balance alone."""

    loss: float
    ce: float
    balance: float

    def plus(self, other: "Losses", share: float) -> "Losses":
        return Losses(
            self.loss + other.loss * share,
            self.ce + other.ce * share,
            self.balance + other.balance * share,
        )


@dataclass(frozen=True)
class Work:
    """What the passes of a step were over, and what they gave."""

    losses: Losses
    rows: int
    tokens: int


def find_start(
    folder: RunFolder, facts: dict[str, Fact], digest: str, display: Display
) -> Path | None:
    """The checkpoint to go on from, found to fit before any memory is taken."""
    checkpoint.clean(folder.checkpoints)
    start = checkpoint.newest(folder.checkpoints)
    if start is None:
        display.say(f"{folder.path} has no checkpoint yet: starting at step 0")
        return None
    checkpoint.check_fits(start, facts)
    if checkpoint.read_state(start).data_digest != digest:
        display.say("the data is not what it was when this run began: the losses will differ")
    display.say(f"resuming from {start}")
    return start


def _gpu_peak() -> int:
    """The most GPU memory that was reserved, in bytes; what the allocator keeps counts too."""
    return torch.cuda.max_memory_reserved() if torch.cuda.is_initialized() else 0

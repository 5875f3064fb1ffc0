"""The loop of a run: steps, evaluations, checkpoints, Ctrl-C, metrics."""

import abc
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from overspill.core.errors import NonFiniteError
from overspill.core.garbage import short_collections
from overspill.hardware import machine
from overspill.models.predictor import save_predictor
from overspill.models.stages.stages import Stages
from overspill.trace.perfetto import write_perfetto
from overspill.trace.picture import draw_timeline
from overspill.trace.spans import STEP
from overspill.train import checkpoint
from overspill.train.checkpoint import TrainState
from overspill.train.metrics import EvalMetrics, MetricsFile, StepMetrics
from overspill.train.plot import draw_loss
from overspill.train.progress import Display, resume_command, showing
from overspill.train.run_folder import RunFolder
from overspill.train.run_spec import RunSpec
from overspill.train.schedule import make_scheduler
from overspill.train.session import Session
from overspill.train.signals import StopSignal
from overspill.train.summary import Summary
from overspill.train.tracer import Tracer

SummaryT = TypeVar("SummaryT", bound=Summary)


@dataclass(frozen=True)
class Losses:
    """The losses of a step: the trained one, cross-entropy alone, balance alone."""

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
class StepWork:
    """Losses and amount of data of one step, on all ranks."""

    losses: Losses
    """Losses of this rank; the losses of the step are the mean over ranks."""
    sequences: int
    tokens: int


@dataclass(frozen=True)
class _Memory:
    """Memory of all ranks together."""

    bytes_by_tier: dict[str, int]
    host_peak: int


class Loop(abc.ABC, Generic[SummaryT]):
    """Loop of a run. The weights have had `step` updates; `position` sequences have been read."""

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        session: Session,
        state: TrainState,
        display: Display,
    ) -> None:
        self.spec, self.folder, self.session, self.display = spec, folder, session, display
        self.team = spec.team
        self.step, self.position = state.step, state.position
        self.saved = checkpoint.newest(folder.checkpoints) if state.step else None
        with self.team.first_before_others():  # others may read the file that the first cuts
            self.metrics = MetricsFile(folder.metrics, state.step) if self.team.is_first else None
        self.optimizer = session.optimizer
        self.scheduler = make_scheduler(
            session.optimizer, state.step, spec.warmup, spec.steps, spec.config.optim.min_lr
        )
        run = spec.config.run
        self.tracer = Tracer(session.engine.recorder, run.log_every, run.trace_steps)
        self.last: StepMetrics | None = None
        self.eval_loss: float | None = None
        self.timed_tokens, self.timed_seconds = 0, 0.0
        self.stages = None if spec.config.stages is None else Stages(session.model)

    @abc.abstractmethod
    def backward(self) -> StepWork:
        """Runs the forward and backward passes of one step, from `position` on."""

    @abc.abstractmethod
    def evaluate(self) -> EvalMetrics:
        """Evaluates the model, which is in eval mode."""

    @abc.abstractmethod
    def summary(self, interrupted: bool, seconds: float) -> SummaryT: ...

    def backward_each(
        self, micro_batches: Sequence[dict[str, Any]], loss: Callable[[int, Any], Tensor]
    ) -> None:
        """Compute the gradients of micro-batches, given as arguments of the model: each passes all
        layers before the next begins, or with stages all of them pass a stage before the next one.
        `loss` returns the loss of a micro-batch from its number and the model's output."""
        if self.stages is not None:
            self.stages.backward(micro_batches, self.optimizer, loss)
            return
        for number, inputs in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            with nullcontext() if last else self.optimizer.accumulate():
                loss(number, self.session.model(**inputs)).backward()

    def before_steps(self) -> None:
        """Hook before the first step of this process."""

    def after_evaluation(self, metrics: EvalMetrics) -> None:
        """Hook after each evaluation."""

    def after_steps(self) -> None:
        """Hook after the last step of this process."""

    def finish(self) -> SummaryT:
        """Take all remaining steps, and return the summary."""
        began = time.perf_counter()
        interrupted = self._run()
        self._save_predictor()
        self.after_steps()
        return self.summary(interrupted, time.perf_counter() - began)

    def _run(self) -> bool:
        """Take the steps; return whether the run was stopped before the last one."""
        spec, run = self.spec, self.spec.config.run
        if self.step >= spec.steps:
            self.display.say(
                f"the run already has its {spec.steps} steps; give a higher --steps to continue"
            )
        with (
            short_collections(),
            showing(self.display, spec.steps, self.step),
            StopSignal(
                lambda: self.display.say("stopping after this step (again: immediately)")
            ) as stop,
        ):
            self.before_steps()
            stopped = False
            # Signals reach ranks at different times: all stop after the same step.
            while self.step < spec.steps and not (stopped := self.team.any(stop.requested)):
                # the first step may compile kernels
                with self.team.steps() if self.last is not None else nullcontext():
                    self._take_step()
                last = self.step == spec.steps
                if spec.eval_every and (last or self.step % spec.eval_every == 0):
                    self.take_evaluation()
                if last or (run.save_every and self.step % run.save_every == 0):
                    self._save()
            if stopped:
                self._save()
        if self.metrics is not None:
            self.metrics.close()
            self._draw()
        return stopped

    def _take_step(self) -> None:
        began = time.perf_counter()
        self.team.seed_step(self.spec.config.run.seed, self.step)
        self.tracer.before_step(self.step)
        lr = float(self.optimizer.param_groups[0]["lr"])
        work = self.backward()
        try:
            self.optimizer.step()
        except NonFiniteError as error:
            raise self._not_finite(str(error)) from error
        self.tracer.recorder.mark(STEP)
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.tracer.after_step(self.step)
        self.step += 1
        self.position += work.sequences
        self._record(work, lr, time.perf_counter() - began)

    def check_finite(self, loss: float) -> None:
        """Raise if the loss is not finite. Called before backward, in which updates start: a NaN
        must not reach a weight."""
        if not math.isfinite(loss):
            raise self._not_finite(f"the loss is {loss}, and no weight was updated with it")

    def _not_finite(self, what: str) -> NonFiniteError:
        restart = "there is no checkpoint yet; start again"
        if self.saved is not None:
            command = resume_command(self.folder.path, self.spec.config.command)
            restart = f"the last good checkpoint is {self.saved}; `{command}`"
        return NonFiniteError(
            f"step {self.step + 1}: {what}; {restart} with a lower --lr (it was {self.spec.lr:g}) "
            "or a longer --warmup"
        )

    @torch.no_grad()
    def take_evaluation(self) -> EvalMetrics:
        self.session.model.eval()
        metrics = self.evaluate()
        self.session.model.train()
        self.eval_loss = metrics.eval_loss
        self._log(metrics)
        self.display.evaluation(metrics)
        self.after_evaluation(metrics)
        return metrics

    def _log(self, metrics: StepMetrics | EvalMetrics) -> None:
        if self.metrics is not None:
            self.metrics.write(metrics)

    def _save(self) -> None:
        if self.metrics is not None:
            self.metrics.sync()
        self.saved = checkpoint.save(
            self.folder.checkpoints,
            TrainState(self.step, self.position, self.spec.data_digest, self.spec.facts),
            self.session.model,
            self.session.engine,
            self.session.optimizer,
            self.spec.config.run.keep,
        )

    def _record(self, work: StepWork, lr: float, seconds: float) -> None:
        every = self.spec.config.run.log_every
        log = self.step % every == 0 or self.step in (1, self.spec.steps)
        own = work.losses.loss, work.losses.ce, work.losses.balance
        loss, ce, balance = (total / self.team.size for total in self.team.sums(own))
        memory = self._memory() if log else None
        ranks = self.session.engine.balance if log else None
        if self.last is not None:  # the first step compiles kernels and fills caches
            self.timed_tokens += work.tokens
            self.timed_seconds += seconds
        self.last = StepMetrics(
            step=self.step,
            loss=loss,
            ce=ce,
            balance=balance,
            lr=lr,
            grad_norm=self.optimizer.total_norm,
            seconds=round(seconds, 6),
            tokens_per_s=round(work.tokens / seconds, 1),
            busy=self.tracer.busy() if log else None,
            bytes_by_tier=memory.bytes_by_tier if memory else None,
            host_peak=memory.host_peak if memory else None,
            gpu_peak=_gpu_peak() if log else None,
            gpu_use=self.session.engine.memory.gpu_use() if log else None,
            rank_rows=ranks.rows if ranks else None,
            rank_balance=round(ranks.placed, 4) if ranks else None,
            rank_balance_static=round(ranks.static, 4) if ranks else None,
            predictor=self._predictor() if log else None,
        )
        self._log(self.last)
        self.display.step(self.last, log)

    def _predictor(self) -> dict[str, float] | None:
        observer = self.session.engine.popularity.observer
        return None if observer is None else observer.stats()

    def _save_predictor(self) -> None:
        """Save what the popularity predictor has learned, for the weights of the last
        checkpoint."""
        observer = self.session.engine.popularity.observer
        model: Any = self.session.model
        if observer is None or self.last is None or not observer.predictor.learned_tokens:
            return
        whole = model.get_base_model() if hasattr(model, "get_base_model") else model
        save_predictor(whole, observer.predictor)

    def _memory(self) -> "_Memory":
        tiers = self.session.engine.bytes_by_tier()
        *sizes, peak = self.team.sums([*tiers.values(), machine.peak_resident_memory()])
        return _Memory(dict(zip(tiers, map(int, sizes), strict=True)), int(peak))

    def _draw(self) -> None:
        name, folder = self.spec.config.name, self.folder
        spans = self.tracer.recorder.spans()
        draw: dict[Path, Callable[[Path], None]] = {
            folder.loss_picture: lambda path: draw_loss(folder.metrics, path, f"{name}: loss")
        }
        if any(span.name != STEP for span in spans):  # else all experts live on the device
            title = f"{name}: the last traced steps"
            draw[folder.timeline] = partial(write_perfetto, spans)
            draw[folder.timeline_picture] = lambda path: draw_timeline(spans, path, title)
        for path, write in draw.items():
            try:
                write(path)
            except OSError as error:  # the model is saved: nothing else depends on a picture
                path.unlink(missing_ok=True)
                self.display.say(f"{path} cannot be written ({error.strerror or error})")

    def base_summary(self, interrupted: bool, seconds: float) -> Summary:
        memory, timed = self._memory(), self.timed_seconds > 0
        return Summary(
            out=str(self.folder.path),
            steps=self.step,
            interrupted=interrupted,
            loss=self.last.loss if self.last else None,
            eval_loss=self.eval_loss,
            tokens_per_s=self.timed_tokens / self.timed_seconds if timed else None,
            seconds=seconds,
            checkpoint=str(self.saved) if self.saved else None,
            placement=self.session.engine.describe(),
            bytes_by_tier=memory.bytes_by_tier,
            host_peak=memory.host_peak,
            gpu_peak=_gpu_peak(),
        )


def _gpu_peak() -> int:
    """Peak of reserved GPU memory in bytes, including what the allocator caches."""
    return torch.cuda.max_memory_reserved() if torch.cuda.is_initialized() else 0

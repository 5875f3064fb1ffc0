"""Training, top-down: prepare, build, take steps, leave everything in the run's folder."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from overspill.core.errors import NonFiniteError
from overspill.core.sizes import format_size
from overspill.hardware import machine
from overspill.trace.perfetto import write_perfetto
from overspill.trace.picture import draw_timeline
from overspill.trace.recorder import Recorder
from overspill.train import checkpoint
from overspill.train.checkpoint import TrainState
from overspill.train.config import TrainConfig
from overspill.train.data import Data, find_files, split, tokenize
from overspill.train.metrics import EvalMetrics, MetricsFile, StepMetrics
from overspill.train.plot import draw_loss
from overspill.train.progress import Display, resume_command, showing
from overspill.train.run_folder import RunFolder, choose_folder
from overspill.train.schedule import make_scheduler
from overspill.train.session import Blueprint, Builder, Session, build_session, draw_up
from overspill.train.signals import StopSignal
from overspill.train.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    out: str
    steps: int
    interrupted: bool
    loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    seconds: float
    checkpoint: str | None
    placement: str
    """What lay where, in one line."""
    bytes_by_tier: dict[str, int]
    host_peak: int
    gpu_peak: int


def train(config: TrainConfig, display: Display, build: Builder = build_session) -> Summary:
    """Train as `config` says; the returned summary is also what `overspill train` prints."""
    folder = choose_folder(config)
    tokenizer = load_tokenizer(config.data.tokenizer)
    blueprint = draw_up(config, tokenizer, display.say)
    data = _load_data(blueprint, tokenizer, display)
    with folder:
        start = _find_start(blueprint, folder, data, display)
        session = build(blueprint, display.say)
        try:
            display.say(session.engine.describe())
            # Not before: a run that could not be built leaves nothing behind.
            folder.write_config(config)
            state = TrainState(0, 0, data.digest, blueprint.facts)
            if start is not None:
                state = checkpoint.load(start, session.model, session.engine, session.optimizer)
            return Trainer(blueprint, folder, data, session, state, display).run()
        finally:
            # Also after an error or a second Ctrl-C: no thread may outlive the run.
            session.engine.close()


def _load_data(blueprint: Blueprint, tokenizer: Tokenizer, display: Display) -> Data:
    section = blueprint.config.data
    files = find_files(section.data)
    tokens = tokenize(files, tokenizer, Path(section.cache).expanduser(), display.say)
    data = split(tokens, blueprint.seq_len, blueprint.config.run.seed, section.data)
    display.say(f"data: {section.data}, {data.n_tokens:,} tokens in {len(files)} files")
    return data


def _find_start(
    blueprint: Blueprint, folder: RunFolder, data: Data, display: Display
) -> Path | None:
    """The checkpoint to go on from, found to fit before any memory is taken."""
    if not blueprint.config.run.resume:
        return None
    checkpoint.clean(folder.checkpoints)
    start = checkpoint.newest(folder.checkpoints)
    if start is None:
        display.say(f"{folder.path} has no checkpoint yet: starting at step 0")
        return None
    checkpoint.check_fits(start, blueprint.facts)
    if checkpoint.read_state(start).data_digest != data.digest:
        display.say("the data is not what it was when this run began: the losses will differ")
    display.say(f"resuming from {start}")
    return start


class Trainer:
    """The loop. `step` steps are in the weights, `position` sequences have been read."""

    def __init__(
        self,
        blueprint: Blueprint,
        folder: RunFolder,
        data: Data,
        session: Session,
        state: TrainState,
        display: Display,
    ) -> None:
        self.config = blueprint.config
        self.blueprint, self.folder, self.data, self.session = blueprint, folder, data, session
        self.display = display
        self.step, self.position = state.step, state.position
        self.saved = checkpoint.newest(folder.checkpoints) if state.step else None
        self.metrics = MetricsFile(folder.metrics, state.step)
        self.optimizer = session.optimizer
        optim = self.config.optim
        self.scheduler = make_scheduler(
            cast(torch.optim.Optimizer, session.optimizer),
            state.step,
            optim.warmup,
            self.config.run.steps,
            optim.min_lr,
        )
        run = self.config.run
        self.tracer = Tracer(session.engine.recorder, run.log_every, run.trace_steps)
        self.last: StepMetrics | None = None
        self.eval_loss: float | None = None
        self.timed_tokens, self.timed_seconds = 0, 0.0

    def run(self) -> Summary:
        run, began = self.config.run, time.perf_counter()
        if self.step >= run.steps:
            self.display.say(
                f"the run has its {run.steps} steps already; give a higher --steps to go on"
            )
        with (
            showing(self.display, run.steps, self.step),
            StopSignal(
                lambda: self.display.say("stopping after this step (again: at once)")
            ) as stop,
        ):
            while self.step < run.steps and not stop.requested:
                self._take_step()
                last = self.step == run.steps
                if run.eval_every and (last or self.step % run.eval_every == 0):
                    self._evaluate()
                if last or stop.requested or (run.save_every and self.step % run.save_every == 0):
                    self._save()
            # A signal may also have come after the last look at it, during an evaluation.
            if stop.requested:
                self._save()
        self.metrics.close()
        self._draw()
        return self._summary(stop.requested and self.step < run.steps, began)

    def _take_step(self) -> None:
        began = time.perf_counter()
        section = self.config.data
        self.tracer.before_step(self.step)
        tokens, targets = self.data.train_batch(self.position, self.config.sequences_per_step)
        device = self.session.device
        tokens = tokens.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        lr = float(self.optimizer.param_groups[0]["lr"])
        if section.group or section.accumulate == 1:
            losses = self._backward(tokens, targets, section.accumulate)
        else:
            losses = self._backward_one_by_one(tokens, targets, section.accumulate)
        try:
            self.optimizer.step()
        except NonFiniteError as error:
            raise self._not_finite(str(error)) from error
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.tracer.after_step(self.step)
        self.step += 1
        self.position += len(tokens)
        self._record(losses, lr, tokens.numel(), time.perf_counter() - began)

    def _backward(self, tokens: torch.Tensor, targets: torch.Tensor, pieces: int) -> "Losses":
        out = self.session.model(tokens, targets, pieces=pieces)
        losses = Losses(out.loss.item(), out.ce.item(), out.balance.item())
        # Before backward: updates start inside it, and a NaN must not reach a weight.
        self._check_finite(losses.loss)
        out.loss.backward()
        return losses

    def _backward_one_by_one(
        self, tokens: torch.Tensor, targets: torch.Tensor, count: int
    ) -> "Losses":
        """The plain loop: each micro-batch passes all layers before the next begins."""
        total = Losses(0.0, 0.0, 0.0)
        pairs = list(zip(tokens.chunk(count), targets.chunk(count), strict=True))
        for number, (piece, target) in enumerate(pairs, start=1):
            with self.optimizer.accumulate() if number < count else nullcontext():
                out = self.session.model(piece, target)
                losses = Losses(out.loss.item(), out.ce.item(), out.balance.item())
                self._check_finite(losses.loss)
                (out.loss / count).backward()
            total = total.plus(losses, 1 / count)
        return total

    def _check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise self._not_finite(f"the loss is {loss}, and nothing was updated with it")

    def _not_finite(self, what: str) -> NonFiniteError:
        safe = "there is no checkpoint yet; start again"
        if self.saved is not None:
            safe = f"the last good checkpoint is {self.saved}; `{resume_command(self.folder.path)}`"
        return NonFiniteError(
            f"step {self.step + 1}: {what}; {safe} with a lower --lr (it was "
            f"{self.blueprint.lr:g}) or a longer --warmup"
        )

    @torch.no_grad()
    def _evaluate(self) -> None:
        run, section, model = self.config.run, self.config.data, self.session.model
        model.eval()
        total, count = 0.0, 0
        for tokens, targets in self.data.eval_batches(run.eval_batches, section.batch):
            device = self.session.device
            out = model(tokens.to(device), targets.to(device))
            total, count = total + out.ce.item() * len(tokens), count + len(tokens)
        model.train()
        self.eval_loss = total / count
        metrics = EvalMetrics(self.step, self.eval_loss)
        self.metrics.write(metrics)
        self.display.evaluation(metrics)

    def _save(self) -> None:
        self.metrics.sync()
        self.saved = checkpoint.save(
            self.folder.checkpoints,
            TrainState(self.step, self.position, self.data.digest, self.blueprint.facts),
            self.session.model,
            self.session.engine,
            self.session.optimizer,
            self.config.run.keep,
        )

    def _record(self, losses: "Losses", lr: float, tokens: int, seconds: float) -> None:
        run = self.config.run
        log = self.step % run.log_every == 0 or self.step in (1, run.steps)
        if self.last is not None:  # the first step compiles and fills caches
            self.timed_tokens += tokens
            self.timed_seconds += seconds
        self.last = StepMetrics(
            step=self.step,
            loss=losses.loss,
            ce=losses.ce,
            balance=losses.balance,
            lr=lr,
            grad_norm=self.optimizer.total_norm,
            seconds=round(seconds, 6),
            tokens_per_s=round(tokens / seconds, 1),
            busy=self.tracer.busy() if log else None,
            bytes_by_tier=self.session.engine.bytes_by_tier() if log else None,
            host_peak=machine.peak_resident_memory() if log else None,
            gpu_peak=_gpu_peak() if log else None,
        )
        self.metrics.write(self.last)
        self.display.step(self.last, log)

    def _draw(self) -> None:
        name = self.config.model.preset
        draw_loss(self.folder.metrics, self.folder.loss_picture, f"{name}: loss")
        spans = self.tracer.recorder.spans()
        if spans:
            write_perfetto(spans, self.folder.timeline)
            draw_timeline(spans, self.folder.timeline_picture, f"{name}: the last traced steps")

    def _summary(self, interrupted: bool, began: float) -> Summary:
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


class Tracer:
    """Records the first `count` steps of every `every`; the others run at full speed."""

    def __init__(
        self,
        recorder: Recorder,
        every: int,
        count: int,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.recorder = recorder
        self._every, self._count, self._clock = every, min(count, every), clock
        self._since = self._until = 0
        self._running = False

    def before_step(self, step: int) -> None:
        if step % self._every < self._count and not self._running:
            self.recorder.clear()  # what stays at the end of the run is the last group
            self.recorder.start()
            self._running = True
            self._since = self._clock()

    def after_step(self, step: int) -> None:
        if not self._running:
            return
        self._until = self._clock()
        if step % self._every == self._count - 1:
            self.recorder.stop()
            self._running = False

    def busy(self) -> dict[str, float] | None:
        """How busy each row was over the newest traced steps; None before there are any."""
        if self._until <= self._since:
            return None
        return self.recorder.busy(self._since, self._until)


def summary_lines(summary: Summary) -> list[str]:
    """The end of a run in words."""
    losses = [
        f"{name} {value:.4f}"
        for name, value in (("loss", summary.loss), ("eval loss", summary.eval_loss))
        if value is not None
    ]
    rate = [] if summary.tokens_per_s is None else [f"{summary.tokens_per_s:,.0f} tok/s"]
    peaks = f"host memory peak {format_size(summary.host_peak)}"
    if summary.gpu_peak:
        peaks += f", GPU memory peak {format_size(summary.gpu_peak)}"
    word = "stopped" if summary.interrupted else "done"
    lines = [
        f"{word} at step {summary.steps}: {', '.join(losses + rate)}",
        f"{summary.placement}; {peaks}",
        f"run folder: {summary.out}",
    ]
    if summary.interrupted:
        lines.append(f"to go on: {resume_command(summary.out)}")
    return lines


def _gpu_peak() -> int:
    """The most GPU memory that was reserved, in bytes; what the allocator keeps counts too."""
    return torch.cuda.max_memory_reserved() if torch.cuda.is_initialized() else 0

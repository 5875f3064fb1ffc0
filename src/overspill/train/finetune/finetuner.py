"""Fine-tuning, top-down: read, build, take steps, leave the best and the last model."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from overspill.models.huggingface.save import save
from overspill.train import checkpoint
from overspill.train.checkpoint import TrainState
from overspill.train.finetune.batches import Batch, Order, collate
from overspill.train.finetune.config import FinetuneConfig
from overspill.train.finetune.evaluation import chosen, mean_loss, row_losses, summed_losses
from overspill.train.finetune.lora import check_peft, save_adapter
from overspill.train.finetune.outputs import Outputs
from overspill.train.finetune.rows import IGNORED, Row
from overspill.train.finetune.session import Blueprint, Builder, build_session, draw_up
from overspill.train.loop import Loop, Losses, Origin, Pace, Work, find_start
from overspill.train.metrics import EvalMetrics, read_lines
from overspill.train.progress import Display
from overspill.train.run_folder import RunFolder, choose_folder
from overspill.train.session import Session
from overspill.train.summary import Summary, summary_lines

COMMAND = "finetune"


@dataclass(frozen=True, kw_only=True)
class FinetuneSummary(Summary):
    """How a run ended."""

    eval_loss_before: float | None
    accuracy_before: float | None
    accuracy: float | None
    """At the end."""
    best: str | None
    """Folder of the model with the lowest evaluation loss, or the highest accuracy."""
    best_step: int | None
    final: str | None


def finetune(
    config: FinetuneConfig, display: Display, build: Builder = build_session
) -> FinetuneSummary:
    """Fine-tune as `config` says; the summary is also what `overspill finetune` prints."""
    folder = choose_folder(config)
    if config.model.lora is not None:
        check_peft()
    blueprint = draw_up(config, display.say)
    data = blueprint.data
    with folder, _no_bars():
        resume = config.run.resume
        start = find_start(folder, blueprint.facts, data.digest, display) if resume else None
        session = build(blueprint)
        try:
            display.say(session.engine.describe())
            # Not before: a run that could not be built leaves nothing behind.
            folder.write_config(config)
            state = TrainState(0, 0, data.digest, blueprint.facts)
            if start is not None:
                state = checkpoint.load(start, session.model, session.engine, session.optimizer)
            return Finetuner(blueprint, folder, session, state, display).finish()
        finally:
            # Also after an error or a second Ctrl-C: no thread may outlive the run.
            session.engine.close()


@contextmanager
def _no_bars() -> Iterator[None]:
    """transformers' own bars would write across the one of the run."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


class Finetuner(Loop):
    """The loop over rows of examples."""

    def __init__(
        self,
        blueprint: Blueprint,
        folder: RunFolder,
        session: Session,
        state: TrainState,
        display: Display,
    ) -> None:
        self.blueprint, self.config, self.data = blueprint, blueprint.config, blueprint.data
        run, data = self.config.run, blueprint.data
        pace = Pace(
            steps=blueprint.steps,
            # every `steps` steps: the last one alone
            eval_every=(run.eval_every or blueprint.steps) if data.evaluates else 0,
            save_every=run.save_every,
            keep=run.keep,
            log_every=run.log_every,
            trace_steps=run.trace_steps,
            warmup=blueprint.warmup,
            min_lr=self.config.optim.min_lr,
        )
        origin = Origin(COMMAND, self.config.name, blueprint.lr, data.digest, blueprint.facts)
        super().__init__(pace, origin, folder, session, state, display)
        self.order = Order(len(data.train), run.seed)
        self.outputs = Outputs(folder.path)
        self.evaluations = _past_evaluations(folder.metrics)

    # -- steps ------------------------------------------------------------------------------

    def before_steps(self) -> None:
        if self.step < self.pace.steps:
            self.outputs.reopen()
        if self.step == 0 and self.data.evaluates and not self.evaluations:
            self.take_evaluation()

    def backward(self) -> Work:
        """Micro-batches one after another; each learned token of the step counts the same."""
        section = self.config.data
        chosen_rows = self.order.take(self.position, self.config.sequences_per_step)
        rows = [self.data.train[number] for number in chosen_rows]
        pieces = [rows[at : at + section.batch] for at in range(0, len(rows), section.batch)]
        learned = sum(row.learned for row in rows)
        total = Losses(0.0, 0.0, 0.0)
        for number, piece in enumerate(pieces, start=1):
            batch = self._collate(piece)
            share = sum(row.learned for row in piece) / learned
            with self.optimizer.accumulate() if number < len(pieces) else nullcontext():
                total = total.plus(self._backward(batch, share), share)
        tokens = sum(len(row.tokens) for row in rows)
        if self.blueprint.seq2seq:
            tokens += learned
        return Work(total, rows=len(rows), tokens=tokens)

    def _backward(self, batch: Batch, share: float) -> Losses:
        extra = {"output_router_logits": True} if self.config.model.balance else {}
        out = self.session.model(**batch, use_cache=False, **extra)
        loss = out.loss.item()
        self.check_finite(loss)
        ce = self._cross_entropy(out.logits, batch["labels"]) if extra else loss
        (out.loss * share).backward()
        return Losses(loss, ce, loss - ce)

    def _cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor) -> float:
        total = summed_losses(logits, labels, self.blueprint.seq2seq).sum().item()
        return float(total / (labels != IGNORED).sum().item())

    def _collate(self, rows: Sequence[Row]) -> Batch:
        return collate(rows, self.blueprint.pad, self.session.device)

    # -- evaluations ------------------------------------------------------------------------

    def evaluate(self) -> EvalMetrics:
        model, batch, seq2seq = self.session.model, self.config.data.batch, self.blueprint.seq2seq
        choices = self.data.eval_choices
        if not choices:
            rows = self.data.eval_rows
            losses = row_losses(model, rows, batch, self._collate, seq2seq)
            return EvalMetrics(self.step, mean_loss(losses, rows))
        rows = [row for choice in choices for row in choice.rows]
        losses = row_losses(model, rows, batch, self._collate, seq2seq)
        picked = chosen(losses, choices)
        hits = sum(p == choice.label for p, choice in zip(picked, choices, strict=True))
        width = len(choices[0].rows)
        right = [losses[width * n + choice.label] for n, choice in enumerate(choices)]
        loss = mean_loss(right, [choice.right for choice in choices])
        return EvalMetrics(self.step, loss, hits / len(choices))

    def after_evaluation(self, metrics: EvalMetrics) -> None:
        self.evaluations.append(metrics)
        # The model of the last step is written as `final`, by finish.
        if 0 < metrics.step < self.pace.steps and self._best() is metrics:
            self.outputs.save_best(self._write)

    def _best(self) -> EvalMetrics | None:
        """Of the highest accuracy, if there is one, and then of the lowest loss. The model before
        the first step does not count: it is the user's own."""
        trained = [metrics for metrics in self.evaluations if metrics.step > 0]
        return min(trained, key=lambda m: (-(m.accuracy or 0.0), m.eval_loss), default=None)

    # -- the end ----------------------------------------------------------------------------

    def finish(self) -> FinetuneSummary:
        """Take the steps and write the last model."""
        began = time.perf_counter()
        interrupted = self.run()
        best = self._best()
        done = self.step >= self.pace.steps
        if done:
            self.outputs.save_final(self._write, best is not None and best.step == self.step)
        first = self.evaluations[0] if self.evaluations else None
        last = self.evaluations[-1] if self.evaluations else None
        summary = asdict(self.summary(interrupted, began))
        summary["eval_loss"] = last.eval_loss if last else None
        return FinetuneSummary(
            **summary,
            eval_loss_before=first.eval_loss if first else None,
            accuracy_before=first.accuracy if first else None,
            accuracy=last.accuracy if last else None,
            best=str(self.outputs.best) if best else None,
            best_step=best.step if best else None,
            final=str(self.outputs.final) if done else None,
        )

    def _write(self, folder: Path) -> None:
        if self.config.model.lora is not None:
            save_adapter(self.session.model, folder)
        else:
            save(self.session.model, folder)
        self.blueprint.tokenizer.save_pretrained(str(folder))


def _past_evaluations(metrics: Path) -> list[EvalMetrics]:
    """What a run that is resumed has seen already."""
    return [
        EvalMetrics(line["step"], line["eval_loss"], line.get("accuracy"))
        for line in read_lines(metrics)
        if "eval_loss" in line
    ]


def finetune_lines(summary: FinetuneSummary) -> list[str]:
    """The end of a run in words."""
    lines = summary_lines(summary, COMMAND)
    if summary.accuracy_before is not None and summary.accuracy is not None:
        lines.insert(1, f"accuracy {summary.accuracy_before:.1%} → {summary.accuracy:.1%}")
    elif summary.eval_loss_before is not None and summary.eval_loss is not None:
        lines.insert(1, f"eval loss {summary.eval_loss_before:.4f} → {summary.eval_loss:.4f}")
    if summary.final is not None:
        lines.append(f"last model: {summary.final}")
    if summary.best is not None:
        lines.append(f"best model (step {summary.best_step}): {summary.best}")
    return lines

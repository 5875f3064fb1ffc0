"""`overspill finetune` and `pregate`: steps and evaluations in the loop, the best and the final
model."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from overspill.models.huggingface.dictionaries import capacities_kept
from overspill.models.huggingface.save import save
from overspill.train.batch_order import BatchOrder
from overspill.train.checkpoint import TrainState
from overspill.train.export import export
from overspill.train.finetune.classification import ChoiceRows
from overspill.train.finetune.config import FinetuneConfig
from overspill.train.finetune.data import check_sources
from overspill.train.finetune.evaluation import chosen, mean_loss, row_losses, summed_losses
from overspill.train.finetune.generation import Generator
from overspill.train.finetune.lora import check_peft, save_adapter
from overspill.train.finetune.outputs import Outputs, Write
from overspill.train.finetune.rows import IGNORED, Batch, Row, collate
from overspill.train.finetune.scores import mean_scores
from overspill.train.finetune.spec import FinetuneSpec, plan_finetuning
from overspill.train.loop import Loop, Losses, StepWork
from overspill.train.metrics import EvalMetrics, read_lines
from overspill.train.progress import Display
from overspill.train.run_folder import RunFolder, choose_folder, is_run
from overspill.train.session import Builder, Session, build_session, open_session
from overspill.train.summary import Summary
from overspill.train.team import Team
from overspill.train.trained import find_checkpoint


@dataclass(frozen=True, kw_only=True)
class FinetuneSummary(Summary):
    """Results of a fine-tuning run."""

    command: ClassVar[str] = "finetune"
    eval_loss_before: float | None
    accuracy_before: float | None
    accuracy: float | None
    """Accuracy at the end."""
    scores_before: dict[str, float] | None = None
    """Scores of generated answers before training, by the names of --metric."""
    scores: dict[str, float] | None = None
    best: str | None
    """Folder of the model with the highest accuracy or score, or the lowest evaluation loss."""
    best_step: int | None
    final: str | None
    lora: bool = False
    """Whether the models are adapters."""
    chats: bool = True
    """Whether the model answers chats, unlike encoder-decoders."""
    packing: tuple[str, ...] = ()
    """Flags with which an adapter is served on the experts that it was trained with."""

    def lines(self) -> list[str]:
        lines = super().lines()
        if self.accuracy_before is not None and self.accuracy is not None:
            lines.insert(1, f"accuracy {self.accuracy_before:.1%} → {self.accuracy:.1%}")
        elif self.eval_loss_before is not None and self.eval_loss is not None:
            lines.insert(1, f"eval loss {self.eval_loss_before:.4f} → {self.eval_loss:.4f}")
        if self.scores_before is not None and self.scores is not None:
            shares = [
                f"{name} {self.scores_before[name]:.1%} → {share:.1%}"
                for name, share in self.scores.items()
                if name in self.scores_before
            ]
            lines.insert(1, ", ".join(shares))
        kind = "adapter" if self.lora else "model"
        if self.final is not None:
            lines.append(f"final {kind}: {self.final}")
        if self.best is not None:
            lines.append(f"best {kind} (step {self.best_step}): {self.best}")
        if self.final is not None:
            words = ["chat", self.out] if self.chats else ["generate", self.out, "a text"]
            command = shlex.join(["overspill", *words, *self.packing])
            lines.append(f"to try it: {command}")
        if self.final is not None and self.lora:
            command = shlex.join(["overspill", "merge", self.out, f"{self.out}/merged"])
            lines.append(f"as a plain checkpoint: {command}")
        return lines


class PregateSummary(FinetuneSummary):
    """Results of a run that trains pre-gates."""

    command: ClassVar[str] = "pregate"


def finetune(
    config: FinetuneConfig,
    display: Display,
    build: Builder = build_session,
    team: Team | None = None,
) -> FinetuneSummary:
    """Fine-tunes as `config` says and returns the summary that `overspill finetune` prints."""
    team = team or Team()
    folder = team.first_decides(lambda: choose_folder(config))
    if config.model.lora is not None:
        check_peft()
    with team.first_before_others():  # the others find the files that it exports or downloads
        config = _with_exported(config, display)
        spec = plan_finetuning(config, display.say, team)
    with _no_progress_bars(), open_session(spec, folder, display, build) as (session, state):
        return Finetuner(spec, folder, session, state, display).finish()


def _with_exported(config: FinetuneConfig, display: Display) -> FinetuneConfig:
    """The settings with a Hugging Face checkpoint in place of a run of `overspill train`, whose
    newest checkpoint is exported once, into the folder of that run."""
    run = Path(config.model.checkpoint).expanduser()
    if not config.model.checkpoint or not is_run(run):
        return config
    out = run / f"exported-{find_checkpoint(run)[1].name}"
    check_sources(config.data)  # an export takes a while
    if not out.exists():
        display.say(f"exporting {run} to {out}")
        export(run, out)
    return replace(config, model=replace(config.model, checkpoint=str(out)))


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Hides the bars of transformers, which would overwrite that of the run."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@dataclass(frozen=True)
class _MicroBatch:
    """This rank's part of a micro-batch."""

    batch: Batch
    inputs: dict[str, Any]
    """The arguments of the model."""
    share: float
    """Its share in the loss of the step."""


class Finetuner(Loop[FinetuneSummary]):
    """Loop over rows of examples."""

    spec: FinetuneSpec

    def __init__(
        self,
        spec: FinetuneSpec,
        folder: RunFolder,
        session: Session,
        state: TrainState,
        display: Display,
    ) -> None:
        super().__init__(spec, folder, session, state, display)
        self.config, self.data = spec.config, spec.data
        self.order = BatchOrder(len(self.data.train), self.config.run.seed)
        self.outputs = Outputs(folder.path)
        self.evaluations = _past_evaluations(folder.metrics)

    # -- steps ------------------------------------------------------------------------------

    def before_steps(self) -> None:
        if self.step < self.spec.steps and self.team.is_first:
            self.outputs.reopen()
        if self.step == 0 and self.data.evaluates and not self.evaluations:
            self.take_evaluation()

    def backward(self) -> StepWork:
        """Micro-batches one after another; every learned token of the step has the same weight."""
        section = self.config.data
        chosen_rows = self.order.take(self.position, self.config.sequences_per_step)
        rows = [self.data.train[number] for number in chosen_rows]
        pieces = [rows[at : at + section.batch] for at in range(0, len(rows), section.batch)]
        learned = sum(row.learned for row in rows)
        micro_batches = [self._micro_batch(piece, learned) for piece in pieces]
        total = Losses(0.0, 0.0, 0.0)

        def loss_of(number: int, output: Any) -> Tensor:
            nonlocal total
            micro_batch = micro_batches[number]
            total = total.plus(self._losses(output, micro_batch.batch), micro_batch.share)
            loss: Tensor = output.loss
            return loss * micro_batch.share

        self.backward_each([each.inputs for each in micro_batches], loss_of)
        tokens = sum(len(row.tokens) for row in rows)
        if self.spec.seq2seq:
            tokens += learned
        return StepWork(total, sequences=len(rows), tokens=tokens)

    def _micro_batch(self, rows: Sequence[Row], learned: int) -> "_MicroBatch":
        """This rank's part of a micro-batch, in a step with `learned` learned tokens."""
        own, counted = self.team.own(rows)
        # times the number of ranks, over which gradients and losses are averaged
        share = self.team.size * sum(row.learned for row in own[:counted]) / learned
        batch = self._collate(own)
        extra = {"output_router_logits": True} if self.config.model.balance else {}
        return _MicroBatch(batch, {**batch, "use_cache": False, **extra}, share)

    def _losses(self, output: Any, batch: Batch) -> Losses:
        loss = output.loss.item()
        self.check_finite(loss)
        balanced = self.config.model.balance
        ce = self._cross_entropy(output.logits, batch["labels"]) if balanced else loss
        return Losses(loss, ce, loss - ce)

    def _cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor) -> float:
        total = summed_losses(logits, labels, self.spec.seq2seq).sum().item()
        return float(total / (labels != IGNORED).sum().item())

    def _collate(self, rows: Sequence[Row]) -> Batch:
        return collate(rows, self.spec.pad, self.spec.device)

    # -- evaluations ------------------------------------------------------------------------

    def evaluate(self) -> EvalMetrics:
        with capacities_kept(self.session.model):
            return self._evaluate()

    def _evaluate(self) -> EvalMetrics:
        choices = self.data.eval_choices
        if not choices:
            rows = self.data.eval_rows
            loss = mean_loss(self._row_losses(rows), rows)
            return EvalMetrics(self.step, loss, scores=self._scores())
        losses = self._row_losses(ChoiceRows(choices))
        picked = chosen(losses, choices)
        hits = sum(p == choice.label for p, choice in zip(picked, choices, strict=True))
        width = len(choices[0].answers)
        right = [losses[width * n + choice.label] for n, choice in enumerate(choices)]
        loss = mean_loss(right, [choice.right for choice in choices])
        return EvalMetrics(self.step, loss, hits / len(choices))

    def _scores(self) -> dict[str, float] | None:
        """The scores of the model's current answers."""
        questions = self.data.questions
        if questions is None:
            return None
        generator = Generator(
            questions,
            self.team,
            self.spec.device,
            self.spec.pad,
            self.config.data.batch,
            self.spec.seq_len,
        )
        answers = [
            self.spec.tokenizer.decode(tokens, skip_special_tokens=True)
            for tokens in generator.answers(self.session.model)
        ]
        references = [question.references for question in questions.items]
        return mean_scores(self.config.metrics, answers, references)

    def _row_losses(self, rows: Sequence[Row]) -> list[float]:
        section, model = self.config.data, self.session.model
        return row_losses(
            model,
            rows,
            section.batch,
            self._collate,
            self.spec.seq2seq,
            self.team,
            self.stages,
            section.accumulate if self.stages is not None else 1,
        )

    def after_evaluation(self, metrics: EvalMetrics) -> None:
        self.evaluations.append(metrics)
        # The model of the last step is written as `final`, by after_steps.
        if 0 < metrics.step < self.spec.steps and self._best() is metrics:
            self._keep_model(self.outputs.save_best)

    def _best(self) -> EvalMetrics | None:
        """The best evaluation: highest accuracy or first score of --metric, if there is one, then
        lowest loss. The evaluation before the first step does not count: its model is the given
        checkpoint."""
        trained = [metrics for metrics in self.evaluations if metrics.step > 0]

        def rank(metrics: EvalMetrics) -> tuple[float, float]:
            quality = metrics.accuracy or 0.0
            if self.config.metrics:
                quality = (metrics.scores or {}).get(self.config.metrics[0], 0.0)
            return -quality, metrics.eval_loss

        return min(trained, key=rank, default=None)

    # -- the end ----------------------------------------------------------------------------

    def after_steps(self) -> None:
        if self.step >= self.spec.steps:
            best = self._best()
            is_best = best is not None and best.step == self.step
            self._keep_model(lambda write: self.outputs.save_final(write, is_best))

    def summary(self, interrupted: bool, seconds: float) -> FinetuneSummary:
        best = self._best()
        first = self.evaluations[0] if self.evaluations else None
        last = self.evaluations[-1] if self.evaluations else None
        base = asdict(self.base_summary(interrupted, seconds))
        base["eval_loss"] = last.eval_loss if last else None
        kind = PregateSummary if self.config.pregate_level else FinetuneSummary
        return kind(
            **base,
            eval_loss_before=first.eval_loss if first else None,
            accuracy_before=first.accuracy if first else None,
            accuracy=last.accuracy if last else None,
            scores_before=first.scores if first else None,
            scores=last.scores if last else None,
            best=str(self.outputs.best) if best else None,
            best_step=best.step if best else None,
            final=str(self.outputs.final) if self.step >= self.spec.steps else None,
            lora=self.config.model.lora is not None,
            chats=not self.spec.seq2seq,
            packing=self.config.model.serving_flags,
        )

    def _keep_model(self, keep: Callable[[Write], None]) -> None:
        """Write the model on all ranks, into a folder that the first one makes."""
        if self.team.is_first:
            keep(self._write)
        else:
            self._write(self.outputs.final)

    def _write(self, folder: Path) -> None:
        if self.config.model.lora is None:
            save(self.session.model, folder)
        elif self.team.is_first:
            save_adapter(self.session.model, folder)
        if self.team.is_first:
            self.spec.tokenizer.save_pretrained(str(folder))


def _past_evaluations(metrics: Path) -> list[EvalMetrics]:
    """The evaluations before the run was interrupted."""
    return [
        EvalMetrics(line["step"], line["eval_loss"], line.get("accuracy"), line.get("scores"))
        for line in read_lines(metrics)
        if "eval_loss" in line
    ]

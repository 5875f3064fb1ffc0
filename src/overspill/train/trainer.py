"""`overspill train`: its steps and evaluations in the loop."""

from itertools import islice
from typing import Any

from torch import Tensor

from overspill.train.config import TrainConfig
from overspill.train.loop import Loop, Losses, StepWork
from overspill.train.metrics import EvalMetrics
from overspill.train.progress import Display
from overspill.train.run_folder import choose_folder
from overspill.train.session import Builder, build_session, open_session
from overspill.train.summary import Summary
from overspill.train.team import Team
from overspill.train.train_spec import TrainSpec, plan_training


def train(
    config: TrainConfig,
    display: Display,
    build: Builder = build_session,
    team: Team | None = None,
) -> Summary:
    """Trains as `config` says and returns the summary that `overspill train` prints."""
    team = team or Team()
    folder = team.first_decides(lambda: choose_folder(config))
    with team.first_before_others():  # the others find the tokens in the cache
        spec = plan_training(config, display.say, team)
    with open_session(spec, folder, display, build) as (session, state):
        return Trainer(spec, folder, session, state, display).finish()


class Trainer(Loop[Summary]):
    """Loop over tokenized text."""

    spec: TrainSpec

    def backward(self) -> StepWork:
        config, device, team = self.spec.config, self.spec.device, self.spec.team
        batch = self.spec.data.train_batch(self.position, config.sequences_per_step)
        tokens, targets = (
            team.own_sequences(tensor, config.data.accumulate).to(device, non_blocking=True)
            for tensor in batch
        )
        count = config.data.accumulate
        if self.stages is not None or config.accumulates:
            losses = self._accumulate(tokens, targets, count)
        else:
            out = self.session.model(tokens, targets, pieces=count)
            losses = self._losses(out)
            out.loss.backward()
        return StepWork(losses, sequences=len(batch[0]), tokens=batch[0].numel())

    def _accumulate(self, tokens: Tensor, targets: Tensor, count: int) -> Losses:
        """The losses of micro-batches that are computed one after another."""
        total = Losses(0.0, 0.0, 0.0)
        share = self.team.n_stages / count  # one rank along stages has the losses

        def loss_of(number: int, output: Any) -> Tensor:
            nonlocal total
            total = total.plus(self._losses(output), share)
            loss: Tensor = output.loss / count * self.team.n_stages
            return loss

        pairs = zip(tokens.chunk(count), targets.chunk(count), strict=True)
        batches = [{"tokens": piece, "targets": target} for piece, target in pairs]
        self.backward_each(batches, loss_of)
        return total

    def _losses(self, out: Any) -> Losses:
        losses = Losses(out.loss.item(), out.ce.item(), out.balance.item())
        self.check_finite(losses.loss)
        return losses

    def evaluate(self) -> EvalMetrics:
        config, device, team = self.spec.config, self.spec.device, self.spec.team
        total, count = 0.0, 0
        batches = self.spec.data.eval_batches(config.run.eval_batches, config.data.batch)
        at_once = 1 if self.stages is None else config.data.accumulate
        while group := list(islice(batches, at_once)):
            inputs, counts = [], []
            for tokens, targets in group:
                rows, counted = team.own(range(len(tokens)))
                own = slice(rows[0], rows[-1] + 1)
                piece = {"tokens": tokens[own].to(device), "targets": targets[own].to(device)}
                inputs.append(piece)
                counts.append(counted)

            def take(number: int, out: Any, counts: list[int] = counts) -> None:
                nonlocal total, count
                total, count = total + out.ce.item() * counts[number], count + counts[number]

            if self.stages is not None:
                self.stages.forward(inputs, take)
            else:
                take(0, self.session.model(**inputs[0]))
        total, n_sequences = team.sums([total, count])
        return EvalMetrics(self.step, total / n_sequences)

    def summary(self, interrupted: bool, seconds: float) -> Summary:
        return self.base_summary(interrupted, seconds)

"""`overspill train`: its steps and evaluations in the loop."""

from contextlib import nullcontext

import torch

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
    with team.first_before_others():  # which find the tokens in the cache
        spec = plan_training(config, display.say, team)
    with open_session(spec, folder, display, build) as (session, state):
        return Trainer(spec, folder, session, state, display).finish()


class Trainer(Loop[Summary]):
    """The loop over tokenized text."""

    spec: TrainSpec

    def backward(self) -> StepWork:
        config, device, team = self.spec.config, self.spec.device, self.spec.team
        batch = self.spec.data.train_batch(self.position, config.sequences_per_step)
        tokens, targets = (
            team.own_sequences(tensor, config.data.accumulate).to(device, non_blocking=True)
            for tensor in batch
        )
        if config.accumulates:
            losses = self._accumulate(tokens, targets, config.data.accumulate)
        else:
            losses = self._backward(tokens, targets, pieces=config.data.accumulate)
        return StepWork(losses, sequences=len(batch[0]), tokens=batch[0].numel())

    def _accumulate(self, tokens: torch.Tensor, targets: torch.Tensor, count: int) -> Losses:
        """Each micro-batch passes all layers before the next begins."""
        total = Losses(0.0, 0.0, 0.0)
        pairs = list(zip(tokens.chunk(count), targets.chunk(count), strict=True))
        for number, (piece, target) in enumerate(pairs, start=1):
            with self.optimizer.accumulate() if number < count else nullcontext():
                total = total.plus(self._backward(piece, target, parts=count), 1 / count)
        return total

    def _backward(
        self, tokens: torch.Tensor, targets: torch.Tensor, pieces: int = 1, parts: int = 1
    ) -> Losses:
        """`pieces` micro-batches that pass each expert together; one of `parts` of the step."""
        out = self.session.model(tokens, targets, pieces=pieces)
        losses = Losses(out.loss.item(), out.ce.item(), out.balance.item())
        self.check_finite(losses.loss)
        (out.loss / parts).backward()
        return losses

    def evaluate(self) -> EvalMetrics:
        config, device, team = self.spec.config, self.spec.device, self.spec.team
        total, count = 0.0, 0
        batches = self.spec.data.eval_batches(config.run.eval_batches, config.data.batch)
        for tokens, targets in batches:
            rows, counted = team.own(range(len(tokens)))
            own = slice(rows[0], rows[-1] + 1)
            out = self.session.model(tokens[own].to(device), targets[own].to(device))
            total, count = total + out.ce.item() * counted, count + counted
        total, n_sequences = team.sums([total, count])
        return EvalMetrics(self.step, total / n_sequences)

    def summary(self, interrupted: bool, seconds: float) -> Summary:
        return self.base_summary(interrupted, seconds)

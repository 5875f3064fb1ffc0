"""Training, top-down: prepare, build, take steps, leave everything in the run's folder."""

import time
from contextlib import nullcontext
from pathlib import Path

import torch

from overspill.train import checkpoint
from overspill.train.checkpoint import TrainState
from overspill.train.config import TrainConfig
from overspill.train.data import Data, find_files, split, tokenize
from overspill.train.loop import Loop, Losses, Origin, Pace, Work, find_start
from overspill.train.metrics import EvalMetrics
from overspill.train.progress import Display
from overspill.train.run_folder import RunFolder, choose_folder
from overspill.train.session import Blueprint, Builder, Session, build_session, draw_up
from overspill.train.summary import Summary
from overspill.train.tokenizer import Tokenizer, load_tokenizer


def train(config: TrainConfig, display: Display, build: Builder = build_session) -> Summary:
    """Train as `config` says; the returned summary is also what `overspill train` prints."""
    folder = choose_folder(config)
    tokenizer = load_tokenizer(config.data.tokenizer)
    blueprint = draw_up(config, tokenizer, display.say)
    data = _load_data(blueprint, tokenizer, display)
    with folder:
        resume = config.run.resume
        start = find_start(folder, blueprint.facts, data.digest, display) if resume else None
        session = build(blueprint, display.say)
        try:
            display.say(session.engine.describe())
            # Not before: a run that could not be built leaves nothing behind.
            folder.write_config(config)
            state = TrainState(0, 0, data.digest, blueprint.facts)
            if start is not None:
                state = checkpoint.load(start, session.model, session.engine, session.optimizer)
            began = time.perf_counter()
            trainer = Trainer(blueprint, folder, data, session, state, display)
            interrupted = trainer.run()
            return trainer.summary(interrupted, began)
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


class Trainer(Loop):
    """The loop over tokenized text."""

    def __init__(
        self,
        blueprint: Blueprint,
        folder: RunFolder,
        data: Data,
        session: Session,
        state: TrainState,
        display: Display,
    ) -> None:
        self.config, self.data = blueprint.config, data
        run, optim = self.config.run, self.config.optim
        pace = Pace(
            steps=run.steps,
            eval_every=run.eval_every,
            save_every=run.save_every,
            keep=run.keep,
            log_every=run.log_every,
            trace_steps=run.trace_steps,
            warmup=optim.warmup,
            min_lr=optim.min_lr,
        )
        name = self.config.model.preset
        origin = Origin("train", name, blueprint.lr, data.digest, blueprint.facts)
        super().__init__(pace, origin, folder, session, state, display)

    def backward(self) -> Work:
        section, device = self.config.data, self.session.device
        tokens, targets = self.data.train_batch(self.position, self.config.sequences_per_step)
        tokens = tokens.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        if section.group or section.accumulate == 1:
            losses = self._backward(tokens, targets, section.accumulate)
        else:
            losses = self._backward_one_by_one(tokens, targets, section.accumulate)
        return Work(losses, rows=len(tokens), tokens=tokens.numel())

    def _backward(self, tokens: torch.Tensor, targets: torch.Tensor, pieces: int) -> Losses:
        out = self.session.model(tokens, targets, pieces=pieces)
        losses = Losses(out.loss.item(), out.ce.item(), out.balance.item())
        self.check_finite(losses.loss)
        out.loss.backward()
        return losses

    def _backward_one_by_one(
        self, tokens: torch.Tensor, targets: torch.Tensor, count: int
    ) -> Losses:
        """The plain loop: each micro-batch passes all layers before the next begins."""
        total = Losses(0.0, 0.0, 0.0)
        pairs = list(zip(tokens.chunk(count), targets.chunk(count), strict=True))
        for number, (piece, target) in enumerate(pairs, start=1):
            with self.optimizer.accumulate() if number < count else nullcontext():
                out = self.session.model(piece, target)
                losses = Losses(out.loss.item(), out.ce.item(), out.balance.item())
                self.check_finite(losses.loss)
                (out.loss / count).backward()
            total = total.plus(losses, 1 / count)
        return total

    def evaluate(self) -> EvalMetrics:
        run, section, device = self.config.run, self.config.data, self.session.device
        total, count = 0.0, 0
        for tokens, targets in self.data.eval_batches(run.eval_batches, section.batch):
            out = self.session.model(tokens.to(device), targets.to(device))
            total, count = total + out.ce.item() * len(tokens), count + len(tokens)
        return EvalMetrics(self.step, total / count)

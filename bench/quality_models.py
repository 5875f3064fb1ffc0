"""The models of bench/pregate_quality.py: trained on wikitext-2, then fine-tuned with pre-gates."""

import gc
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from quality_tasks import SST2, Sst2, Task, Wikitext

import overspill
from overspill.core.garbage import short_collections
from overspill.models import GPTConfig, GPTMoE
from overspill.train.checkpoint_tensors import read_model, write_model
from overspill.train.schedule import make_scheduler

LEVELS = (0, 1, 2, 3)
BEFORE, AFTER, NOT_TRAINED = "before", "after", "not-trained"
_FINETUNING = 100  # added to the seed: another order of the data than in the first training


@dataclass(frozen=True)
class Base:
    """The model before fine-tuning, and its training."""

    vocab: int = 8192
    n_layers: int = 8
    d_model: int = 384
    d_hidden: int = 1024
    n_heads: int = 6
    seq_len: int = 256
    base_batch: int = 32
    base_steps: int = 1500
    base_lr: float = 1e-3
    characters: int | None = None
    """How much of each text is used; None: everything."""

    def config(self, balance: bool = True) -> GPTConfig:
        return GPTConfig(
            vocab=self.vocab, n_layers=self.n_layers, d_model=self.d_model, d_hidden=self.d_hidden,
            n_heads=self.n_heads, n_experts=8, top_k=2, gated=True, max_seq=self.seq_len,
            balance_coef=0.01 if balance else 0.0,
        )  # fmt: skip

    @property
    def active_params(self) -> int:
        """Parameters that one token uses."""
        config = self.config()
        return config.dense_params + config.expert_params * config.top_k // config.n_experts


@dataclass(frozen=True)
class Tuning:
    """Fine-tuning on both tasks."""

    steps: int = 400
    batch: int = 32
    lr: float = 3e-4
    sst2_steps: int = 350
    sst2_batch: int = 128
    sst2_lr: float = 3e-4
    sentences: int | None = None
    """How much of each file of SST-2 is used; None: everything."""


TINY = (
    Base(512, 4, 32, 32, 2, seq_len=32, base_batch=8, base_steps=5, characters=4_000),
    Tuning(steps=3, batch=8, sst2_steps=3, sst2_batch=8, sentences=16),
)


@dataclass(frozen=True)
class Figure:
    """The perplexity or accuracy of a model of this level."""

    level: int
    when: str
    """Before or after fine-tuning with these gates; not-trained: the conventional model was
    fine-tuned, then its gates became pre-gates."""
    value: float


class Models:
    """Models, trained and evaluated; results of earlier calls are read from `work`."""

    def __init__(self, base: Base, tuning: Tuning, data: Path, work: Path, device: str) -> None:
        self.base, self.tuning, self.data, self.work, self.device = base, tuning, data, work, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32

    @property
    def digest(self) -> str:
        return _digest(self.base, self.tuning, self.device)

    @cached_property
    def wikitext(self) -> Wikitext:
        base = self.base
        return Wikitext(self.data, base.vocab, base.seq_len, base.characters, self.device)

    @cached_property
    def sst2(self) -> Sst2:
        most = self.tuning.sentences
        return Sst2(self.data, self.wikitext.tokenizer, self.base.seq_len, most, self.device)

    def base_file(self, seed: int) -> Path:
        return self.work / f"base-{_digest(self.base, self.device)}-{seed}.safetensors"

    def train_base(self, seed: int) -> None:
        """The first training; shows the perplexity during it, to see if it goes on for too long."""
        base = self.base
        with self._model(None, seed) as model:
            batches = self.wikitext.batches(seed, base.base_batch)
            for step in _train(model, batches, base.base_steps, base.base_lr, min_lr=0.1):
                if step % max(1, base.base_steps // 5) == 0:
                    perplexity = self.wikitext.evaluate(model)
                    print(f"  step {step}: validation perplexity {perplexity:.2f}", flush=True)
            self._write(self.base_file(seed), model)

    def finetune(self, name: str, seed: int, level: int) -> Iterator[Figure]:
        """Fine-tunes the base of this seed. Level 0 also gives the figures without training of the
        other levels."""
        tuning = self.tuning
        task: Task
        if name == SST2:
            task, size, steps, lr = self.sst2, tuning.sst2_batch, tuning.sst2_steps, tuning.sst2_lr
        else:
            task, size, steps, lr = self.wikitext, tuning.batch, tuning.steps, tuning.lr
        # the balance loss would count the padding after sentences too
        balance = name != SST2
        tuned = self.work / f"tuned-{name}-{seed}.safetensors"
        with self._model(self.base_file(seed), seed, level, balance) as model:
            yield Figure(level, BEFORE, task.evaluate(model))
            for _ in _train(model, task.batches(seed + _FINETUNING, size), steps, lr, min_lr=0.0):
                pass
            yield Figure(level, AFTER, task.evaluate(model))
            if level == 0:
                self._write(tuned, model)
        for other in LEVELS[1:] if level == 0 else ():
            with self._model(tuned, seed, other) as model:
                yield Figure(other, NOT_TRAINED, task.evaluate(model))
        tuned.unlink(missing_ok=True)

    @contextmanager
    def _model(
        self, file: Path | None, seed: int, level: int = 0, balance: bool = True
    ) -> Iterator[Any]:
        """A new model, or that of a file, with all experts on the device."""
        model: Any = GPTMoE(
            self.base.config(balance),
            checkpoint=False,
            seed=seed,
            meta_experts=True,
            device=self.device,
            dtype=self.dtype,
        )
        overspill.offload(model, device=self.device, mode="gpu", progress=False, quiet=True)
        try:
            if file is not None:
                read_model(file, model, model.overspill)
            if level:
                overspill.pregate(model, level)
            yield model
        finally:
            model.overspill.close()
            del model
            gc.collect()

    def _write(self, file: Path, model: Any) -> None:
        """An interrupted call leaves no incomplete file that a later one would read."""
        aside = file.with_suffix(".part")
        model.overspill.flush()
        write_model(aside, model, model.overspill)
        os.replace(aside, file)


def _train(
    model: Any,
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    lr: float,
    min_lr: float,
) -> Iterator[int]:
    """Takes the steps of a cosine schedule and yields their numbers, from 1 on."""
    optimizer = overspill.AdamW(
        model, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0
    )
    scheduler = make_scheduler(optimizer, 0, steps // 15, steps, min_lr)
    with short_collections():
        for step in range(1, steps + 1):
            model(*next(batches)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            yield step


def _digest(*settings: Any) -> str:
    return hashlib.blake2b(repr(settings).encode(), digest_size=4).hexdigest()

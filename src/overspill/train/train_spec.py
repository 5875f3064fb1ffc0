"""Specification of a run of `overspill train`: the shape of the model and the data."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill.core.errors import ConfigError
from overspill.hardware.machine import choose_device
from overspill.models.budgets import Budgets
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.models.offload import offload_within
from overspill.models.presets import get_preset
from overspill.train.checkpoint import Fact
from overspill.train.config import TrainConfig
from overspill.train.data import TokenData, find_files, split, tokenize
from overspill.train.run_spec import ModelSize, RunSpec, check_stages
from overspill.train.team import Team
from overspill.train.tokenizer import Tokenizer, load_tokenizer, vocab_size

# Flags whose field in the model's config has another name.
_FIELDS = {"experts": "n_experts", "layers": "n_layers", "heads": "n_heads"}
_FLAGS = {field: flag for flag, field in _FIELDS.items()}


@dataclass(frozen=True)
class TrainSpec(RunSpec):
    """A `GPTMoE` to train on tokenized text."""

    config: TrainConfig
    shape: GPTConfig
    data: TokenData

    @property
    def budgets(self) -> Budgets:
        return self.with_activations(super().budgets, self.shape.d_model, self.shape.n_layers)

    def model_size(self) -> ModelSize:
        shape = self.shape
        return ModelSize(shape.dense_params, shape.expert_params, shape.top_k / shape.n_experts)

    def load_model(self) -> Any:
        model = GPTMoE(
            self.shape,
            checkpoint=self.config.model.checkpoint_layers,
            seed=self.config.run.seed,
            meta_experts=True,  # the engine initializes each expert in its place
            device=self.device,
            dtype=self.dtype,
        )
        return offload_within(model, self.budgets)


def shape_of(facts: Mapping[str, Fact], max_seq: int) -> GPTConfig:
    """The shape of a model, from the facts in its checkpoint."""
    fields = [field.name for field in dataclasses.fields(GPTConfig) if field.name != "max_seq"]
    known: dict[str, Any] = {name: facts[_FLAGS.get(name, name)] for name in fields}
    return GPTConfig(**known, max_seq=max_seq)


def plan_training(
    config: TrainConfig, say: Callable[[str], None], team: Team | None = None
) -> TrainSpec:
    """Read the data, and choose the settings that the config leaves open."""
    team = team or Team()
    team.check_batch(config.data.batch)
    section, lr = config.data, config.optim.lr
    tokenizer = load_tokenizer(section.tokenizer)
    shape = _model_shape(config, tokenizer)
    if config.stages is not None:
        check_stages(config.stages, shape.n_layers, f"this {config.model.preset}")
    device = choose_device(config.memory.device)
    slots = _slots(config, shape, team.node_size, say)
    seq_len = section.seq_len or shape.max_seq
    files = find_files(section.data)
    tokens = tokenize(files, tokenizer, Path(section.cache).expanduser(), say)
    data = split(tokens, seq_len, config.run.seed, section.data)
    say(f"data: {section.data}, {data.n_tokens:,} tokens in {len(files)} files")
    sizes = dataclasses.asdict(shape)
    del sizes["max_seq"]  # no tensor has this size
    return TrainSpec(
        config=config,
        device=device,
        slots=slots,
        seq_len=seq_len,
        steps=config.run.steps,
        lr=lr if lr is not None else min(1e-3, 0.46 / shape.d_model),
        warmup=config.optim.warmup,
        eval_every=config.run.eval_every,
        data_digest=data.digest,
        model_facts={_FLAGS.get(name, name): value for name, value in sizes.items()},
        team=team,
        shape=shape,
        data=data,
    )


def _model_shape(config: TrainConfig, tokenizer: Tokenizer) -> GPTConfig:
    section = config.model
    names = ("experts", "layers", "heads", "d_model", "d_hidden", "top_k", "moe_every", "gated")
    asked = {_FIELDS.get(name, name): getattr(section, name) for name in names}
    changes = {name: value for name, value in asked.items() if value is not None}
    vocab = section.vocab or vocab_size(tokenizer)
    if vocab < tokenizer.ids:
        raise ConfigError(
            f"--vocab {vocab} is below the {tokenizer.ids} tokens of {tokenizer.name}; give at "
            "least that, or omit --vocab"
        )
    shape = get_preset(section.preset, **changes, vocab=vocab)
    if config.data.seq_len is not None:
        # Positions are rotary: a longer context has no more parameters.
        shape = dataclasses.replace(shape, max_seq=max(shape.max_seq, config.data.seq_len))
    return shape


def _slots(
    config: TrainConfig, shape: GPTConfig, n_ranks: int, say: Callable[[str], None]
) -> int | None:
    """The number of GPU slots. `nano` fits on any GPU: without a budget it gets a number that makes
    it offload."""
    memory = config.memory
    given = (memory.gpu_memory, memory.host_memory, memory.disk, memory.slots, memory.host_slots)
    if config.model.preset != "nano" or memory.mode != "auto" or any(given):
        return memory.slots
    experts = shape.n_moe_layers * shape.n_experts
    slots = max(2, experts // n_ranks // 8)
    where = "the compute device" if n_ranks == 1 else f"each of {n_ranks} devices"
    say(
        f"nano: {slots} of its {experts} experts (one eighth) fit on {where}; change this with "
        "--gpu-memory, --slots or --mode"
    )
    return slots

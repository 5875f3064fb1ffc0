"""The model, its engine and its optimizer, built from a config."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from overspill.core.errors import ConfigError
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.models.offload import offload
from overspill.models.presets import get_preset
from overspill.moe.settings import Settings
from overspill.optim.adamw import AdamW
from overspill.trace.recorder import Recorder
from overspill.train.checkpoint import ExpertWeights, Fact, OptimizerStates
from overspill.train.config import MemorySection, TrainConfig
from overspill.train.tokenizer import Tokenizer, vocab_size

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Flags whose field in the model's config has another name.
_FIELDS = {"experts": "n_experts", "layers": "n_layers", "heads": "n_heads"}
_FLAGS = {field: flag for flag, field in _FIELDS.items()}


class Engine(ExpertWeights, Protocol):
    """What the trainer needs of the engine, beside its weights."""

    @property
    def recorder(self) -> Recorder: ...

    def describe(self) -> str: ...

    def bytes_by_tier(self) -> dict[str, int]: ...

    def close(self) -> None: ...


class Optimizer(OptimizerStates, Protocol):
    """What the trainer needs of the optimizer, which is also a `torch.optim.Optimizer`."""

    param_groups: list[dict[str, Any]]

    @property
    def total_norm(self) -> float | None: ...

    def accumulate(self) -> AbstractContextManager[object]: ...

    def step(self) -> object: ...

    def zero_grad(self) -> object: ...


@dataclass(frozen=True)
class Session:
    """What a run trains."""

    model: torch.nn.Module
    engine: Engine
    optimizer: Optimizer
    device: torch.device


@dataclass(frozen=True)
class Blueprint:
    """Everything a session is made from, decided and checked before any memory is taken."""

    config: TrainConfig
    shape: GPTConfig
    seq_len: int
    device: torch.device
    dtype: torch.dtype
    lr: float
    slots: int | None

    @property
    def facts(self) -> dict[str, Fact]:
        """What must be equal for a checkpoint to fit: tensors, and the meaning of a position."""
        fields: dict[str, Fact] = {
            _FLAGS.get(name, name): value
            for name, value in dataclasses.asdict(self.shape).items()
            if name != "max_seq"  # no tensor has this size
        }
        return {
            **fields,
            "dtype": str(self.dtype).removeprefix("torch."),
            "state_dtype": self.config.optim.state_dtype,
            "seq_len": self.seq_len,
            "seed": self.config.run.seed,
        }


def shape_of(facts: Mapping[str, Fact], max_seq: int) -> GPTConfig:
    """The model whose checkpoint has these facts."""
    fields = [field.name for field in dataclasses.fields(GPTConfig) if field.name != "max_seq"]
    known: dict[str, Any] = {name: facts[_FLAGS.get(name, name)] for name in fields}
    return GPTConfig(**known, max_seq=max_seq)


Builder = Callable[[Blueprint, Callable[[str], None]], Session]


def draw_up(
    config: TrainConfig, tokenizer: Tokenizer, say: Callable[[str], None] = lambda line: None
) -> Blueprint:
    """Decide what the config leaves open."""
    shape = _model_shape(config, tokenizer)
    device = choose_device(config.memory.device)
    lr = config.optim.lr if config.optim.lr is not None else min(1e-3, 0.46 / shape.d_model)
    return Blueprint(
        config=config,
        shape=shape,
        seq_len=config.data.seq_len or shape.max_seq,
        device=device,
        dtype=choose_dtype(config.memory.dtype, device),
        lr=lr,
        slots=_slots(config, shape, say),
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
            "least that, or leave it out"
        )
    shape = get_preset(section.preset, **changes, vocab=vocab)
    if config.data.seq_len is not None:
        # Positions are rotary: a longer context takes no parameters.
        shape = dataclasses.replace(shape, max_seq=max(shape.max_seq, config.data.seq_len))
    return shape


def choose_device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name} is not known; give cuda or cpu") from error
    if device.type not in ("cuda", "cpu"):
        raise ConfigError(f"--device {name} is not supported; give cuda or cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device {name}: torch {torch.__version__} sees no CUDA GPU here; give --device cpu"
        )
    return device


def choose_dtype(name: str | None, device: torch.device) -> torch.dtype:
    return DTYPES[name or ("bf16" if device.type == "cuda" else "fp32")]


def _slots(config: TrainConfig, shape: GPTConfig, say: Callable[[str], None]) -> int | None:
    """`nano` fits on any GPU, so without a budget of the user's it gets one that shows offload."""
    memory = config.memory
    given = (memory.gpu_memory, memory.host_memory, memory.disk, memory.slots, memory.host_slots)
    if config.model.preset != "nano" or memory.mode != "auto" or any(given):
        return memory.slots
    experts = shape.n_moe_layers * shape.n_experts
    slots = max(2, experts // 8)
    say(
        f"nano: {slots} of its {experts} experts fit on the compute device, one eighth; give "
        "--gpu-memory, --slots or --mode for another budget"
    )
    return slots


def _keeps_gradients(config: TrainConfig) -> bool:
    """Whether gradients of experts will wait: for the norm, for more of them, or for step()."""
    one_by_one = config.data.accumulate > 1 and not config.data.group
    return config.optim.clip > 0 or one_by_one or not config.memory.overlap_updates


def engine_settings(memory: MemorySection) -> Settings:
    return Settings(
        pin_share=memory.pin,
        overlap_updates=memory.overlap_updates,
        overlap_uploads=memory.overlap_uploads,
        waves=memory.waves,
        activations=memory.activations,
        cpu_experts=memory.cpu_experts,
        lookahead=memory.lookahead,
        threads=memory.threads,
    )


def build_session(blueprint: Blueprint, say: Callable[[str], None]) -> Session:
    """Take the memory and build the model into it."""
    config, memory, optim = blueprint.config, blueprint.config.memory, blueprint.config.optim
    model = GPTMoE(
        blueprint.shape,
        checkpoint=config.model.checkpoint_layers,
        seed=config.run.seed,
        meta_experts=True,  # the engine makes each expert where it will live
        device=blueprint.device,
        dtype=blueprint.dtype,
    )
    offload(
        model,
        gpu_memory=memory.gpu_memory,
        host_memory=memory.host_memory,
        disk=memory.disk,
        device=blueprint.device,
        mode=memory.mode,
        slots=blueprint.slots,
        host_slots=memory.host_slots,
        settings=engine_settings(memory),
        state_dtype=DTYPES[optim.state_dtype],
        keep_gradients=_keeps_gradients(config),
        quiet=True,  # the trainer says what lies where
    )
    engine = cast(Engine, model.overspill)
    try:
        optimizer = AdamW(
            model,
            lr=blueprint.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            max_grad_norm=optim.clip or None,
            state_dtype=DTYPES[optim.state_dtype],
        )
    except BaseException:
        engine.close()
        raise
    return Session(model=model, engine=engine, optimizer=optimizer, device=blueprint.device)

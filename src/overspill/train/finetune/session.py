"""The model, its tokenizer and its optimizer, from a checkpoint and a config."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from overspill.core.errors import ConfigError
from overspill.models.huggingface.dictionaries import dropouts_inside_experts
from overspill.models.huggingface.folder import find_folder, read_config
from overspill.models.huggingface.load import load
from overspill.optim.adamw import AdamW
from overspill.train.checkpoint import Fact
from overspill.train.finetune.config import FinetuneConfig
from overspill.train.finetune.data import Data, load_data
from overspill.train.finetune.encoding import Tokenizer
from overspill.train.finetune.lora import add_lora
from overspill.train.session import (
    DTYPES,
    Engine,
    Session,
    choose_device,
    choose_dtype,
    engine_settings,
)

_SEQ_LEN = 1024  # when nobody says: long enough for most examples, and not a model's 128k
_LR, _LORA_LR = 1e-5, 1e-4


@dataclass(frozen=True)
class Blueprint:
    """Everything a session is made from, decided and checked before any memory is taken."""

    config: FinetuneConfig
    folder: Path
    """Of the checkpoint."""
    model_config: Any
    tokenizer: Tokenizer
    data: Data
    seq_len: int
    device: torch.device
    dtype: torch.dtype
    steps: int
    overrides: dict[str, Any]
    """Fields of the model's config that are replaced."""

    @property
    def lr(self) -> float:
        asked = self.config.optim.lr
        if asked is not None:
            return asked
        return _LR if self.config.model.lora is None else _LORA_LR

    @property
    def warmup(self) -> int:
        asked = self.config.optim.warmup
        return asked if asked is not None else self.steps * 3 // 100

    @property
    def seq2seq(self) -> bool:
        return bool(self.model_config.is_encoder_decoder)

    @property
    def pad(self) -> int:
        """Padding is masked: any token will do where the tokenizer has none for it."""
        tokenizer = self.tokenizer
        found = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        return next(int(token) for token in found if token is not None)

    @property
    def facts(self) -> dict[str, Fact]:
        """What must be equal for a checkpoint to fit: tensors, and the meaning of a position."""
        model = self.config.model
        return {
            "model_type": self.model_config.model_type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "state_dtype": self.config.optim.state_dtype,
            "seq_len": self.seq_len,
            "packing": self.data.packing,
            "seed": self.config.run.seed,
            "freeze_experts": model.freeze_experts,
            "freeze_dense": model.freeze_dense,
            "lora": model.lora,
            "lora_targets": model.lora_targets,
        }


Builder = Callable[[Blueprint], Session]


_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tokenizer_config.json",
)  # fmt: skip


def load_tokenizer(folder: Path, flag: str) -> Tokenizer:
    """The tokenizer in `folder`, which an error names with its `flag`."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(
            f"{flag} {folder} has no tokenizer; give the folder of one with --tokenizer"
        )
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers raises what its parts raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{flag} {folder}: the tokenizer cannot be read ({reason}); give the folder of one "
            "with --tokenizer"
        ) from error


def choose_seq_len(asked: int | None, model_config: Any) -> int:
    """--seq-len, or what the model allows up to a usual length."""
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if asked is None:
        return _SEQ_LEN if context is None else min(context, _SEQ_LEN)
    if context is not None and asked > context:
        raise ConfigError(
            f"--seq-len {asked} is more than the {context} positions of this model; give at most "
            "that"
        )
    return asked


def draw_up(config: FinetuneConfig, say: Callable[[str], None]) -> Blueprint:
    """Read everything but the weights, and decide what the config leaves open."""
    device = choose_device(config.memory.device)
    if not config.model.checkpoint:
        raise ConfigError("CHECKPOINT is missing; give the folder of a Hugging Face checkpoint")
    folder = find_folder(config.model.checkpoint)
    model_config = read_config(folder)
    seq_len = choose_seq_len(config.data.seq_len, model_config)
    if config.model.balance and not hasattr(model_config, "output_router_logits"):
        raise ConfigError(
            f"--balance: {model_config.model_type} has no loss that balances its routers; leave it "
            "out"
        )
    given = config.model.tokenizer
    tokenizer = (
        load_tokenizer(folder, "CHECKPOINT")
        if given is None
        else load_tokenizer(Path(given).expanduser(), "--tokenizer")
    )
    data = load_data(config.data, tokenizer, seq_len, model_config, config.run.seed, say)
    return Blueprint(
        config=config,
        folder=folder,
        model_config=model_config,
        tokenizer=tokenizer,
        data=data,
        seq_len=seq_len,
        device=device,
        dtype=choose_dtype(config.memory.dtype, device),
        steps=_steps(config, len(data.train)),
        overrides=_overrides(config, model_config, say),
    )


def _overrides(
    config: FinetuneConfig, model_config: Any, say: Callable[[str], None]
) -> dict[str, Any]:
    found = dropouts_inside_experts(model_config) if config.trains_experts else {}
    if found:
        fields = ", ".join(f"{name}={getattr(model_config, name)}" for name in found)
        say(f"{fields} is set to 0: dropout inside experts is not computed in training")
    return found


def _steps(config: FinetuneConfig, rows: int) -> int:
    if config.run.steps is not None:
        return config.run.steps
    in_epoch = -(-rows // config.sequences_per_step)
    return max(1, round(config.run.epochs * in_epoch))


def build_session(blueprint: Blueprint) -> Session:
    """Load the checkpoint to where the budgets allow, and make it ready to be trained."""
    config, memory = blueprint.config, blueprint.config.memory
    model = load(
        blueprint.folder,
        gpu_memory=memory.gpu_memory,
        host_memory=memory.host_memory,
        disk=memory.disk,
        dtype=blueprint.dtype,
        device=blueprint.device,
        mode=memory.mode,
        slots=memory.slots,
        host_slots=memory.host_slots,
        train=config.trains_experts,  # else no memory is planned for their optimizer states
        settings=engine_settings(memory),
        state_dtype=DTYPES[config.optim.state_dtype],
        keep_gradients=_keeps_gradients(config),
        quiet=True,  # the loop says what lies where
        **blueprint.overrides,
    )
    return make_session(blueprint, model)


def _keeps_gradients(config: FinetuneConfig) -> bool:
    """Whether gradients of experts will wait: for the norm, for more of them, or for step()."""
    waits = config.optim.clip > 0 or config.data.accumulate > 1
    return config.trains_experts and (waits or not config.memory.overlap_updates)


def make_session(blueprint: Blueprint, model: Any) -> Session:
    """`model` as its experts were offloaded, with what the config freezes or adds."""
    config, optim = blueprint.config, blueprint.config.optim
    engine = cast(Engine, model.overspill)
    try:
        if config.model.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(config.run.seed)  # adapters begin at random, and dropout follows
        if config.model.lora is not None:
            model = add_lora(model, config.model, blueprint.seq2seq)
        freeze(model, experts=config.model.freeze_experts, dense=config.model.freeze_dense)
        model.train()
        optimizer = AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
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


def freeze(model: torch.nn.Module, experts: bool, dense: bool) -> None:
    """A layer's experts are one placeholder among the parameters."""
    for parameter in model.parameters():
        if experts if hasattr(parameter, "is_expert_placeholder") else dense:
            parameter.requires_grad_(False)

"""Specification of a run of `overspill finetune` or `pregate`: checkpoint, tokenizer, data."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from overspill.core.errors import ConfigError
from overspill.hardware.machine import choose_device
from overspill.models.budgets import Budgets
from overspill.models.huggingface.checks import check_tokenizer, find_folder
from overspill.models.huggingface.find_experts import find_experts
from overspill.models.huggingface.folder import read_config
from overspill.models.huggingface.load import load_within
from overspill.models.huggingface.pregate_file import saved_level, trained_pregates
from overspill.models.huggingface.skeleton import meta_model
from overspill.models.huggingface.tokenizer import open_tokenizer
from overspill.models.pregate import (
    check_level,
    find_chains,
    layer_drops,
    pregate,
    pregate_level,
)  # fmt: skip
from overspill.models.stages.blocks import find_blocks
from overspill.moe.pregate import positions
from overspill.moe.settings import Settings
from overspill.train.finetune.config import FinetuneConfig
from overspill.train.finetune.data import FinetuneData, load_data
from overspill.train.finetune.encoding import Tokenizer
from overspill.train.finetune.lora import add_lora, lora_targets
from overspill.train.run_spec import DTYPES, ModelSize, RunSpec, check_stages
from overspill.train.team import Team

_SEQ_LEN = 1024  # default: long enough for most examples, and not the 128k of some models
_LR, _LORA_LR = 1e-5, 1e-4
_LANGUAGE = re.compile(r"[a-z]{2,3}(_[A-Za-z]+)?")
"""Names of languages among the special tokens of a tokenizer: eng_Latn, en_XX."""
_TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k")
"""Names of the number of experts per token in configs of transformers."""


@dataclass(frozen=True)
class FinetuneSpec(RunSpec):
    """A Hugging Face checkpoint to train on examples."""

    config: FinetuneConfig
    folder: Path
    """Folder of the checkpoint."""
    model_config: Any
    tokenizer: Tokenizer
    data: FinetuneData
    overrides: dict[str, Any]
    """Fields of the model's config to replace."""

    @property
    def seq2seq(self) -> bool:
        return bool(self.model_config.is_encoder_decoder)

    @property
    def pad(self) -> int:
        """The padding token. Padding is masked: if the tokenizer has none, any token can be
        used."""
        tokenizer = self.tokenizer
        found = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        return next(int(token) for token in found if token is not None)

    @property
    def budgets(self) -> Budgets:
        budgets = super().budgets
        if self.config.model.fix_nllb_routing:
            settings = dataclasses.replace(budgets.settings, fix_nllb_routing=True)
            budgets = dataclasses.replace(budgets, settings=settings)
        if rank := self.config.expert_adapters_rank:
            reserved = self._expert_adapters_bytes(rank)
            budgets = dataclasses.replace(budgets, device_reserved=reserved)
        text = self.model_config.get_text_config()
        return self.with_activations(budgets, text.hidden_size, text.num_hidden_layers)

    def _expert_adapters_bytes(self, rank: int) -> int:
        """Bytes of the adapters of experts: weights and gradients in float32, and both moments."""
        layers = find_experts(meta_model(self.model_config).eval())
        shapes = [(layer.n_experts, layer.shape) for layer in layers]
        sides = sum(n * (2 * s.d_model + s.d_hidden + s.in_rows) for n, s in shapes)
        return rank * sides * (8 + 2 * DTYPES[self.config.optim.state_dtype].itemsize)

    def model_size(self) -> ModelSize:
        model = meta_model(self.model_config).eval()
        layers = find_experts(model)
        experts = sum(layer.n_experts * layer.shape.numel for layer in layers)
        text = self.model_config.get_text_config()
        per_token = next((getattr(text, name) for name in _TOP_K if hasattr(text, name)), 1)
        most = max((layer.n_experts for layer in layers), default=1)
        dense = max(0, sum(p.numel() for p in model.parameters()) - experts)
        return ModelSize(dense, experts, min(1.0, per_token / most))

    def load_model(self) -> Any:
        return load_within(
            self.folder,
            self.budgets,
            self.dtype,
            # else no memory is planned for optimizer states; ranks support training only
            train=self.config.trains_experts or self.team.mesh is not None,
            changes=self.overrides,
            freeze_experts=not self.config.trains_experts,
            packed=self.config.model.packed,
            quantize=self.config.model.quantize,
        )

    def prepare(self, model: Any) -> nn.Module:
        section = self.config.model
        if section.gradient_checkpointing:
            # the name since transformers 5.23, and the one before
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        if self.config.pregate_level and not pregate_level(model):
            pregate(model, self.config.pregate_level)
        torch.manual_seed(self.config.run.seed)  # for the weights of adapters, and for dropout
        if section.lora is not None:
            gates = trained_pregates(model) if self.config.pregate_level else []
            model = add_lora(model, section, self.seq2seq)
            for parameter in gates:  # beside the adapters
                parameter.requires_grad_(True)
        freeze(
            model,
            experts=section.freeze_experts,
            dense=section.freeze_dense,
            pregates=self.config.pregate_level == 0,
        )
        return cast(nn.Module, model.train())


def freeze(model: nn.Module, experts: bool, dense: bool, pregates: bool = True) -> None:
    """Freeze the experts (one placeholder parameter per layer), the other parameters, or both.
    Pre-gates count as other parameters only with `pregates`."""
    gates = [gate for _, gate, position in positions(model) if position.is_pregate]
    kept = set() if pregates else {id(p) for gate in gates for p in gate.parameters()}
    for parameter in model.parameters():
        frozen = experts if hasattr(parameter, "is_expert_placeholder") else dense
        if frozen and id(parameter) not in kept:
            parameter.requires_grad_(False)


def plan_finetuning(
    config: FinetuneConfig, say: Callable[[str], None], team: Team | None = None
) -> FinetuneSpec:
    """Read everything but the weights, and choose the settings that the config leaves open."""
    device = choose_device(config.memory.device)
    if not config.model.checkpoint:
        raise ConfigError("CHECKPOINT is missing; give the folder of a Hugging Face checkpoint")
    folder = find_folder(config.model.checkpoint)
    model_config = read_config(folder)
    without_weights = meta_model(model_config).eval()
    find_experts(without_weights)  # a family may not be supported
    if config.model.lora is not None:
        lora_targets(without_weights, config.model)
    level = config.pregate_level
    Settings(fix_nllb_routing=config.model.fix_nllb_routing).check_model(model_config.model_type)
    overrides = _override(config, model_config, say)
    if level:
        _check_level(level, folder, model_config)
    if config.stages is not None:
        _check_stages(config.stages, model_config)
    seq_len = choose_seq_len(config.data.seq_len, model_config)
    if config.model.balance and not hasattr(model_config, "output_router_logits"):
        raise ConfigError(
            f"--balance: {model_config.model_type} has no load-balancing loss; omit the flag"
        )
    given = config.model.tokenizer
    source = (folder, "CHECKPOINT") if given is None else (Path(given).expanduser(), "--tokenizer")
    tokenizer = load_tokenizer(*source, config.data.languages)
    data = load_data(
        config.data, tokenizer, seq_len, model_config, config.run.seed, say, config.metrics
    )
    model, run, optim = config.model, config.run, config.optim
    per_epoch = -(-len(data.train) // config.sequences_per_step)
    steps = run.steps or max(1, round(run.epochs * per_epoch))
    default_lr = _LR if model.lora is None else _LORA_LR
    return FinetuneSpec(
        config=config,
        device=device,
        slots=config.memory.slots,
        seq_len=seq_len,
        steps=steps,
        lr=optim.lr if optim.lr is not None else default_lr,
        warmup=optim.warmup if optim.warmup is not None else steps * 3 // 100,
        # every `steps` steps: after the last one
        eval_every=(run.eval_every or steps) if data.evaluates else 0,
        data_digest=data.digest,
        model_facts={
            "model_type": model_config.model_type,
            "packing": data.packing,
            "freeze_experts": model.freeze_experts,
            "freeze_dense": model.freeze_dense,
            "lora": model.lora,
            "lora_targets": model.lora_targets,
            "lora_experts": config.expert_adapters_rank,
            "pregate_level": level or None,
            "fix_nllb_routing": model.fix_nllb_routing or None,
            "quantize": model.quantize,
        },
        team=team or Team(),
        folder=folder,
        model_config=model_config,
        tokenizer=tokenizer,
        data=data,
        overrides=overrides,
    )


def _override(
    config: FinetuneConfig, model_config: Any, say: Callable[[str], None]
) -> dict[str, float]:
    """Set the fields of the model's config that pre-gates do not support to 0; return them."""
    drops = layer_drops(model_config) if config.pregate_level else {}
    if drops:
        fields = ", ".join(f"{name}={getattr(model_config, name)}" for name in drops)
        say(f"{fields} is set to 0: layers of a model with pre-gates cannot be dropped")
    for name, value in drops.items():
        setattr(model_config, name, value)
    return drops


def _check_level(level: int, folder: Path, model_config: Any) -> None:
    """Raise if the model cannot have pre-gates of that level, or has pre-gates of another level."""
    there = saved_level(folder)
    if there not in (None, level):
        raise ConfigError(
            f"--level {level}: {folder} has pre-gates of level {there}; continue them with --level "
            f"{there}, or give a conventional checkpoint"
        )
    check_level(level, find_chains(meta_model(model_config)), asked=f"--level {level}")


def _check_stages(count: int, model_config: Any) -> None:
    """Raise before loading if the model has too few blocks for the stages."""
    check_stages(count, len(find_blocks(meta_model(model_config))), model_config.model_type)


def load_tokenizer(
    folder: Path, flag: str, languages: Mapping[str, str] = MappingProxyType({})
) -> Tokenizer:
    """The tokenizer in `folder`; errors name `flag`. `languages` are the languages of sources
    ("src_lang") and targets ("tgt_lang"), by default the tokenizer's own."""
    check_tokenizer(folder, flag)
    try:
        tokenizer = open_tokenizer(folder, **languages)
    except Exception as error:  # transformers raises many types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{flag} {folder}: the tokenizer cannot be read ({reason}); give the folder of one "
            "with --tokenizer"
        ) from error
    known = [token for token in tokenizer.all_special_tokens if _LANGUAGE.fullmatch(token)]
    for name, language in languages.items():
        asked = f"--{name.replace('_', '-')} {language}"
        if not hasattr(type(tokenizer), "src_lang"):
            raise ConfigError(f"{asked}: the tokenizer of this model has no languages; omit it")
        if language not in known:
            raise ConfigError(
                f"{asked} is none of the {len(known)} languages of this tokenizer; give one such "
                f"as {', '.join(known[:4])}"
            )
    return tokenizer


def choose_seq_len(asked: int | None, model_config: Any) -> int:
    """--seq-len, or by default the context of the model up to `_SEQ_LEN`."""
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if asked is None:
        return _SEQ_LEN if context is None else min(context, _SEQ_LEN)
    if context is not None and asked > context:
        raise ConfigError(
            f"--seq-len {asked} exceeds the {context} positions of this model; lower it"
        )
    return asked

"""Named models of transformers, as configs: the published Switch Transformers and NLLB-MoE, and the
GPT-MoE models of `presets`.

The numbers of the encoder-decoders are those of their `config.json` on the hub. `switch-xxl` is an
approximation: the published model has gated experts (GEGLU, d_ff 10240), which transformers' class
does not compute. With two matrices of 15360 an expert has as many parameters and operations, and
the whole model the 395 B of the Switch Transformer paper.
"""

import abc
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overspill.core.errors import ConfigError
from overspill.models.presets import PRESETS, get_preset, listed


@dataclass(frozen=True)
class EncoderDecoder(abc.ABC):
    """Shape of an encoder-decoder whose two stacks have equally many blocks."""

    d_model: int
    d_ff: int
    n_heads: int
    n_layers: int
    """Blocks of the encoder, and of the decoder."""
    n_experts: int
    vocab: int
    moe_every: int
    """Interval of blocks with experts: every n-th block of a stack."""

    @property
    def n_moe_layers(self) -> int:
        """Number of blocks with experts, of both stacks."""
        return 2 * (self.n_layers // self.moe_every)

    @property
    def total_params(self) -> int:
        """Number of all parameters; the output head is the embedding."""
        n_attentions = 3 * self.n_layers  # one in a block of the encoder, two in the decoder
        n_dense = 2 * self.n_layers - self.n_moe_layers
        experts = self.n_moe_layers * self.n_experts * (self._feed_forward + self.d_model)
        blocks = n_attentions * self._attention + n_dense * self._feed_forward
        return self.vocab * self.d_model + blocks + experts + self._others

    @property
    @abc.abstractmethod
    def _attention(self) -> int:
        """Number of parameters of one attention."""

    @property
    @abc.abstractmethod
    def _feed_forward(self) -> int:
        """Number of parameters of one expert, or of a dense feed-forward."""

    @property
    @abc.abstractmethod
    def _others(self) -> int:
        """Number of parameters of norms and positions. A row of a router is counted with its
        expert."""

    @abc.abstractmethod
    def fields(self) -> dict[str, Any]:
        """Return the fields of the config that differ from the defaults of transformers."""

    @property
    def _n_norms(self) -> int:
        """Number of norms: one before each attention and each feed-forward, and at the end of each
        stack."""
        return 5 * self.n_layers + 2


class Switch(EncoderDecoder):
    """Shape of a Switch Transformer."""

    _BUCKETS = 32

    def fields(self) -> dict[str, Any]:
        return {
            "model_type": "switch_transformers",
            "architectures": ["SwitchTransformersForConditionalGeneration"],
            "vocab_size": self.vocab,
            "d_model": self.d_model,
            "d_kv": self.d_model // self.n_heads,
            "d_ff": self.d_ff,
            "num_heads": self.n_heads,
            "num_layers": self.n_layers,
            "num_decoder_layers": self.n_layers,
            "num_sparse_encoder_layers": self.n_layers // self.moe_every,
            "num_sparse_decoder_layers": self.n_layers // self.moe_every,
            "num_experts": self.n_experts,
            "expert_capacity": 64,
            "decoder_start_token_id": 0,
        }

    @property
    def _attention(self) -> int:
        return 4 * self.d_model**2

    @property
    def _feed_forward(self) -> int:
        return 2 * self.d_model * self.d_ff

    @property
    def _others(self) -> int:
        return self._n_norms * self.d_model + 2 * self._BUCKETS * self.n_heads


class NLLB(EncoderDecoder):
    """Shape of an NLLB-MoE."""

    def fields(self) -> dict[str, Any]:
        each = {
            "layers": self.n_layers,
            "ffn_dim": self.d_ff,
            "attention_heads": self.n_heads,
            "sparse_step": self.moe_every,
            "layerdrop": 0.0,
        }
        return {
            "model_type": "nllb-moe",
            "architectures": ["NllbMoeForConditionalGeneration"],
            "vocab_size": self.vocab,
            "d_model": self.d_model,
            "num_experts": self.n_experts,
            "expert_capacity": 64,
            "second_expert_policy": "all",
            **{f"encoder_{name}": value for name, value in each.items()},
            **{f"decoder_{name}": value for name, value in each.items()},
        }

    @property
    def _attention(self) -> int:
        return 4 * (self.d_model**2 + self.d_model)

    @property
    def _feed_forward(self) -> int:
        return 2 * self.d_model * self.d_ff + self.d_ff + self.d_model

    @property
    def _others(self) -> int:
        return 2 * self._n_norms * self.d_model


def _switch(d_model: int, d_ff: int, n_heads: int, n_layers: int, n_experts: int) -> Switch:
    return Switch(d_model, d_ff, n_heads, n_layers, n_experts, vocab=32_128, moe_every=2)


ENCODER_DECODERS: dict[str, Switch | NLLB] = {
    **{f"switch-base-{n}": _switch(768, 3072, 12, 12, n) for n in (8, 16, 32, 64, 128, 256)},
    "switch-large-128": _switch(1024, 4096, 16, 24, 128),
    "switch-xxl": _switch(4096, 15_360, 64, 24, 128),
    "nllb-moe-54b": NLLB(2048, 8192, 16, 24, 128, vocab=256_206, moe_every=4),
}


@dataclass(frozen=True)
class PresetSummary:
    """A row of `overspill create --list`."""

    name: str
    parameters: int
    bytes: int
    """Size of the weights in bf16."""
    moe_blocks: int
    experts: int
    """Experts in each MoE block."""


def summaries() -> list[PresetSummary]:
    """Return summaries of all presets, without importing torch or transformers."""
    return [
        PresetSummary(
            name=name,
            parameters=shape.total_params,
            bytes=2 * shape.total_params,
            moe_blocks=shape.n_moe_layers,
            experts=shape.n_experts,
        )
        for name, shape in [*PRESETS.items(), *ENCODER_DECODERS.items()]
    ]


def check_preset(name: str, layers: int | None = None, experts: int | None = None) -> None:
    """Raise for an unknown name, and for so few blocks that none has experts."""
    _shape(name, layers, experts)


def preset_config(
    name: str, *, layers: int | None = None, experts: int | None = None, **changes: Any
) -> Any:
    """Return the transformers config of a preset (`overspill create --list` shows them).

    `layers` is the number of blocks (of the encoder, and of the decoder), `experts` the number of
    experts in each MoE block; `changes` replace fields of the config, such as `dropout_rate=0.0`.
    """
    shape = _shape(name, layers, experts)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    fields = _fields(shape)
    kind = type(AutoConfig.for_model(fields.pop("model_type")))
    names = {*fields, *kind.attribute_map, *(field.name for field in dataclasses.fields(kind))}
    for field in changes:
        if field not in names:
            raise ConfigError(
                f"{field!r} is not one of the fields of {kind.__name__}: "
                f"{listed(sorted(names), field)}"
            )
    _check_sizes(fields, {kind.attribute_map.get(n, n): (n, v) for n, v in changes.items()})
    try:
        return kind(**{**fields, **changes})
    except StrictDataclassError as error:
        raise ConfigError(f"preset {name}: {' '.join(str(error).split())}") from error


def _check_sizes(fields: Mapping[str, Any], changes: Mapping[str, tuple[str, Any]]) -> None:
    """Raise for sizes below 1, by which transformers would divide. `changes` have the name and the
    value that were given for each field. Without sparse blocks, a stack is dense."""
    for field, (name, value) in changes.items():
        old = fields.get(field)
        is_size = type(old) is int and old > 0 and "sparse" not in field
        if is_size and type(value) is int and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")


def _fields(shape: Any) -> dict[str, Any]:
    """Return the content of config.json."""
    if isinstance(shape, EncoderDecoder):
        return shape.fields()
    from overspill.models.huggingface.from_gpt import exported_config

    return exported_config(shape, "bfloat16", None)


def _shape(name: str, layers: int | None, experts: int | None) -> Any:
    asked = {"n_layers": layers, "n_experts": experts}
    given = {field: value for field, value in asked.items() if value is not None}
    if name in PRESETS:
        return get_preset(name, **given)
    if name not in ENCODER_DECODERS:
        raise ConfigError(
            f"preset {name!r} is not one of {listed([*PRESETS, *ENCODER_DECODERS], name)}"
        )
    shape = ENCODER_DECODERS[name]
    if layers is not None and layers < shape.moe_every:
        raise ConfigError(
            f"layers={layers} leaves {name} without experts: every {shape.moe_every}. block has "
            f"some; give at least {shape.moe_every}"
        )
    if experts is not None and experts < 1:
        raise ConfigError(f"experts={experts} must be at least 1")
    return dataclasses.replace(shape, **given)

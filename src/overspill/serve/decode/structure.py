"""The common structure of decoders, read from a model: what a decoding step computes.

RMS norms, rotary attention with grouped heads, experts chosen by a softmax, perhaps an expert for
all tokens beside them. seq2seq.py reads the decoders of encoder-decoders into the same structure.
Models that differ run through their own modules.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from overspill.compute.activation import Form, Function, form_of
from overspill.models.attention_cache import RelativeBias
from overspill.models.gpt import GPTMoE
from overspill.models.huggingface.experts import PLACEHOLDER
from overspill.models.pregate import pregate_level
from overspill.moe import pregate
from overspill.moe.placeholder import ExpertPlaceholder

_TYPES = frozenset({"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"})
"""Model types of transformers whose modules are known to compute what is read here."""
_OWN = "overspill_gpt"
"""The model type of an exported run that no class of transformers computes."""
_PLAIN = frozenset({nn.Linear, nn.Embedding, nn.ModuleList, nn.RMSNorm})
_FILES = frozenset({
    *(f"transformers.models.{name}.modeling_{name}" for name in _TYPES),
    "transformers.activations", "torch.nn.modules.activation", "overspill.models.gpt",
    "overspill.models.huggingface.gpt_model", "overspill.moe.layer", "overspill.moe.router",
})  # fmt: skip
"""Where the classes of their modules are."""


@dataclass(frozen=True)
class Norm:
    weight: Tensor
    eps: float
    bias: Tensor | None = None  # of a layer norm
    scale: float = 1.0  # of the result


@dataclass(frozen=True)
class Attention:
    """Weights of packed queries, keys and values [(h + 2k) d, D], and of the output. The queries of
    attention to a source are alone: its keys and values are known."""

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    heads: int
    kv_heads: int
    width: int
    scale: float
    head_norms: tuple[Norm, Norm] | None = None  # of each head of queries and keys
    row_norms: tuple[Norm, Norm] | None = None  # of all heads together
    clip: float | None = None
    window: int | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class Experts:
    """A router and its experts."""

    router: Tensor
    router_bias: Tensor | None
    wide_router: bool  # logits are float32
    top_k: int
    softmax_first: bool
    normalize: bool
    placeholder: ExpertPlaceholder
    activation: Form
    shared: Callable[[Tensor], Tensor] | None = None  # for all tokens
    scale: float = 1.0  # of the weights of experts
    ids: Tensor | None = None  # [K], int32: those of every token, whose weights the router gives


@dataclass(frozen=True)
class Dense:
    """Two linear maps with a function between them."""

    w_in: Tensor
    b_in: Tensor | None
    w_out: Tensor
    b_out: Tensor | None
    function: Function


@dataclass(frozen=True)
class Layer:
    attention_norm: Norm
    attention: Attention
    feed_norm: Norm
    feed: Experts | Dense | Callable[[Tensor], Tensor]
    source: tuple[Norm, Attention] | None = None  # between the two


@dataclass(frozen=True)
class Positions:
    """Vectors that are added to those of tokens."""

    table: Tensor
    padding: int
    """The padding token and its place in the table; the first position is in the place after."""


@dataclass(frozen=True)
class Decoder:
    embedding: Tensor
    layers: list[Layer]
    norm: Norm
    head: Tensor
    head_bias: Tensor | None
    rotary: tuple[Tensor, Tensor] | None = None  # cosines and sines, [positions, width / 2]
    level: int = 0  # of the pre-gates: a router is computed so many layers earlier
    embedding_scale: float = 1.0
    positions: Positions | None = None
    bias: RelativeBias | None = None  # of the attention to tokens before, in all layers

    @cached_property
    def experts(self) -> list[Experts]:
        """Of all layers that have some."""
        return [layer.feed for layer in self.layers if isinstance(layer.feed, Experts)]

    @property
    def first(self) -> int:
        """The number of the first layer of experts in the model."""
        return self.experts[0].placeholder.layer if self.experts else 0


def read_decoder(model: Any, context: int) -> Decoder | None:
    """The structure of a model for sequences of `context` tokens; None if it differs. The weights
    of queries, keys and values become parts of one tensor."""
    if isinstance(model, GPTMoE):
        return _read_gpt(model)
    config = model.config.get_text_config()
    if (
        config.model_type not in {*_TYPES, _OWN}
        or model.config is not config
        or has_quirks(model, _PLAIN, _FILES)
    ):
        return None
    inner = model.model
    layers = [_read_layer(config, layer) for layer in inner.layers]
    width = layers[0].attention.width
    positions = torch.arange(context, device=model.device)[None]
    like = inner.embed_tokens.weight.new_empty(1)
    with torch.no_grad():
        cosines, sines = (each[0, :, : width // 2] for each in inner.rotary_emb(like, positions))
    if cosines.shape[1] != width // 2:
        return None
    head = model.lm_head
    return Decoder(
        inner.embed_tokens.weight.data, layers, _norm(inner.norm), head.weight.data,
        data_of(head.bias), (cosines.contiguous(), sines.contiguous()), pregate_level(model),
    )  # fmt: skip


def has_quirks(model: Any, plain: Collection[type], files: Collection[str]) -> bool:
    """Whether a user may have changed a model whose modules have `plain` classes, or are defined in
    these files: it is computed by its own modules."""
    return any(_quirks(model, plain, files))


def _quirks(model: Any, plain: Collection[type], files: Collection[str]) -> Iterator[bool]:
    for module in model.modules():
        yield bool(module._forward_hooks or module._forward_pre_hooks)
        yield "forward" in vars(module)
        kind = type(module)
        if kind.__module__ == pregate.__name__:  # what it changes is read too
            kind = kind.__mro__[1]
        # a subclass, LoRA, quantized weights
        yield kind not in plain and kind.__module__ not in files
        if isinstance(getattr(module, PLACEHOLDER, None), ExpertPlaceholder):
            yield activation_of(module) is None


def activation_of(experts: Any) -> Form | None:
    """None if the kernels do not have that of an experts module."""
    placeholder: ExpertPlaceholder = getattr(experts, PLACEHOLDER)
    return form_of(placeholder.activation, placeholder.engine.shape.gated)


def _read_layer(config: Any, layer: Any) -> Layer:
    mlp = layer.mlp
    feed: Experts | Callable[[Tensor], Tensor] = mlp
    experts = getattr(mlp, "experts", None)
    if experts is not None:
        feed = _read_experts(config, mlp)
    return Layer(
        _norm(layer.input_layernorm), _read_attention(config, layer.self_attn),
        _norm(layer.post_attention_layernorm), feed,
    )  # fmt: skip


def _read_experts(config: Any, mlp: Any) -> Experts:
    oss = config.model_type == "gpt_oss"
    router = mlp.router if oss else mlp.gate
    activation = activation_of(mlp.experts)
    assert activation is not None
    shared = None
    if hasattr(mlp, "shared_expert"):

        def shared(x: Tensor) -> Tensor:
            share: Tensor = torch.sigmoid(mlp.shared_expert_gate(x)) * mlp.shared_expert(x)
            return share

    return Experts(
        router.weight.data, data_of(getattr(router, "bias", None)), config.model_type == _OWN,
        router.top_k, not oss, bool(getattr(router, "norm_topk_prob", True)),
        getattr(mlp.experts, PLACEHOLDER), activation, shared,
    )  # fmt: skip


def _read_attention(config: Any, attention: Any) -> Attention:
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    weight, bias = join(projections)
    width = attention.head_dim
    norms = None
    if hasattr(attention, "q_norm"):
        norms = _norm(attention.q_norm), _norm(attention.k_norm)
    by_head = norms is not None and norms[0].weight.numel() == width
    return Attention(
        weight,
        bias,
        attention.o_proj.weight.data,
        data_of(attention.o_proj.bias),
        projections[0].out_features // width,
        projections[1].out_features // width,
        width,
        attention.scaling,
        norms if by_head else None,
        None if by_head else norms,
        getattr(config, "clip_qkv", None),
        _window(config, attention),
        data_of(getattr(attention, "sinks", None)),
    )


def _window(config: Any, attention: Any) -> int | None:
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[attention.layer_idx] != "sliding_attention":
        return None
    return window


def _norm(module: Any) -> Norm:
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return Norm(module.weight.data, eps)


def data_of(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.data


def join(linears: list[Any]) -> tuple[Tensor, Tensor | None]:
    """One weight and one bias of which those of linear maps become parts."""
    weight = _join([each.weight for each in linears])
    return weight, None if linears[0].bias is None else _join([each.bias for each in linears])


def _join(parameters: list[Tensor]) -> Tensor:
    """One tensor of which the parameters become parts."""
    whole = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = whole[start : start + len(parameter)]
        start += len(parameter)
    return whole


def _read_gpt(model: GPTMoE) -> Decoder | None:
    config = model.config
    width = config.d_model // config.n_heads
    if has_quirks(model, _PLAIN, _FILES):
        return None
    layers = []
    for block in model.blocks:
        own: Any = block
        attention = Attention(
            own.attention.qkv.weight.data, None, own.attention.out.weight.data, None,
            config.n_heads, config.n_heads, width, width**-0.5,
        )  # fmt: skip
        feed: Experts | Callable[[Tensor], Tensor] = own.dense
        if own.moe is not None:
            router = own.moe.router
            feed = Experts(
                router.weight.data, None, True, router.top_k, True, router.normalize,
                own.moe.experts, Form.usual(config.gated),
            )  # fmt: skip
        layers.append(Layer(_norm(own.attention_norm), attention, _norm(own.feed_norm), feed))
    head = model.get_output_embeddings().weight
    assert isinstance(head, Tensor)
    return Decoder(
        model.embedding.weight.data, layers, _norm(model.norm), head.data, None,
        (model.rope.cos, model.rope.sin), pregate_level(model),
    )  # fmt: skip

"""The common structure of decoders that fused decoding steps compute, and its reading from models.

RMS norms, rotary attention with grouped heads or the gated delta rule, experts chosen by a softmax,
perhaps an expert for all tokens beside them. seq2seq.py reads the decoders of encoder-decoders into
the same structure. Models that differ run through their own modules.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from overspill.compute.activation import form_of
from overspill.compute.activation_form import Form, Function
from overspill.compute.decode.delta import DeltaShape, Place
from overspill.models.attention_cache import RelativeBias
from overspill.models.gpt import GPTMoE
from overspill.models.huggingface.experts import PLACEHOLDER
from overspill.models.pregate import pregate_level
from overspill.moe import pregate
from overspill.moe.placeholder import ExpertPlaceholder

_ALIKE = frozenset({"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"})
_HYBRID = {"qwen3_next": "qwen3_next", "qwen3_5_moe_text": "qwen3_5_moe"}
"""Model types with linear attention, gates after attention, and 1 added to the weights of norms; by
the name of their module."""
_TYPES = _ALIKE | _HYBRID.keys()
"""Model types of transformers whose modules are known to compute this structure."""
_OWN = "overspill_gpt"
"""The model type of an exported run that no class of transformers computes."""
_PLAIN = frozenset({nn.Conv1d, nn.Embedding, nn.Linear, nn.ModuleList, nn.RMSNorm})
_FILES = frozenset({
    *(f"transformers.models.{name}.modeling_{name}" for name in _ALIKE.union(_HYBRID.values())),
    "transformers.activations", "torch.nn.modules.activation", "overspill.models.gpt",
    "overspill.models.huggingface.gpt_model", "overspill.moe.layer", "overspill.moe.router",
})  # fmt: skip
"""Python modules that define the classes of these models."""

_ALIGNED = 8
"""Rows of joined weights are a multiple of it."""


@dataclass(frozen=True)
class Norm:
    """RMS norm, or a layer norm if it has a bias."""

    weight: Tensor
    eps: float
    bias: Tensor | None = None  # of a layer norm
    scale: float = 1.0  # of the result
    shift: float = 0.0  # is added to the weight


@dataclass(frozen=True)
class Attention:
    """Attention with packed weights of queries, keys and values [(h + 2k) d, D]. Attention to a
    source has queries only: keys and values of the source are computed before."""

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
    gated: bool = False  # each head of queries is followed by gates of its output


@dataclass(frozen=True)
class LinearAttention:
    """Gated delta rule after a short convolution."""

    module: nn.Module
    """The module to which the states belong."""
    projections: Tensor
    convolution: Tensor
    rates: tuple[Tensor, Tensor]  # logarithms and biases of the decay
    norm: Norm
    out: Tensor
    shape: DeltaShape


@dataclass(frozen=True)
class Shared:
    """Expert that all tokens use."""

    module: Callable[[Tensor], Tensor]
    joined: Tensor | None
    """Weights of the router, of gate and up values, and of its share, if it has the activation of
    the other experts; perhaps zeros, so that rows of the product are aligned."""
    out: Tensor


@dataclass(frozen=True)
class Experts:
    """Router and its experts."""

    router: Tensor
    router_bias: Tensor | None
    wide_router: bool  # logits are float32
    top_k: int
    softmax_first: bool
    normalize: bool
    placeholder: ExpertPlaceholder
    activation: Form
    shared: Shared | None = None
    scale: float = 1.0  # of the weights of experts
    ids: Tensor | None = None  # [K], int32: experts of every token; the router gives their weights


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
    """Attention and feed-forward, each after a norm."""

    attention_norm: Norm
    attention: Attention | LinearAttention
    feed_norm: Norm
    feed: Experts | Dense | Callable[[Tensor], Tensor]
    source: tuple[Norm, Attention] | None = None  # between the two


@dataclass(frozen=True)
class Positions:
    """Position vectors that are added to the embeddings of tokens."""

    table: Tensor
    padding: int
    """The padding token and its place in the table; the first position is in the place after."""


@dataclass(frozen=True)
class Decoder:
    """Embedding, layers and head of a decoder."""

    embedding: Tensor
    layers: list[Layer]
    norm: Norm
    head: Tensor
    head_bias: Tensor | None
    rotary: tuple[Tensor, Tensor] | None = None
    """Cosines and sines, [positions, n / 2] for the first n numbers of a head."""
    level: int = 0  # of the pre-gates: a router is computed so many layers earlier
    embedding_scale: float = 1.0
    positions: Positions | None = None
    bias: RelativeBias | None = None  # of the attention to tokens before, in all layers

    @cached_property
    def experts(self) -> list[Experts]:
        """The experts of all layers that have experts."""
        return [layer.feed for layer in self.layers if isinstance(layer.feed, Experts)]

    @cached_property
    def attentions(self) -> dict[int, Attention]:
        """Attention with keys and values, by layer."""
        mixers = ((number, layer.attention) for number, layer in enumerate(self.layers))
        return {number: own for number, own in mixers if isinstance(own, Attention)}

    @property
    def first(self) -> int:
        """The number of the first layer of experts in the model."""
        return self.experts[0].placeholder.layer if self.experts else 0


def read_decoder(model: Any, context: int) -> Decoder | None:
    """Return the structure of a model for sequences of `context` tokens; None if it differs. The
    weights of queries, keys and values become parts of one tensor."""
    if isinstance(model, GPTMoE):
        return _read_gpt(model)
    config = model.config.get_text_config()
    nested = model.config is not config
    if config.model_type not in {*_TYPES, _OWN} or (nested and config.model_type not in _HYBRID):
        return None
    inner = model.model.language_model if nested else model.model
    modules = model, model.model, *inner.modules(), *model.lm_head.modules()
    if has_quirks(modules, _PLAIN, _FILES):
        return None
    kinds = getattr(config, "layer_types", None) or ()
    if config.model_type in _HYBRID and "full_attention" not in kinds:
        return None
    layers = [_read_layer(config, layer) for layer in inner.layers]
    tables = _rotations(config, inner, context)
    if tables is None:
        return None
    shift = _shift(config)
    head = model.lm_head
    return Decoder(
        inner.embed_tokens.weight.data, layers, _norm(inner.norm, shift), head.weight.data,
        data_of(head.bias), tables, pregate_level(model),
    )  # fmt: skip


def _rotations(config: Any, inner: Any, context: int) -> tuple[Tensor, Tensor] | None:
    """Return cosines and sines of all positions; None if the model's tables have another shape."""
    weight = inner.embed_tokens.weight
    positions = torch.arange(context, device=weight.device)[None]
    if config.model_type == "qwen3_5_moe_text":  # those of text are the same in three dimensions
        positions = positions.expand(3, 1, -1)
    with torch.no_grad():
        tables = inner.rotary_emb(weight.new_empty(1), positions)
    half = config.hidden_size // config.num_attention_heads // 2
    half = (getattr(config, "head_dim", None) or 2 * half) // 2
    if config.model_type in _HYBRID:  # a part of a head is rotated
        half = min(half, tables[0].shape[-1] // 2)
    cosines, sines = (each[0, :, :half].contiguous() for each in tables)
    return (cosines, sines) if cosines.shape[1] == half else None


def _shift(config: Any) -> float:
    return 1.0 if config.model_type in _HYBRID else 0.0


def has_quirks(
    modules: Iterable[nn.Module], plain: Collection[type], files: Collection[str]
) -> bool:
    """Return whether a user may have changed a model whose modules have `plain` classes or are
    defined in `files`. Such a model is computed by its own modules."""
    return any(_quirks(modules, plain, files))


def _quirks(
    modules: Iterable[Any], plain: Collection[type], files: Collection[str]
) -> Iterator[bool]:
    for module in modules:
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
    """Return the activation of an experts module; None if the kernels do not have it."""
    placeholder: ExpertPlaceholder = getattr(experts, PLACEHOLDER)
    return form_of(placeholder.activation, placeholder.engine.shape.gated)


def _read_layer(config: Any, layer: Any) -> Layer:
    mlp = layer.mlp
    feed: Experts | Callable[[Tensor], Tensor] = mlp
    experts = getattr(mlp, "experts", None)
    if experts is not None:
        feed = _read_experts(config, mlp)
    linear = getattr(layer, "linear_attn", None)
    shift = _shift(config)
    return Layer(
        _norm(layer.input_layernorm, shift),
        _read_attention(config, layer.self_attn) if linear is None else _read_linear(linear),
        _norm(layer.post_attention_layernorm, shift),
        feed,
    )


def _read_experts(config: Any, mlp: Any) -> Experts:
    oss = config.model_type == "gpt_oss"
    router = mlp.router if oss else mlp.gate
    activation = activation_of(mlp.experts)
    assert activation is not None
    shared = _read_shared(mlp) if hasattr(mlp, "shared_expert") else None
    return Experts(
        router.weight.data, data_of(getattr(router, "bias", None)), config.model_type == _OWN,
        router.top_k, not oss, bool(getattr(router, "norm_topk_prob", True)),
        getattr(mlp.experts, PLACEHOLDER), activation, shared,
    )  # fmt: skip


def _read_shared(mlp: Any) -> Shared:
    own, gate = mlp.shared_expert, mlp.shared_expert_gate

    def compute(x: Tensor) -> Tensor:
        share: Tensor = torch.sigmoid(gate(x)) * own(x)
        return share

    weights = [each.weight for each in (mlp.gate, own.gate_proj, own.up_proj, gate)]
    alike = type(own.act_fn) is type(mlp.experts.act_fn)
    joined = None
    if alike and len({each.dtype for each in weights}) == 1:
        rows = sum(len(each) for each in weights)
        joined = _join([*weights, gate.weight.new_zeros(-rows % _ALIGNED, gate.weight.shape[1])])
    return Shared(compute, joined, own.down_proj.weight.data)


def _read_linear(own: Any) -> LinearAttention:
    """Read linear attention. Qwen3-Next packs the projections of a head of keys together."""
    keys, group = own.head_k_dim, own.num_v_heads // own.num_k_heads
    values, total = group * own.head_v_dim, own.key_dim
    if hasattr(own, "in_proj_qkvz"):
        weights = [own.in_proj_qkvz.weight, own.in_proj_ba.weight]
        step, after = 2 * (keys + values), 2 * (own.key_dim + own.value_dim)
        firsts = 0, keys, 2 * keys, 2 * keys + values
        wide = [Place(first, step) for first in firsts]
        places = *wide, Place(after, 2 * group), Place(after + group, 2 * group)
    else:
        names = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
        weights = [getattr(own, name).weight for name in names]
        after = 2 * (total + own.value_dim)
        places = (
            Place(0, keys), Place(total, keys), Place(2 * total, values),
            Place(2 * total + own.value_dim, values), Place(after, group),
            Place(after + own.num_v_heads, group),
        )  # fmt: skip
    heads = own.num_k_heads, own.num_v_heads, keys, own.head_v_dim
    return LinearAttention(
        own, _join(weights), own.conv1d.weight.data[:, 0], (own.A_log.data, own.dt_bias.data),
        _norm(own.norm), own.out_proj.weight.data, DeltaShape(*heads, *places),
    )  # fmt: skip


def _read_attention(config: Any, attention: Any) -> Attention:
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    weight, bias = join(projections)
    width, gated = attention.head_dim, config.model_type in _HYBRID
    norms = None
    if hasattr(attention, "q_norm"):
        shift = _shift(config)
        norms = _norm(attention.q_norm, shift), _norm(attention.k_norm, shift)
    by_head = norms is not None and norms[0].weight.numel() == width
    return Attention(
        weight,
        bias,
        attention.o_proj.weight.data,
        data_of(attention.o_proj.bias),
        projections[0].out_features // width // (2 if gated else 1),
        projections[1].out_features // width,
        width,
        attention.scaling,
        norms if by_head else None,
        None if by_head else norms,
        getattr(config, "clip_qkv", None),
        _window(config, attention),
        data_of(getattr(attention, "sinks", None)),
        gated,
    )


def _window(config: Any, attention: Any) -> int | None:
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[attention.layer_idx] != "sliding_attention":
        return None
    return window


def _norm(module: Any, shift: float = 0.0) -> Norm:
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return Norm(module.weight.data, eps, shift=shift)


def data_of(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.data


def join(linears: list[Any]) -> tuple[Tensor, Tensor | None]:
    """Return one weight and one bias; the weights and biases of linear maps become parts of
    them."""
    weight = _join([each.weight for each in linears])
    return weight, None if linears[0].bias is None else _join([each.bias for each in linears])


def _join(parameters: list[Tensor]) -> Tensor:
    """Return one tensor; the parameters become parts of it."""
    whole = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = whole[start : start + len(parameter)]
        start += len(parameter)
    return whole


def _read_gpt(model: GPTMoE) -> Decoder | None:
    config = model.config
    width = config.d_model // config.n_heads
    if has_quirks(model.modules(), _PLAIN, _FILES):
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

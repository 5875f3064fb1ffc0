"""The structure of decoders of encoder-decoders (Switch Transformers and NLLB-MoE) for fused
steps."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from overspill.compute.activation import function_of
from overspill.models.attention_cache import ROLES, RelativeBias
from overspill.models.huggingface.experts import PLACEHOLDER
from overspill.models.pregate import pregate_level
from overspill.moe.placeholder import ExpertPlaceholder
from overspill.serve.decode.structure import (
    Attention,
    Decoder,
    Dense,
    Experts,
    Layer,
    Norm,
    Positions,
    activation_of,
    data_of,
    has_quirks,
    join,
)

_PLAIN = frozenset({nn.Linear, nn.Embedding, nn.ModuleList, nn.Dropout})
_FILES = frozenset({
    "transformers.activations",
    "torch.nn.modules.activation",
    "overspill.models.huggingface.dictionaries",
})  # fmt: skip
_DTYPES = torch.float32, torch.bfloat16
"""Data types that are supported: with float16, modules clamp hidden states."""


def read_seq2seq_decoder(model: Any) -> Decoder | None:
    """Return the structure of the decoder of an encoder-decoder whose modules have their `ROLES`;
    None if it differs. The weights of queries, keys and values become parts of one tensor."""
    switch = model.config.model_type == "switch_transformers"
    name = "switch_transformers" if switch else "nllb_moe"
    files = _FILES | {f"transformers.models.{name}.modeling_{name}"}
    plain: Collection[type] = _PLAIN if switch else _PLAIN | {nn.LayerNorm}
    decoder = model.get_decoder()
    if has_quirks(model.modules(), plain, files) or not _has_usual_types(model, decoder):
        return None
    if not all(_is_usual_block(each.mlp if switch else each.ffn) for each in _feeds(decoder)):
        return None
    return _read_switch(model, decoder) if switch else _read_nllb(model, decoder)


def _feeds(decoder: Any) -> list[Any]:
    """Return the modules with the feed-forward of each layer."""
    if hasattr(decoder, "block"):
        return [block.layer[-1] for block in decoder.block]
    return list(decoder.layers)


def _has_usual_types(model: Any, decoder: Any) -> bool:
    """Return whether all parameters have one data type, except routers, which have float32."""
    dtype = model.get_input_embeddings().weight.dtype
    routers = {id(each) for each in _router_parameters(decoder)}
    others = {
        each.dtype
        for each in (*decoder.parameters(), model.lm_head.weight)
        if id(each) not in routers and not isinstance(each, ExpertPlaceholder)
    }
    if not hasattr(decoder, "block"):
        others.add(decoder.embed_positions.weights.dtype)
    wide = all(each.dtype == torch.float32 for each in _router_parameters(decoder))
    return wide and dtype in _DTYPES and others == {dtype} and model.overspill.dtype == dtype


def _router_parameters(decoder: Any) -> list[nn.Parameter]:
    found = [path for path, _ in decoder.named_parameters() if ".router.classifier." in path]
    return [decoder.get_parameter(path) for path in found]


def _is_usual_block(feed: Any) -> bool:
    router = getattr(feed, "router", None)
    if router is None:
        return function_of(feed.act) is not None
    return bool(router.dtype == torch.float32 and router.num_experts > 1)


def _read_switch(model: Any, decoder: Any) -> Decoder:
    layers = []
    for block in decoder.block:
        own, source, feed = block.layer
        layers.append(
            Layer(
                _norm(own.layer_norm),
                _read_t5_attention(own.SelfAttention, alone=False),
                _norm(feed.layer_norm),
                _read_feed(feed.mlp),
                (_norm(source.layer_norm), _read_t5_attention(source.EncDecAttention, alone=True)),
            )
        )
    scale = model.model_dim**-0.5 if model.config.tie_word_embeddings else 1.0
    bias = ROLES[decoder.block[0].layer[0].SelfAttention].bias
    assert isinstance(bias, RelativeBias)
    return Decoder(
        decoder.embed_tokens.weight.data, layers, _norm(decoder.final_layer_norm, scale),
        model.lm_head.weight.data, None, level=pregate_level(model), bias=bias,
    )  # fmt: skip


def _read_t5_attention(attention: Any, alone: bool) -> Attention:
    own = attention.q, attention.k, attention.v, attention.o
    sizes = attention.n_heads, attention.n_heads, attention.key_value_proj_dim
    return _read_attention(own, sizes, attention.scaling, alone)


def _read_nllb(model: Any, decoder: Any) -> Decoder:
    layers = []
    for layer in decoder.layers:
        source = _read_nllb_attention(layer.cross_attention, alone=True)
        layers.append(
            Layer(
                _norm(layer.self_attn_layer_norm),
                _read_nllb_attention(layer.self_attn, alone=False),
                _norm(layer.ff_layer_norm),
                _read_feed(layer.ffn),
                (_norm(layer.cross_attention_layer_norm), source),
            )
        )
    table = decoder.embed_positions
    return Decoder(
        decoder.embed_tokens.weight.data, layers, _norm(decoder.layer_norm),
        model.lm_head.weight.data, data_of(model.lm_head.bias), level=pregate_level(model),
        embedding_scale=decoder.embed_tokens.embed_scale,
        positions=Positions(table.weights, table.padding_idx),
    )  # fmt: skip


def _read_nllb_attention(attention: Any, alone: bool) -> Attention:
    own = attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj
    sizes = attention.num_heads, attention.num_heads, attention.head_dim
    return _read_attention(own, sizes, attention.scaling, alone)


def _read_attention(
    own: tuple[Any, Any, Any, Any], sizes: tuple[int, int, int], scale: float, alone: bool
) -> Attention:
    """Return attention; with `alone` it has queries only, for keys and values of a source."""
    q, k, v, out = own
    weight, bias = (q.weight.data, data_of(q.bias)) if alone else join([q, k, v])
    return Attention(weight, bias, out.weight.data, data_of(out.bias), *sizes, scale)


def _norm(module: Any, scale: float = 1.0) -> Norm:
    if isinstance(module, nn.LayerNorm):
        return Norm(module.weight.data, module.eps, module.bias.data, scale)
    return Norm(module.weight.data, module.variance_epsilon, None, scale)


def _read_feed(feed: Any) -> Dense | Experts:
    if hasattr(feed, "router"):
        return _read_experts(feed)
    w_in, w_out = (feed.wi, feed.wo) if hasattr(feed, "wi") else (feed.fc1, feed.fc2)
    function = function_of(feed.act)
    assert function is not None
    return Dense(
        w_in.weight.data, data_of(w_in.bias), w_out.weight.data, data_of(w_out.bias), function
    )


def _read_experts(block: Any) -> Experts:
    router, experts = block.router, block.experts
    placeholder: ExpertPlaceholder = getattr(experts, PLACEHOLDER)
    activation = activation_of(experts)
    assert activation is not None
    top_2 = hasattr(router, "second_expert_policy")
    ids: Tensor | None = None
    if top_2 and not placeholder.engine.settings.fix_nllb_routing:
        # transformers takes the mask of the first expert for ids
        ids = torch.tensor([1, 0], dtype=torch.int32, device=router.classifier.weight.device)
    return Experts(
        router.classifier.weight.data, data_of(router.classifier.bias), True, 1 + top_2, True,
        top_2, placeholder, activation, scale=1 - getattr(experts, "moe_token_dropout", 0), ids=ids,
    )  # fmt: skip

"""Encoder-decoders that compute several sequences in one pass: Switch Transformers and NLLB-MoE.

The sources of a batch are one row of tokens for the encoder, the tokens after them one row for the
decoder. The modules of transformers take such a row for one sequence: replaced attributes tell them
which tokens see which, how far tokens are from each other, and that the keys of most sources are
known already.

Shapes: S tokens of sources, T tokens of the decoder, D model, h heads.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from overspill.core.errors import ConfigError
from overspill.models.attention_cache import ROLES, AttentionRole, Keys, RelativeBias
from overspill.models.huggingface.replaced import replaced_attributes
from overspill.moe.placeholder import ExpertPlaceholder
from overspill.moe.pregate import replace_plain, whole_tensors

_SWITCH, _NLLB = "switch_transformers", "nllb-moe"


def is_encoder_decoder(config: Any) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False))


def check_served(config: Any, where: object) -> None:
    """Raise for encoder-decoders that are unknown, or whose tokens would depend on the other
    requests of a batch."""
    kind = config.model_type
    if kind not in (_SWITCH, _NLLB):
        raise ConfigError(
            f"{where or 'this model'} is an encoder-decoder of type {kind}; of these, "
            f"{_SWITCH} and {_NLLB} can be served; use model.generate"
        )
    if config.decoder_start_token_id is None:
        raise ConfigError(
            f"the config of {where or 'this model'} has no decoder_start_token_id, the token that "
            "an answer begins with; set it in config.json"
        )
    if kind == _SWITCH:
        return
    if config.moe_eval_capacity_token_fraction != 1:
        raise ConfigError(
            f"moe_eval_capacity_token_fraction={config.moe_eval_capacity_token_fraction}: tokens "
            "would lose experts by what other requests compute; set it to 1.0 in config.json"
        )
    if config.second_expert_policy != "all":
        raise ConfigError(
            f"second_expert_policy={config.second_expert_policy!r} chooses experts at random; set "
            "it to 'all' in config.json"
        )


class EncoderDecoder:
    """Model of one of these families for batches."""

    def __init__(self, model: Any, context: int) -> None:
        """`context` is the length of the longest sequence."""
        self._model = model
        self._switch = model.config.model_type == _SWITCH
        self._stacks = [model.get_encoder(), model.get_decoder()]
        self._positions: dict[nn.Module, Tensor] = {}
        experts = self._stacks[0].parameters()
        self.encoder_layers = sum(isinstance(each, ExpertPlaceholder) for each in experts)
        """Number of layers of experts before the layers of the decoder."""
        for stack, keys in zip(self._stacks, (Keys.TOGETHER, Keys.BEFORE), strict=True):
            self._assign_roles(stack, keys)
        if not self._switch:
            for stack in self._stacks:
                _extend(stack.embed_positions, context)
        weight = model.get_input_embeddings().weight
        self._hidden = weight.new_zeros(1, 1, model.config.d_model)
        self._known = _known_sources(self._stacks[1], weight)
        self._lengths: list[int] = []  # of the sources of a batch
        self._replacements = list(self._find_replacements())

    def _assign_roles(self, stack: Any, keys: Keys) -> None:
        if not self._switch:
            for layer in stack.layers:
                ROLES[layer.self_attn] = AttentionRole(keys)
                if keys is Keys.BEFORE:
                    ROLES[layer.cross_attention] = AttentionRole(Keys.SOURCE)
            return
        first = stack.block[0].layer[0].SelfAttention  # its bias is that of all layers
        bucket = partial(
            first._relative_position_bucket,
            bidirectional=keys is Keys.TOGETHER,
            num_buckets=first.relative_attention_num_buckets,
            max_distance=first.relative_attention_max_distance,
        )
        reach = first.relative_attention_max_distance
        bias = RelativeBias(first.relative_attention_bias, bucket, reach)
        for block in stack.block:
            ROLES[block.layer[0].SelfAttention] = AttentionRole(keys, bias)
            if keys is Keys.BEFORE:
                ROLES[block.layer[1].EncDecAttention] = AttentionRole(Keys.SOURCE)

    def _find_replacements(self) -> Iterator[tuple[nn.Module, str, Any]]:
        """Yield (module, attribute, value) for the attributes that are replaced in batches."""
        for stack in self._stacks:
            if not self._switch:
                module = stack.embed_positions
                # a longer sequence outside of batches replaces the table, which graphs read
                yield module, "forward", partial(self._embed_positions, module, module.weights)
                for layer in stack.layers:
                    if layer.is_sparse:  # each pass sets it, and training would go on with it
                        router = layer.ffn.router
                        yield router, "expert_capacity", router.expert_capacity
                continue
            module = stack.block[0].layer[0].SelfAttention
            yield module, "compute_bias", partial(_no_bias, module)
            for router in _switch_routers(stack):
                capacity = router.expert_capacity
                yield router, "expert_capacity", sys.maxsize
                if stack is self._stacks[0]:
                    around = partial(self._drop_beyond, capacity)
                    yield router, *replace_plain(router, around)

    def replaced(self) -> AbstractContextManager[None]:
        """Context in which modules compute neither positions in the row nor biases by them, and
        experts have their capacity for each source."""
        return replaced_attributes(self._replacements)

    def __call__(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        sources: Sequence[Sequence[int]] = (),
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the logits after tokens at these positions of their sequences, or only of some
        `rows`. The encoder computes `sources`; the keys and values of all other sources are
        known."""
        device = tokens_T.device
        given: dict[str, Any]
        if sources:
            joined = torch.tensor([[token for each in sources for token in each]], device=device)
            given = {"input_ids": joined}
            self._lengths = [len(each) for each in sources]
        else:
            from transformers.modeling_outputs import MoEModelOutput

            given = {
                "encoder_outputs": MoEModelOutput(last_hidden_state=self._hidden),
                "past_key_values": self._known,
            }
        if not self._switch:
            self._set_positions(tokens_T, positions_T, sources)
        with self._some_rows(rows):
            out = self._model(decoder_input_ids=tokens_T[None], use_cache=False, **given)
        logits: Tensor = out.logits[0]
        return logits

    def _some_rows(self, rows: Tensor | None) -> AbstractContextManager[object]:
        """Context in which the head computes only these rows."""
        if rows is None:
            return nullcontext()
        head: nn.Module = self._model.get_output_embeddings()
        return head.register_forward_pre_hook(lambda _, args: (args[0][:, rows], *args[1:]))

    def _set_positions(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        sources: Sequence[Sequence[int]],
    ) -> None:
        """Set positions in the numbering of the modules, which begins after the padding token's id;
        padding has that id as its position."""
        encoder, decoder = (stack.embed_positions for stack in self._stacks)
        padding = decoder.padding_idx
        self._positions[decoder] = torch.where(
            tokens_T == padding, padding, positions_T + padding + 1
        )
        if sources:
            counted = [_count_tokens(each, padding) for each in sources]
            self._positions[encoder] = torch.cat(counted).to(tokens_T.device)

    def _drop_beyond(self, capacity: int, plain: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        """Return the result of a router that counts the tokens of an expert for each source, like
        transformers from 5.22 on; before, each token was a sequence of its own."""
        result = plain(*args, **kw)
        (mask,) = whole_tensors(result)
        if mask.shape[-2] == 1 or max(self._lengths) <= capacity:
            return result
        kept = [each * (each.cumsum(-2) <= capacity) for each in mask.split(self._lengths, dim=-2)]
        return tuple(torch.cat(kept, dim=-2) if each is mask else each for each in result)

    def _embed_positions(self, module: Any, table: Tensor, *_: Any, **__: Any) -> Tensor:
        return table[self._positions[module]][None]


def _switch_routers(stack: Any) -> Iterator[Any]:
    for block in stack.block:
        router = getattr(block.layer[-1].mlp, "router", None)
        if router is not None:
            yield router


def _count_tokens(source: Sequence[int], padding: int) -> Tensor:
    """Return the positions of tokens; padding is not counted."""
    real = torch.tensor(source) != padding
    return torch.where(real, real.cumsum(0) + padding, padding)


def _extend(module: Any, context: int) -> None:
    """Extend the table of positions to sequences of `context` tokens. Otherwise modules extend it
    when they meet one."""
    needed = module.padding_idx + 1 + context
    if needed > module.weights.size(0):
        module.make_weights(needed + module.offset, module.embedding_dim, module.padding_idx)


def _no_bias(module: Any, *_: Any, **__: Any) -> Tensor:
    """Return an empty bias, in the place of the bias for one sequence."""
    weight: Tensor = module.relative_attention_bias.weight
    return weight.new_empty(0)


def _known_sources(decoder: Any, like: Tensor) -> Any:
    """Return a cache that reports the keys of sources as known, and stores nothing."""
    from transformers.cache_utils import EncoderDecoderCache

    heads, width = _heads(decoder)
    nothing = like.new_zeros(1, heads, 1, width)

    class Known(EncoderDecoderCache):  # type: ignore[misc]
        def __init__(self) -> None:  # caches are not made
            layers = range(len(_blocks(decoder)))
            self.is_updated = dict.fromkeys(layers, True)
            self.self_attention_cache = _Kept(nothing, len(layers))
            self.cross_attention_cache = self.self_attention_cache

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 0

    return Known()


class _Kept:
    """Cache of keys and values of a decoder whose attention reads them from the current cache."""

    def __init__(self, nothing: Tensor, n_layers: int) -> None:
        self.layers = [self] * n_layers
        # transformers from 5.23 on reads what kind of attention each layer has: a full one
        self.is_sliding = self.is_linear = self.is_dummy = [False] * n_layers
        self.keys = self.values = nothing

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return keys, values


def _blocks(decoder: Any) -> Any:
    return decoder.block if hasattr(decoder, "block") else decoder.layers


def _heads(decoder: Any) -> tuple[int, int]:
    """Return the number of heads of keys, and their width."""
    block = _blocks(decoder)[0]
    if hasattr(decoder, "block"):
        own = block.layer[0].SelfAttention
        return own.n_heads, own.key_value_proj_dim
    return block.self_attn.num_heads, block.self_attn.head_dim


def cache_elements(model: Any) -> int:
    """Return the number of elements of the keys and values of one token in all layers of the
    decoder. A token of a source takes as much."""
    decoder = model.get_decoder()
    heads, width = _heads(decoder)
    return 2 * len(_blocks(decoder)) * heads * width

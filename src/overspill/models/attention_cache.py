"""Attention that reads keys and values of earlier tokens from a cache, for models whose attention
can be replaced: GPT-MoE, and those of transformers that use its attention interface."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from overspill.core.errors import OrderError

ATTENTION = "overspill"
"""Name for `set_attn_implementation`."""
IN_USE = "this model is being served; close its LLM first"
BATCH_RUNS = (
    "an LLM computes a batch with this model in another thread; wait for its answers before you "
    "call the model"
)


class Keys(Enum):
    """Keys that the tokens of an attention module see."""

    BEFORE = auto()
    """Keys of the tokens before them in their sequence, and their own."""
    SOURCE = auto()
    """Keys of the source of their sequence: the decoder of an encoder-decoder."""
    TOGETHER = auto()
    """Keys of all tokens of their sequence: an encoder, whose keys are not kept."""


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """A bias of attention scores by the distance between query and key, as T5 has it."""

    embedding: nn.Embedding  # [buckets, heads]
    bucket: Callable[[Tensor], Tensor]
    """Function from the positions of keys relative to their queries to buckets."""
    reach: int
    """Largest distance: keys that are farther away have its bucket."""

    def scores(self, positions_NT: Tensor, n_keys: int) -> Tensor:
        """Return the bias of tokens at `positions` for the keys at 0, 1, ..., [N, h, T, L]."""
        keys = torch.arange(n_keys, device=positions_NT.device)
        bias: Tensor = self.embedding.weight[self.bucket(keys - positions_NT[..., None])]
        return bias.movedim(-1, 1)

    def by_distance(self) -> Tensor:
        """Return the bias of keys 0, 1, ... tokens before the query, [h, reach + 1]."""
        return self.embedding.weight.T.index_select(1, self._buckets)

    @cached_property
    def _buckets(self) -> Tensor:
        """Bucket of each distance."""
        with torch.inference_mode(False):  # they outlive the pass
            return self.bucket(-torch.arange(self.reach + 1, device=self.embedding.weight.device))


@dataclass(frozen=True, eq=False)
class TokenBias:
    """A bias of attention scores that each token has for keys by their distance."""

    by_distance_NhTn: Tensor
    """Bias for keys 0, 1, ... tokens before; keys farther away have the last bias."""

    def scores(self, positions_NT: Tensor, n_keys: int) -> Tensor:
        """Return the bias of tokens at `positions` for the keys at 0, 1, ..., [N, h, T, L]."""
        bias, keys = self.by_distance_NhTn, torch.arange(n_keys, device=positions_NT.device)
        distance = (positions_NT[..., None] - keys).clamp(0, bias.shape[-1] - 1)
        return bias.gather(-1, distance[:, None].expand(-1, bias.shape[1], -1, -1))

    def of_rows(self, rows_NT: Tensor) -> "TokenBias":
        """Return the bias of these rows of the only sequence."""
        return TokenBias(self.by_distance_NhTn[0][:, rows_NT].transpose(0, 1))


class AttentionRole(NamedTuple):
    """Role of an attention module in an encoder-decoder model."""

    keys: Keys
    bias: RelativeBias | None = None


ROLES: WeakKeyDictionary[nn.Module, AttentionRole] = WeakKeyDictionary()
"""Roles of modules that do not just attend to the tokens before them."""
_DECODER = AttentionRole(Keys.BEFORE)


class AttentionOptions(NamedTuple):
    """Options of attention that differ between models and layers."""

    scale: float | None = None  # None: one over the square root of the width
    window: int | None = None  # a token sees so many, itself included
    sinks: Tensor | None = None  # a logit of each head that takes a share of the softmax
    softcap: float | None = None
    keys: Keys = Keys.BEFORE
    bias: RelativeBias | TokenBias | None = None
    chosen: Any = None  # the keys that an indexer has chosen, as the cache has told them


class Indexer(NamedTuple):
    """Part of sparse attention that chooses the keys that each token sees."""

    layer: int
    heads: int
    most: int
    """Largest number of keys that a token sees."""
    choose: Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], Tensor]
    """Function that returns the positions [N, T, `most`] of the keys for these rows [N, T] of the
    batch, the best ones first, from the keys that they may see [N, T, L]. Its last argument stores
    the indexer's keys of the rows [N, T, d] and returns all keys of their sequences [N, L, d].
    Without keys (L = 0) nothing is chosen."""


class AttentionCache(Protocol):
    """Keys and values of all sequences of a batch whose tokens are one row after another."""

    @property
    def positions(self) -> Tensor:
        """Position of each token in its sequence, [T]."""

    def attend(
        self, layer: int, q_Thd: Tensor, k_Tkd: Tensor, v_Tkd: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Store keys and values of the batch's tokens, or of its new sources. Return the attention
        of each token to the keys that `options` name, [T, h, d]."""

    def choose(self, indexer: Indexer) -> Any:
        """Store the indexer's keys of the batch's tokens. Return the keys that each of them sees,
        for `AttentionOptions.chosen`."""


_CURRENT: ContextVar[AttentionCache | None] = ContextVar("attention_cache", default=None)


@contextmanager
def attention_cache(cache: AttentionCache) -> Iterator[None]:
    """Context in which forward passes use `cache`; a batch is [1, T] tokens of several
    sequences."""
    token = _CURRENT.set(cache)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_cache() -> AttentionCache | None:
    return _CURRENT.get()


class ReplacedAttention:
    """Context in which a model of transformers attends through the current cache. Outside of it
    the model computes as before. Without a registered mask no mask is made."""

    def __init__(self, model: Any) -> None:
        from transformers import PreTrainedModel
        from transformers.modeling_utils import AttentionInterface

        AttentionInterface.register(ATTENTION, _attend)
        owners = (m for m in model.modules() if isinstance(m, PreTrainedModel))
        configs = {id(config): config for owner in owners for config in _configs(owner.config)}
        before = {key: config._attn_implementation for key, config in configs.items()}
        try:
            model.set_attn_implementation(ATTENTION)
            for config in configs.values():  # an encoder and a decoder have copies
                if type(config) is type(model.config):
                    config._attn_implementation_internal = model.config._attn_implementation
        finally:
            self._changed = [
                (config, before[key], config._attn_implementation)
                for key, config in configs.items()
                if config._attn_implementation != before[key]
            ]
            self.__exit__()

    def __enter__(self) -> None:
        for config, _, own in self._changed:
            config._attn_implementation_internal = own

    def __exit__(self, *_: object) -> None:
        for config, before, _ in self._changed:
            config._attn_implementation_internal = before


def _configs(config: Any) -> Iterator[Any]:
    """Yield a config and the configs of its parts."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        part = getattr(config, name, None)
        if part is not None:
            yield from _configs(part)


_WINDOW_OF_CONFIG = frozenset({"PhimoeAttention"})
"""Classes of attention modules whose window is only in the config."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    indices: Any = None,
    position_bias: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend through the current cache, with the interface of transformers: [1, heads, T, width] to
    [1, T, heads, width]."""
    cache = current_cache()
    if cache is None:
        raise OrderError(BATCH_RUNS)
    own: Any = module
    if sliding_window is None:  # Qwen2-MoE has it in its mask only
        own_config = own.config if type(module).__name__ in _WINDOW_OF_CONFIG else own
        sliding_window = getattr(own_config, "sliding_window", None)
    role = ROLES.get(module, _DECODER)
    bias = TokenBias(position_bias) if hasattr(module, "rel_logits_proj") else role.bias
    options = AttentionOptions(scaling, sliding_window, s_aux, softcap, role.keys, bias, indices)
    layer = own.layer_idx
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return cache.attend(int(layer), q, k, v, options)[None], None

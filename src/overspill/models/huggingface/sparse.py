"""Models with sparse attention: an indexer chooses which of the tokens before it a token sees
(DeepSeek-V3.2, GLM-5 and others). Their modules compute a batch whose sequences are one row.

A module of transformers takes the row for one sequence. Here each sequence of several tokens has
its own call of the indexer, all sequences of one token share a call, and the keys of the indexer
are in the cache beside the keys of attention.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overspill.core.errors import OrderError
from overspill.models.attention_cache import BATCH_RUNS, Indexer, current_cache
from overspill.models.huggingface.replaced import replaced_attributes

TYPES = frozenset({"axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"})
"""Model types whose attention modules have such an indexer, or use the indexer of an earlier
layer."""


def index_width(module: nn.Module) -> int:
    """Return the width of the keys of an indexer; 0 for other modules."""
    return int(module.head_dim) if hasattr(module, "index_topk") else 0  # type: ignore[arg-type]


class SparseAttention:
    """Attention of a model for batches."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [module for module in model.modules() if hasattr(module, "indexer")]

    def replaced(self) -> AbstractContextManager[None]:
        """Context in which modules compute batches, and the current cache keeps the keys of
        indexers."""
        attentions = (
            (module, "forward", partial(_without_mask, module.forward)) for module in self._modules
        )
        indexers = [own for each in self._modules if (own := getattr(each, "indexer", None))]
        choices = ((each, "forward", partial(_choose, each, each.forward)) for each in indexers)
        return replaced_attributes([*attentions, *choices])


def _without_mask(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an attention module without a mask, of which it would pass a part to the indexer; the
    indexer has its own mask here."""
    kwargs["attention_mask"] = torch.empty(1, 1, 0, 0)
    return plain(*args, **kwargs)


class _Keys(NamedTuple):
    """Replacement of transformers' cache for an indexer."""

    store: Callable[[Tensor], Tensor]

    def update_indexer(self, k_NTd: Tensor, _: int) -> Tensor:
        return self.store(k_NTd)


def _choose(
    indexer: Any,
    plain: Callable[..., Tensor],
    hidden_1TD: Tensor,
    queries_1TD: Tensor,
    angles: tuple[Tensor, Tensor],
    *_: object,
    **__: object,
) -> Any:
    """Return the keys that the tokens of a batch see, in the form of the current cache."""
    cache = current_cache()
    if cache is None:
        raise OrderError(BATCH_RUNS)

    def choose(rows_NT: Tensor, sees_NTL: Tensor, store: Callable[[Tensor], Tensor]) -> Tensor:
        cosines, sines = (each[0][rows_NT] for each in angles)
        hidden_NTD, queries_NTD = hidden_1TD[0][rows_NT], queries_1TD[0][rows_NT]
        return plain(hidden_NTD, queries_NTD, (cosines, sines), sees_NTL, None, _Keys(store))

    return cache.choose(Indexer(indexer.layer_idx, indexer.n_heads, indexer.index_topk, choose))

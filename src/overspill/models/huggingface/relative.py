"""Attention with a bias that each token has for the tokens before it by their distance (Inkling):
its modules compute a batch whose sequences are one row."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overspill.core.errors import OrderError
from overspill.models.attention_cache import BATCH_RUNS, current_cache
from overspill.models.huggingface.replaced import replaced_attributes

TYPES = frozenset({"inkling_text"})
"""Model types with such attention."""


class RelativeAttention:
    """Attention of a model for batches."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[Any] = [m for m in model.modules() if hasattr(m, "rel_logits_proj")]

    def replaced(self) -> AbstractContextManager[None]:
        """Context in which modules compute batches, with the positions of the current cache."""
        attentions = (
            (module, "forward", partial(_attend, module.forward)) for module in self._modules
        )
        biases = (m.rel_logits_proj for m in self._modules)
        return replaced_attributes(
            [*attentions, *((each, "forward", partial(_bias, each)) for each in biases)]
        )


class _Positions(NamedTuple):
    """Replacement of transformers' cache, from which attention modules read positions."""

    offset_T: Tensor

    def get_mask_sizes(self, *_: object) -> tuple[int, int]:
        return 0, 0

    def get_query_offset(self, _: int) -> Tensor:
        return self.offset_T

    def update(self, keys: Tensor, values: Tensor, _: int) -> tuple[Tensor, Tensor]:
        return keys, values


def _attend(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    cache = current_cache()
    if cache is None:
        raise OrderError(BATCH_RUNS)
    positions_T = cache.positions
    rows_T = torch.arange(len(positions_T), device=positions_T.device)
    kwargs["past_key_values"] = _Positions(positions_T - rows_T)
    return plain(*args, **kwargs)


def _bias(module: Any, states_1Thr: Tensor, *_: object) -> Tensor:
    """Return the bias by distance; keys farther away than all distances of the module have none."""
    by_distance: Tensor = (states_1Thr @ module.proj).transpose(1, 2)
    return F.pad(by_distance, (0, 1))

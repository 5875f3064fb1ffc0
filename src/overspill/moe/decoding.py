"""Decoding steps that compute experts in their own way, without the engine's passes."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor

from overspill.moe.placeholder import ExpertPlaceholder


class ExpertDecoder(Protocol):
    """Computes the experts of a few tokens."""

    def experts(
        self,
        placeholder: ExpertPlaceholder,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
    ) -> Tensor:
        """Each token's weighted sum over its experts, [T, D]. The ids are those of the router, also
        where a routing source replaces them."""

    def hint(self, placeholder: ExpertPlaceholder, expert_ids_TK: Tensor) -> None:
        """Note the experts that a pre-gate has chosen for a later layer."""


_CURRENT: ContextVar[ExpertDecoder | None] = ContextVar("expert_decoder", default=None)


@contextmanager
def decoding(decoder: ExpertDecoder) -> Iterator[None]:
    """Forward passes inside compute their experts with `decoder`."""
    token = _CURRENT.set(decoder)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_decoder() -> ExpertDecoder | None:
    return _CURRENT.get()

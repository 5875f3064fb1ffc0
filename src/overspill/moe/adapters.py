"""Low-rank adapters (LoRA) of the experts of one layer, in a forward or a backward.

Shapes: E experts of the layer, by global id; r rank; I inputs and O outputs of a matrix.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from overspill.compute.low_rank import Adapters, LowRank, LowRankGrads
from overspill.core.expert_map import ExpertMap


class Factors(NamedTuple):
    """The low-rank part of one matrix of all experts: scale * B @ A is added to it."""

    a_ErI: Tensor
    b_EOr: Tensor
    scale: float

    def added_to(self, weight: Tensor, expert: int, transposed: bool) -> Tensor:
        """The sum with the matrix of one expert on the CPU, in float32 or wider; `transposed`: the
        matrix is [I, O]."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        a, b = (each[expert].to("cpu", wide) for each in (self.a_ErI, self.b_EOr))
        product = b @ a
        return weight.to("cpu", wide) + (product.T if transposed else product) * self.scale


class LayerAdapters:
    """The low-rank parts of a layer's matrices, w_in and w_out, and in backward their gradients."""

    def __init__(self, factors: Sequence[Factors | None]) -> None:
        self.factors = factors
        self._experts = ExpertMap.whole(0)
        self._ids: Tensor | None = None
        self._computed = Adapters()
        self._totals: dict[int, LowRankGrads] = {}

    @property
    def tensors(self) -> list[Tensor | None]:
        """A and B of each matrix, as inputs of an autograd operation."""
        return [
            tensor
            for factors in self.factors
            for tensor in ((None, None) if factors is None else factors[:2])
        ]

    @property
    def scales(self) -> list[float]:
        return [0.0 if factors is None else factors.scale for factors in self.factors]

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], scales: Sequence[float]) -> "LayerAdapters":
        """From `tensors` and `scales`."""
        made: list[Factors | None] = []
        for a, b, scale in zip(tensors[::2], tensors[1::2], scales, strict=True):
            made.append(None if a is None or b is None else Factors(a, b, scale))
        return cls(made)

    def detached(self) -> "LayerAdapters":
        tensors = [None if tensor is None else tensor.detach() for tensor in self.tensors]
        return self.of(tensors, self.scales)

    def enter(self, experts: ExpertMap, dtype: torch.dtype) -> None:
        """Copy the factors in the present order of the experts, before waves are computed in
        `dtype`."""
        self._experts = experts
        first = next(each for each in self.factors if each is not None)
        if not (experts.in_order and experts.is_whole):
            self._ids = torch.tensor(experts.local_ids, device=first.a_ErI.device)
        self._computed = Adapters(
            *(
                None if each is None else LowRank.of(*each, experts=self._ids, dtype=dtype)
                for each in self.factors
            )
        )

    def of_wave(self, first: int, stop: int) -> Adapters:
        """The adapters of the experts at these positions."""
        return self._computed.part(first, stop)

    def add_grads(self, first: int, stop: int, grads: Sequence[LowRankGrads | None]) -> None:
        """Add the gradients of a wave, in float32: an expert may be computed in several pieces."""
        for number, found in enumerate(grads):
            if found is None:
                continue
            if number not in self._totals:
                self._totals[number] = self._zeros(found)
            for total, part in zip(self._totals[number], found, strict=True):
                total[first:stop] += part

    def _zeros(self, like: LowRankGrads) -> LowRankGrads:
        n_local = self._experts.n_local
        wide = torch.promote_types(like.a_nrI.dtype, torch.float32)
        return LowRankGrads(
            *(part.new_zeros(n_local, *part.shape[1:], dtype=wide) for part in like)
        )

    def grads(self) -> list[Tensor | None]:
        """The gradients of `tensors`."""
        found: list[Tensor | None] = []
        for number, factors in enumerate(self.factors):
            if factors is None:
                found += [None, None]
                continue
            rank = factors.a_ErI.shape[1]
            total = self._totals.get(number)
            for which, tensor in enumerate(factors[:2]):
                grad = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
                if total is not None:
                    part = total[which].narrow(2 if which else 1, 0, rank) * factors.scale
                    self._scatter(grad, part.to(tensor.dtype))
                found.append(grad)
        return found

    def _scatter(self, out: Tensor, part: Tensor) -> None:
        if self._ids is None:
            out.copy_(part)
        else:
            out.index_copy_(0, self._ids, part)

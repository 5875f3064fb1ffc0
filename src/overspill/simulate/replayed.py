"""Recorded routing, replayed token by token.

Shapes: T tokens, L layers, K top-k.
"""

import zipfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from overspill.core.errors import ConfigError


class ReplayedRouting:
    """The recorded routing of a model, repeated from the start when it ends.

    Each layer has its own position: the n-th token of every layer is the same token of the trace.
    """

    def __init__(
        self,
        experts_TLK: Tensor,
        n_experts: int | None = None,
        offsets: Sequence[int] | None = None,
    ) -> None:
        """`offsets` are the starts of the sequences, and the end of the last."""
        if experts_TLK.dim() != 3 or experts_TLK.numel() == 0:
            raise ConfigError(
                f"a trace is [tokens, layers, top_k], not of shape {list(experts_TLK.shape)}"
            )
        n_tokens, self.n_layers, self.top_k = experts_TLK.shape
        highest = int(experts_TLK.max())
        self.n_experts = highest + 1 if n_experts is None else n_experts
        if highest >= self.n_experts or int(experts_TLK.min()) < 0:
            raise ConfigError(
                f"the trace contains expert {highest}, beyond n_experts={self.n_experts}; give at "
                f"least {highest + 1}"
            )
        self.offsets = [0, n_tokens] if offsets is None else list(offsets)
        rising = all(a <= b for a, b in pairwise(self.offsets))
        if not rising or self.offsets[:1] != [0] or self.offsets[-1:] != [n_tokens]:
            raise ConfigError(f"offsets must rise from 0 to {n_tokens}, the tokens of the trace")
        self._trace_LTK = experts_TLK.transpose(0, 1).contiguous()
        self._on_device: dict[torch.device, Tensor] = {}
        self._next = [0] * self.n_layers

    @classmethod
    def from_npz(cls, path: Path | str, n_experts: int | None = None) -> "ReplayedRouting":
        """The routing of a file with `experts` [tokens, layers, top_k] and the `offsets` of its
        sequences."""
        try:
            with np.load(path, allow_pickle=False) as file:
                experts, offsets = file["experts"], file["offsets"]
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"{path} is not a recorded routing ({error}); give an .npz with `experts` "
                "[tokens, layers, top_k] and `offsets`"
            ) from error
        if experts.dtype.kind not in "ui":
            raise ConfigError(f"`experts` in {path} is {experts.dtype}; it must be whole numbers")
        # the whole trace is kept on the device, so ids take one byte where that is enough
        ids = torch.from_numpy(experts.astype(np.uint8 if experts.max(initial=0) < 256 else "i8"))
        return cls(ids, n_experts, offsets.tolist())

    def __call__(self, layer: int, n_tokens: int, device: torch.device) -> Tensor:
        trace_TK, start = self._on(device)[layer], self._next[layer]
        self._next[layer] = (start + n_tokens) % len(trace_TK)
        return _from(trace_TK, start, n_tokens).long()

    def all_layers(self, n_tokens: int, device: torch.device) -> Tensor:
        """The experts of the next tokens of all layers, [L, T, K]."""
        trace_LTK, start = self._on(device), self._next[0]
        if self._next != [start] * self.n_layers:  # after a pass that was interrupted
            return torch.stack([self(layer, n_tokens, device) for layer in range(self.n_layers)])
        self._next = [(start + n_tokens) % trace_LTK.shape[1]] * self.n_layers
        return _from(trace_LTK, start, n_tokens)

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._on_device:
            self._on_device[device] = self._trace_LTK.to(device)
        return self._on_device[device]

    def sequence(self, index: int) -> Tensor:
        """The trace of one sequence, [T, L, K] int64, as the constructor takes it."""
        start, end = self.offsets[:-1][index], self.offsets[1:][index]
        return self._trace_LTK[:, start:end].transpose(0, 1).long()


def _from(trace: Tensor, start: int, n_tokens: int) -> Tensor:
    """Routing of tokens [..., T, K] from `start` on, from the beginning again after the end."""
    length = trace.shape[-2]
    if start + n_tokens <= length:
        return trace.narrow(-2, start, n_tokens)
    tokens = torch.arange(start, start + n_tokens, device=trace.device) % length
    return trace.index_select(-2, tokens)

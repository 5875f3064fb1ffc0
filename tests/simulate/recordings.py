"""Recorded routing and small made-up routing."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
ROUTING = Path(os.environ.get("OVERSPILL_ROUTING", ROOT.parent / "shared" / "data" / "routing"))
TRACE = ROUTING / "gptoss20b_decode_experts_only.npz"
CPU = torch.device("cpu")

needs_recordings = pytest.mark.skipif(
    not TRACE.is_file(),
    reason=f"needs recorded routing: OVERSPILL_ROUTING=folder of {TRACE.name}",
)


def counts_of(ids_TK: Tensor, n_experts: int) -> Tensor:
    return torch.bincount(ids_TK.flatten(), minlength=n_experts)


def assert_distinct(ids_TK: Tensor) -> None:
    ordered = ids_TK.sort(-1).values
    assert not (ordered[:, 1:] == ordered[:, :-1]).any()


def trace_of(n_tokens: int, n_layers: int = 3, n_experts: int = 9, top_k: int = 2) -> Tensor:
    order = torch.rand(n_tokens, n_layers, n_experts).argsort(-1)
    return order[..., :top_k]

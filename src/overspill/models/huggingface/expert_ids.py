"""Readers of expert ids in the results of the gates of transformers models, for pre-gates.

The place of the ids in a result differs between families and versions of transformers. A block of
the experts interface passes the only tensor of integers in it to its experts, which is checked when
the experts are called. Families whose gates return other results have readers of their own here.
"""

from typing import Any

from torch import Tensor, nn

from overspill.core.errors import ConfigError
from overspill.models.huggingface.dictionaries import (
    SWITCH,
    HostedDictionary,
    read_mask,
    style_of,
)
from overspill.moe.pregate import ChainGate, IdsReader, unreadable, whole_tensors


def find_reader(path: str, block: nn.Module, gate: nn.Module, experts: nn.Module) -> IdsReader:
    """Return the reader for the gate of the block at `path`. Raises if there is no reader for the
    way in which the block chooses experts."""
    style = style_of(experts)
    if style is not None:
        return _of_switch if style is SWITCH else _of_nllb
    if type(gate).forward is not nn.Linear.forward:
        return _of_interface
    kind = type(block).__name__
    if kind not in _OF_LOGITS:
        raise ConfigError(
            f"{path} cannot have a pre-gate: its gate returns logits, and it is not known how "
            f"{kind} chooses experts by them"
        )
    return _OF_LOGITS[kind]


def _of_interface(gate: ChainGate, routing: Any) -> Tensor:
    ids = _only(gate, routing)
    return ids.reshape(-1, ids.shape[-1])


def _of_switch(gate: ChainGate, routing: Any) -> Tensor:
    mask = _only(gate, routing)
    return read_mask(mask.reshape(-1, 1, mask.shape[-1]))


def _of_nllb(gate: ChainGate, routing: Any) -> Tensor:
    mask, weights, _ = routing
    assert isinstance(gate.experts, HostedDictionary)
    ids_TK, _ = gate.experts.read(mask, weights)
    return ids_TK


def _of_jamba(gate: ChainGate, routing: Any) -> Tensor:
    """Read the ids of Jamba before transformers 5.22, from which on its gate returns ids."""
    block: Any = gate.block
    ids_TK: Tensor
    ids_TK, _ = block.route_tokens_to_experts(routing, routing)  # the first is for its dtype only
    return ids_TK


_OF_LOGITS: dict[str, IdsReader] = {"JambaSparseMoeBlock": _of_jamba}
"""Readers by the class of the block."""


def _only(gate: ChainGate, routing: Any) -> Tensor:
    found = whole_tensors(routing)
    if len(found) != 1:
        raise unreadable(gate, f"it has {len(found)} tensors of integers")
    return found[0]

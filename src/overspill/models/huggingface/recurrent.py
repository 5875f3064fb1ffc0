"""Models that keep a state of each sequence besides keys and values: linear attention, Mamba, short
convolutions. Their modules compute a batch whose sequences are one row of tokens.

A module of transformers takes the row for one sequence. Here it computes each sequence of several
tokens by itself, and all sequences of one token together, with the states of their slots.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overspill.models.huggingface.continued_mamba import (
    ContinuedMamba,
    limited_steps,
    limits_steps,
)
from overspill.models.huggingface.replaced import replaced_attributes

_CACHE_ARGUMENTS = {
    "GraniteMoeHybridMambaLayer": "cache_params",
    "InklingShortConvolution": "past_key_values",
    "JambaMambaMixer": "cache_params",
    "KimiLinearDeltaAttention": "cache_params",
    "Lfm2MoeShortConv": "past_key_values",
    "MiniMaxLightningAttention": "past_key_values",
    "NemotronHMamba2Mixer": "cache_params",
    "Qwen3NextGatedDeltaNet": "cache_params",
    "Qwen3_5MoeGatedDeltaNet": "cache_params",
    "ZayaCCAProjection": "past_key_values",
}
"""Name of the argument for the cache, by the class of a module with states."""
_ONLY_ROWS = frozenset({"ZayaCCAProjection"})
"""Classes whose results all have a row for each token; others may return states after the first
result."""
_EMPTY = "JambaMambaMixer"
"""Class whose modules begin a piece of several tokens with an empty state."""
TYPES = frozenset({
    "granitemoehybrid", "inkling_text", "jamba", "kimi_linear", "lfm2_moe", "minimax", "nemotron_h",
    "qwen3_next", "qwen3_5_moe_text", "zaya",
})  # fmt: skip
"""Model types with all their states in these modules."""

_Key = tuple[str, int]
"""Kind of a state of a module, and its number."""
States = dict[tuple[nn.Module, _Key], Tensor]
"""Copy of the states of one sequence in host memory."""


_PINNED_COPIES = 64
"""Most copies of states for which host memory is pinned in advance."""


class StateSpan(NamedTuple):
    """State of a sequence of a batch."""

    slot: int
    fresh: bool
    """Whether the sequence begins with the batch."""
    copies: Sequence[tuple[int, States]] = ()
    """Empty copies that a pass over several tokens fills, each after a number of tokens, in
    order."""
    in_prompt: bool = False
    """Whether the tokens are of a prompt."""


class RecurrentStates:
    """States of up to `n_slots` sequences in all modules of a model, with a spare slot for rows
    that only fill a batch up."""

    def __init__(self, model: nn.Module, n_slots: int) -> None:
        self.spare = n_slots
        self._modules = _find_modules(model)
        self._memory: dict[nn.Module, dict[_Key, Tensor]] = {}
        self._groups: list[_Group] = []
        self.differs_in_prompts = any(map(limits_steps, self._modules))
        """Whether modules compute a single token of a prompt otherwise than one of an answer."""

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._every())

    def replaced(self) -> AbstractContextManager[None]:
        """Context in which modules compute batches."""
        return replaced_attributes(
            (module, "forward", partial(self._compute, module, module.forward))
            for module in self._modules
        )

    def begin(
        self, counts: Sequence[int], spans: Sequence[StateSpan], device: torch.device
    ) -> None:
        """Prepare a pass over `counts` tokens of the sequences."""
        self._groups, single, start = [], [], 0
        for count, span in zip(counts, spans, strict=True):
            rows = torch.arange(start, start + count, device=device)[None]
            start += count
            if count == 1 and not (span.fresh or (span.in_prompt and self.differs_in_prompts)):
                single.append((rows, span.slot))
            else:
                self._groups += _pieces(rows, span)
        if single:
            rows = torch.cat([rows for rows, _ in single])
            slots = torch.tensor([slot for _, slot in single], device=device)
            self._groups.append(_Group(rows, slots, False))

    def begin_step(self, slots_B: Tensor) -> None:
        """Prepare a pass over one token of each of these sequences."""
        rows = torch.arange(len(slots_B), device=slots_B.device)[:, None]
        self._groups = [_Group(rows, slots_B, False)]

    def of(self, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the inputs of a module's convolution and its recurrent states, of each slot. A
        pass over several tokens must have been computed before."""
        states = self._memory[module]
        return states["conv", 0], states["recurrent", 0]

    def save(self, slots_B: Tensor) -> list[Tensor]:
        """Return copies of the states of these slots."""
        return [each[slots_B] for each in self._every()]

    def restore(self, slots_B: Tensor, saved: Sequence[Tensor]) -> None:
        for memory, states in zip(self._every(), saved, strict=True):
            memory[slots_B] = states

    def copy_out(self, slot: int) -> States:
        """Return a copy of the states of a slot, after all work on the stream."""
        return {
            (module, key): _to_host(each[slot])
            for module, states in self._memory.items()
            for key, each in states.items()
        }

    def copy_in(self, slot: int, states: States) -> None:
        """Let a sequence continue from a copy of states."""
        for (module, key), state in states.items():
            self._memory[module][key][slot].copy_(state, non_blocking=True)

    def _every(self) -> list[Tensor]:
        return [each for states in self._memory.values() for each in states.values()]

    def close(self) -> None:
        """Release the memory."""
        self._memory.clear()

    def _compute(self, module: nn.Module, plain: Any, *args: Any, **kwargs: Any) -> Any:
        kind: Any = type(module)  # mypy does not accept a type as hashable
        bound = _signature(kind).bind(module, *args, **kwargs)
        _, (first, row_1TD), *_ = bound.arguments.items()
        out: Any = None
        for group in self._groups:
            cache = _new_cache(module)
            continued: ContinuedMamba | None = None
            changed: AbstractContextManager[None] = nullcontext()
            if not group.fresh:
                states = {key: each[group.slots_N] for key, each in self._memory[module].items()}
                if type(module).__name__ == _EMPTY and group.rows_NT.shape[1] > 1:
                    continued = ContinuedMamba(module, states["recurrent", 0])
                    changed = continued.hooked()
                    # empty, whether or not the module would use it
                    states["recurrent", 0] = torch.zeros_like(states["recurrent", 0])
                for key, state in states.items():
                    _put(cache, key, state)
                if group.in_prompt and group.rows_NT.shape[1] == 1 and limits_steps(module):
                    changed = limited_steps(module)
            bound.arguments |= {
                first: row_1TD[0][group.rows_NT],
                _CACHE_ARGUMENTS[type(module).__name__]: cache,
            }
            if "attention_mask" in bound.arguments:
                bound.arguments["attention_mask"] = None
            with changed:
                found = plain(*bound.args[1:], **bound.kwargs)
            if continued is not None:
                cache.layers[0].recurrent_states[0] += continued.rest_1dn
            self._keep(module, cache, group)
            if len(self._groups) == 1 and group.rows_NT.shape[0] == 1:
                return found
            n_results = len(found) if type(module).__name__ in _ONLY_ROWS else 1
            out = _merge(out, found, group.rows_NT, row_1TD.shape[1], n_results)
        return out

    def _keep(self, module: nn.Module, cache: Any, group: "_Group") -> None:
        memory = self._memory.setdefault(module, {})
        for key, state in _states(cache):
            if key not in memory:
                with torch.inference_mode(False):  # it outlives the pass
                    memory[key] = state.new_zeros(self.spare + 1, *state.shape[1:])
            memory[key][group.slots_N] = state
            if group.copy is not None:
                group.copy[module, key] = _to_host(state[0])


class _Group(NamedTuple):
    """Sequences that a module computes together."""

    rows_NT: Tensor
    slots_N: Tensor
    fresh: bool
    copy: States | None = None
    """Copy that receives the states after the tokens, if the group is one sequence."""
    in_prompt: bool = False


def _pieces(rows_1T: Tensor, span: StateSpan) -> Iterator[_Group]:
    """Yield the tokens of a sequence, divided where its states are copied."""
    slots, fresh, start = torch.tensor([span.slot], device=rows_1T.device), span.fresh, 0
    for end, copy in (*span.copies, (rows_1T.shape[1], None)):
        if end > start:
            yield _Group(rows_1T[:, start:end], slots, fresh, copy, span.in_prompt)
            fresh, start = False, end


def _to_host(state: Tensor) -> Tensor:
    """Return a copy in host memory, complete once the stream reaches this point."""
    host = torch.empty(state.shape, dtype=state.dtype, pin_memory=state.is_cuda)
    return host.copy_(state, non_blocking=True)


def states_bytes(states: States) -> int:
    return sum(each.nbytes for each in states.values())


@functools.cache
def _signature(kind: Any) -> inspect.Signature:
    """Return the signature of the class's `forward`; the instance may have another around it."""
    return inspect.signature(kind.forward)


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a module keeps a state of each sequence."""
    return type(module).__name__ in _CACHE_ARGUMENTS


def _find_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if is_recurrent(module)]


def _merge(out: Any, found: Any, rows_NT: Tensor, n_rows: int, n_results: int = 1) -> Any:
    """Write the results of a group to its rows. Of several results only the first ones are used;
    the others are states, which are not read."""
    if isinstance(found, tuple):
        before = (None,) * len(found) if out is None else out
        merged = zip(before[:n_results], found, strict=False)
        rest = (None for _ in found[n_results:])
        return *(_merge(*each, rows_NT, n_rows) for each in merged), *rest
    if out is None:
        out = found.new_empty(1, n_rows, *found.shape[2:])
    out[0, rows_NT] = found
    return out


def _new_cache(module: Any) -> Any:
    """Return a cache of transformers for one module, without states."""
    from transformers.cache_utils import Cache, LinearAttentionLayer

    class OneLayer(Cache):  # type: ignore[misc]
        linear: Tensor | None = None  # MiniMax's state

        def get_linear_cache(self, layer_idx: int) -> Tensor | None:
            return self.linear

        def set_linear_cache(self, layer_idx: int, linear: Tensor) -> None:
            self.linear = linear

    layer = LinearAttentionLayer(number_of_states=getattr(module, "conv_idx", 0) + 1)
    return OneLayer(layers=[layer] * (module.layer_idx + 1))


def _put(cache: Any, key: _Key, state: Tensor) -> None:
    kind, number = key
    layer = cache.layers[0]
    if kind == "linear":
        cache.linear = state
        return
    if kind == "conv":
        layer.conv_states[number], layer.is_conv_states_initialized[number] = state, True
        layer.conv_kernel_size[number] = state.shape[-1]
    else:
        layer.recurrent_states[number] = state
        layer.is_recurrent_states_initialized[number] = True
    layer.has_previous_state[number] = True
    layer.dtype, layer.device = state.dtype, state.device


def _states(cache: Any) -> Iterator[tuple[_Key, Tensor]]:
    layer = cache.layers[0]
    kinds = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
    for kind, states in kinds.items():
        for number, state in states.items():
            if state is not None:
                yield (kind, number), state
    if cache.linear is not None:
        yield ("linear", 0), cache.linear


def state_bytes(model: nn.Module) -> int:
    """Return the bytes of the states of one sequence; `model` may be on the meta device."""
    return sum(state.nbytes for state in _example_states(model))


def pin_copies(model: nn.Module, most: int) -> None:
    """Pin host memory for the first copies of states, up to `most` bytes together, which torch
    keeps for them. Otherwise passes and decoding steps would wait for it, and the GPU for them."""
    states = _example_states(model)
    count = min(_PINNED_COPIES, most // max(1, sum(state.nbytes for state in states)))
    made = [
        torch.empty(state.shape, dtype=state.dtype, pin_memory=True)
        for state in states
        for _ in range(count)
    ]
    del made  # all at once


def _example_states(model: nn.Module) -> list[Tensor]:
    """Return states of one sequence as an example."""
    counts: Counter[Any] = Counter()
    kinds = {}
    for module in _find_modules(model):
        kind = type(module), *(parameter.shape for parameter in module.parameters())
        counts[kind] += 1
        kinds[kind] = module
    width: int = model.config.get_text_config().hidden_size  # type: ignore[operator,union-attr]
    found: list[Tensor] = []
    for kind, count in counts.items():
        found += _states_of(kinds[kind], width) * count
    return found


def _states_of(module: nn.Module, hidden_width: int) -> list[Tensor]:
    weight = next(p for p in module.parameters() if p.dim() > 1)
    linear = any(isinstance(each, nn.Linear) for each in module.modules())
    width = hidden_width if linear else int(module.conv1d.in_channels)  # type: ignore[union-attr,arg-type]
    others = inspect.signature(module.forward).parameters
    cache = _new_cache(module)
    given: dict[str, Any] = {_CACHE_ARGUMENTS[type(module).__name__]: cache}
    given |= {name: None for name in ("position_embeddings", "attention_mask") if name in others}
    with torch.no_grad():
        module(torch.zeros(1, 1, width, dtype=weight.dtype, device=weight.device), **given)
    return [state for _, state in _states(cache)]

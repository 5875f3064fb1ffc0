"""Pre-gates: gates that are computed some blocks before the experts that they choose.

The gates of a chain of MoE blocks are numbered. With level L, gate m >= L is a pre-gate: block
m - L computes it, on the input of its own gate, and block m uses the result. The first L gates work
as before. Every module keeps its place, its parameters and its hooks: only the class of some
modules is replaced by a subclass with another `forward`.

- The stack (the module with the list of layers) opens a pass, which holds results on their way.
- A gate returns the result that was carried to it and computes the pre-gate of a later block.
- Layers and MoE blocks attach what their gates are about to take to their input tensor. A
  recomputation by a non-reentrant checkpoint runs in another thread or after other forwards, but
  gets the same tensor.
"""

import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from overspill.core.errors import ConfigError, OrderError
from overspill.moe import pregate_cover
from overspill.moe.autograd_state import graph_task, in_function
from overspill.moe.decoding import current_decoder
from overspill.moe.dense_weights import read_in_place
from overspill.moe.placeholder import ExpertPlaceholder

_CARRIED = "_overspill_carried"
"""Attribute of the input of a layer: what its gates take, by chain."""
_CHOSEN_BY = "_overspill_chosen_by"
"""Attribute of the module with the experts of a block: key and number of their gate."""
_OWN_FORWARD = "_forward_before_pregate"
"""Attribute of a module that had a `forward` of its own, not that of its class."""


class ChainKey:
    """Identifies a chain. Gates refer to it, not to the chain: this would be a reference cycle."""


@dataclass(eq=False)
class GatePosition:
    """The place of a gate in its chain; the attribute `pregating` of the gate."""

    key: ChainKey
    level: int
    number: int
    path: str
    conventional: dict[str, Tensor] = field(default_factory=dict)
    """The tensors of the gate that the pre-gate has replaced, on the CPU."""

    @property
    def is_pregate(self) -> bool:
        return self.number >= self.level


@dataclass(eq=False)
class ChainGate:
    """A gate, the MoE block that it belongs to and the module with the experts of the block.
    `arguments` are those of the gate's `forward`, the hidden state first. `read_ids` reads the ids
    of experts from the result of the gate."""

    gate: nn.Module
    block: nn.Module
    experts: nn.Module
    arguments: tuple[str, ...]
    read_ids: "IdsReader"

    def own_input(self, hidden: Tensor) -> Tensor:
        """The input of this gate, given `hidden`, that of another gate which is not called yet:
        each of the two may change its input in place."""
        return hidden.clone() if self.gate.training and _has_jitter(self.gate) else hidden

    def compute(self, given: dict[str, Any], hidden: Tensor) -> Any:
        """The result for `own_input` of another gate, which was called with `given`. Arguments that
        are attributes of a block, such as a bias, are those of the gate's own block."""
        others = {
            name: getattr(self.block, name, given.get(name))
            for name in self.arguments[1:]
            if name in given or hasattr(self.block, name)
        }
        with read_in_place():  # the gate is small, and of another block
            return plain_forward(self.gate)(hidden, **others)


IdsReader = Callable[[ChainGate, Any], Tensor]
"""The ids of experts [T, K] in the result of a gate; the number of experts stands for none."""


@dataclass(eq=False)
class Chain:
    key: ChainKey
    level: int
    gates: tuple[ChainGate, ...]

    def __post_init__(self) -> None:
        pregate_cover.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Chain":
        """The chain of a copy of the model."""
        return Chain(copy.deepcopy(self.key, memo), self.level, copy.deepcopy(self.gates, memo))

    @property
    def pregates(self) -> list[nn.Module]:
        return [each.gate for each in self.gates[self.level :]]


@dataclass(frozen=True)
class GatedBlock:
    """An MoE block and its place in a model: a layer of a stack."""

    path: str
    stack: nn.Module
    layer: nn.Module
    block: nn.Module
    gate: nn.Module
    experts: nn.Module
    arguments: tuple[str, ...]
    read_ids: IdsReader


def install(blocks: Sequence[GatedBlock], level: int) -> None:
    """Give the blocks of one chain pre-gates; all was checked."""
    key = ChainKey()
    gates = tuple(
        ChainGate(each.gate, each.block, each.experts, each.arguments, each.read_ids)
        for each in blocks
    )
    for number, each in enumerate(blocks):
        position = GatePosition(key, level, number, each.path)
        if position.is_pregate:
            state = each.gate.state_dict()
            position.conventional = {
                name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()
            }
        each.gate.pregating = position  # type: ignore[assignment]
        replace_forward(each.gate, _ask_gate)
        vars(each.experts)[_CHOSEN_BY] = key, number
        for module in {id(m): m for m in (each.layer, each.block)}.values():
            numbers = vars(module).setdefault("pregated", [])
            numbers.append((key, number))
            if len(numbers) == 1:
                replace_forward(module, _enter)
    stack = blocks[0].stack
    chains = vars(stack).setdefault("pregate_chains", [])
    chains.append(Chain(key, level, gates))
    if len(chains) == 1:
        replace_forward(stack, _run_stack, keep_module=True)


def positions(model: nn.Module) -> Iterator[tuple[str, nn.Module, GatePosition]]:
    """Path, gate and position of all gates of chains with pre-gates."""
    for path, module in model.named_modules():
        position = vars(module).get("pregating")
        if position is not None:
            yield path, module, position


# -- subclasses with another method --------------------------------------------------------------


def replace_forward(module: nn.Module, around: Any, keep_module: bool = False) -> None:
    """Make `module.forward` call `around(module, plain forward, args, kwargs)`. The class is
    replaced by a subclass, so that copies of the module work too. With `keep_module` it has the
    name of the class and its module, by which transformers finds its entries for a model."""
    own = vars(module).pop("forward", None)
    if own is not None:
        vars(module)[_OWN_FORWARD] = own
    kind: Any = type(module)  # mypy does not accept a type as hashable
    module.__class__ = _subclass(kind, around, keep_module)


@functools.cache
def _subclass(kind: type[Any], around: Any, keep_module: bool) -> type[Any]:
    plain = kind.forward

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, vars(self).get(_OWN_FORWARD) or MethodType(plain, self), args, kwargs)

    names = {"forward": forward, "plain_forward": plain}
    if around is _ask_gate:
        names["_replicate_for_data_parallel"] = _refuse_replica
    return subclass(kind, names, kind.__module__ if keep_module else __name__)


def subclass(kind: type[Any], names: dict[str, Any], module: str) -> type[Any]:
    """A subclass with the name of `kind`."""
    named = {"__qualname__": kind.__qualname__, "__module__": module}
    return type(kind.__name__, (kind,), names | named)


def plain_forward(gate: Any) -> Callable[..., Any]:
    """The `forward` of a gate without its chain."""
    return vars(gate).get(_OWN_FORWARD) or gate.plain_forward  # type: ignore[no-any-return]


def replace_plain(gate: Any, around: Callable[..., Any]) -> tuple[str, Any]:
    """The attribute of a gate and its value with which `around(plain forward, *args)` computes the
    gate, also as a pre-gate."""
    if hasattr(gate, "plain_forward"):
        return _OWN_FORWARD, functools.partial(around, plain_forward(gate))
    return "forward", functools.partial(around, gate.forward)


def _refuse_replica(gate: nn.Module) -> NoReturn:
    raise OrderError(
        "torch.nn.DataParallel does not support pre-gates: a copy of a block would use the gates "
        "of another GPU; use overspill.offload(model, mesh=...) for several GPUs"
    )


# -- passes --------------------------------------------------------------------------------------


class _ChainPass:
    """A forward through a chain, or the recomputation of one of its blocks."""

    def __init__(self, chain: Chain, values: dict[int, Any], recomputed: bool = False) -> None:
        self.chain = chain
        self.task = graph_task()
        self.in_function = in_function()
        self._values = values
        self._recomputed = recomputed
        self._taken = -1  # the last gate whose result was taken

    def put(self, number: int, value: Any) -> None:
        if not self._recomputed:  # else the later block has taken it in the forward
            self._values[number] = value

    def take(self, position: GatePosition) -> Any:
        self._values.pop(position.number - 1, None)
        self._taken = position.number
        if position.number not in self._values:
            raise OrderError(
                f"{position.path} has a pre-gate, which the block {position.level} MoE blocks "
                "before it computes; that block has not run in this forward. Layers cannot be "
                "left out or called in another order (layer drop, early exit)"
            )
        return self._values[position.number]

    def routing(self, number: int) -> Any:
        """The result of a pre-gate while its block computes; None for a conventional gate."""
        return self._values.get(number)

    def ahead(self) -> dict[int, Any]:
        """Results whose blocks have not taken them yet."""
        return {number: value for number, value in self._values.items() if number > self._taken}

    def carried(self, numbers: Iterable[int]) -> dict[int, Any]:
        """Results that are here, without their graphs."""
        found = {number: self._values[number] for number in numbers if number in self._values}
        return {number: map_tensors(value, _without_graph) for number, value in found.items()}


class _ChainPasses(threading.local):
    """The passes of this thread, the innermost one last."""

    def __init__(self) -> None:
        self.running: list[_ChainPass] = []

    def current(self, key: ChainKey) -> _ChainPass | None:
        """The pass that a call belongs to; None if it is a recomputation, or none is running."""
        for each in reversed(self.running):
            if each.task != graph_task():
                return None
            if each.chain.key is key:
                return each
        return None

    @contextmanager
    def run(self, passes: Sequence[_ChainPass]) -> Iterator[None]:
        before = len(self.running)
        self.running += passes
        try:
            yield
        finally:
            del self.running[before:]


_PASSES = _ChainPasses()

Notes = dict[ChainKey, tuple[Chain, dict[int, Any]]]
"""Results that the gates of a block take, by chain, for a recomputation of the block."""


def notes_of(tensor: Tensor) -> Notes:
    """The notes attached to the input of a block."""
    notes: Notes = vars(tensor).setdefault(_CARRIED, {})
    return notes


class NotedCopy:
    """A copy of the input of a block, from which the block is recomputed while this object lives.
    Autograd gives the block another tensor with the same memory."""

    def __init__(self, copy: Tensor, notes: Notes) -> None:
        self._copy = copy  # so that nothing else has its address
        self.notes = notes
        _COPIES[copy.data_ptr()] = self


_COPIES: weakref.WeakValueDictionary[int, NotedCopy] = weakref.WeakValueDictionary()
"""Copies by their address."""


def _notes_for_recomputation(hidden: Tensor) -> Notes:
    if notes := vars(hidden).get(_CARRIED):
        return cast(Notes, notes)
    copy = _COPIES.get(hidden.data_ptr())
    return {} if copy is None else copy.notes


Ahead = list[dict[int, Any]]
"""Results of pre-gates that blocks further on will take: by the number of the gate, for each chain
of a stack."""


def results_ahead() -> Ahead:
    """The results of the pass that runs in this thread."""
    return [each.ahead() for each in _PASSES.running]


def put_ahead(results: Ahead) -> None:
    """Give the running pass the results of an earlier one, which has ended before their blocks."""
    for each, found in zip(_PASSES.running, results, strict=True):
        for number, value in found.items():
            each.put(number, value)


def _run_stack(stack: Any, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    for chain in stack.pregate_chains:
        for each in chain.gates[chain.level :]:
            if not any(module is each.gate for module in each.block._modules.values()):
                raise _replaced(each)
    if torch.is_grad_enabled():
        pregate_cover.note(stack)
    with _PASSES.run([_ChainPass(chain, {}) for chain in stack.pregate_chains]):
        return plain(*args, **kwargs)


def _enter(module: Any, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The forward of a layer or of an MoE block."""
    keys = {key: None for key, _ in module.pregated}
    passes = [_PASSES.current(key) for key in keys]
    running = [each for each in passes if each is not None]
    if not torch.is_grad_enabled():
        if in_function() and any(not each.in_function for each in running):
            raise OrderError(
                "a reentrant checkpoint loses the gradients of pre-gates, which leave the "
                "checkpointed block; use checkpoint(..., use_reentrant=False), or "
                "gradient_checkpointing_enable({'use_reentrant': False})"
            )
        return plain(*args, **kwargs)
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, Tensor) or (not running and graph_task() == -1):
        return plain(*args, **kwargs)  # the gate raises
    if running:
        notes = notes_of(hidden)
        for each in running:
            numbers = [number for key, number in module.pregated if key is each.chain.key]
            notes[each.chain.key] = each.chain, each.carried(numbers)
        return plain(*args, **kwargs)
    found = [note for key, note in _notes_for_recomputation(hidden).items() if key in keys]
    recomputed = [
        _ChainPass(chain, {n: map_tensors(v, _again) for n, v in carried.items()}, recomputed=True)
        for chain, carried in found
    ]
    with _PASSES.run(recomputed):
        return plain(*args, **kwargs)


def _ask_gate(gate: Any, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    position: GatePosition = gate.pregating
    running = _PASSES.current(position.key)
    if running is None:
        raise _no_pass(position)
    number, gates = position.number + position.level, running.chain.gates
    later = gates[number] if number < len(gates) else None
    names = gates[position.number].arguments
    given = dict(zip(names, args, strict=False)) | kwargs
    hidden = given[names[0]] if later is None else later.own_input(given[names[0]])
    result = running.take(position) if position.is_pregate else plain(*args, **kwargs)
    if later is not None:
        routing = later.compute(given, hidden)
        running.put(number, routing)
        if not torch.is_grad_enabled():
            _hint(later, routing)
    return result


def _hint(gate: ChainGate, routing: Any) -> None:
    """Let the experts of a later block be uploaded, or read, meanwhile."""
    experts = gate.experts.parameters()
    placeholder = next((p for p in experts if isinstance(p, ExpertPlaceholder)), None)
    if placeholder is None or placeholder.source is not None:
        return
    ids = gate.read_ids(gate, routing)
    if (decoder := current_decoder()) is not None:
        decoder.hint(placeholder, ids)
    else:
        placeholder.engine.hint(placeholder.layer, ids)


def check_selected(experts: nn.Module, selected: Tensor) -> None:
    """Raise if a block calls its experts with other ids (or another mask) than those in the result
    of its pre-gate, from which experts were uploaded ahead."""
    chosen_by = vars(experts).get(_CHOSEN_BY)
    if chosen_by is None or torch.compiler.is_compiling():
        return
    key, number = chosen_by
    running = _PASSES.current(key)
    if running is None:
        return
    found = whole_tensors(running.routing(number))
    # a gate without ids has a reader of its own; a block may call its experts with a view
    if found and not (len(found) == 1 and _is_view(selected, found[0])):
        gate = running.chain.gates[number]
        raise unreadable(gate, "its block computes other experts than those that it returns")


def whole_tensors(routing: Any) -> list[Tensor]:
    """The tensors of integers in the result of a gate."""
    values = routing if isinstance(routing, tuple) else (routing,)
    whole = torch.int32, torch.int64
    return [each for each in values if isinstance(each, Tensor) and each.dtype in whole]


def _is_view(tensor: Tensor, of: Tensor) -> bool:
    return tensor.data_ptr() == of.data_ptr() and tensor.numel() == of.numel()


def unreadable(gate: ChainGate, why: str) -> ConfigError:
    path = cast(GatePosition, gate.gate.pregating).path
    return ConfigError(
        f"{path} cannot have a pre-gate: the experts that {type(gate.gate).__name__} chooses "
        f"cannot be read from its result, because {why}. Remove hooks that change the routing, or "
        "use the conventional model: overspill.load(..., pregate=False)"
    )


def _replaced(gate: ChainGate) -> ConfigError:
    path = cast(GatePosition, gate.gate.pregating).path
    kinds = ", ".join(
        type(module).__name__
        for module in gate.block._modules.values()
        if module is not None and any(each is gate.gate for each in module.modules())
    )
    by = f" by {kinds}" if kinds else ""
    return ConfigError(
        f"the gate of {path} was replaced{by} after overspill.pregate. A pre-gate "
        "is computed in another block than an adapter of it would be: give adapters other layers "
        '(target_modules="all-linear" may include gates), and train the pre-gates themselves'
    )


def _no_pass(position: GatePosition) -> OrderError:
    if graph_task() == -1:
        return OrderError(
            f"{position.path} is part of a model with pre-gates and was called outside the forward "
            "of the model, where no block before it has chosen its experts; call the model"
        )
    return OrderError(
        f"{position.path} has pre-gates and is recomputed in backward with an input that is not "
        "that of its forward; apply torch.utils.checkpoint to whole layers after "
        "overspill.pregate, without hooks that move saved tensors (save_on_cpu) and not inside "
        "another checkpoint"
    )


# -- values --------------------------------------------------------------------------------------


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to the tensors that a gate returns."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        made = [map_tensors(each, function) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return value


def _without_graph(value: Tensor) -> Tensor:
    return value.detach().requires_grad_(value.requires_grad)


def _again(carried: Tensor) -> Tensor:
    """Return the value for a recomputation, which must save the same tensors as the forward. Not a
    leaf, since the block may change it in place."""
    return carried.clone() if carried.requires_grad else carried


def _has_jitter(gate: nn.Module) -> bool:
    return any(
        "jitter" in name and isinstance(value, float) and value > 0
        for name, value in vars(gate).items()
    )

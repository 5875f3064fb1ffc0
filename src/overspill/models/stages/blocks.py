"""The blocks of a model, and forwards of the model that run only some of them."""

import functools
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from overspill.core.errors import ConfigError
from overspill.models.gpt import Block, GPTMoE
from overspill.models.huggingface.find_experts import experts_paths
from overspill.moe.pregate import Ahead, map_tensors, put_ahead, results_ahead

_MARK = "_overspill_stage"


def find_blocks(model: nn.Module) -> list[str]:
    """Return the paths of the decoder blocks, lowest first: the elements of the outermost list of
    modules that has the experts."""
    if isinstance(model, GPTMoE):
        return [f"blocks.{number}" for number in range(len(model.blocks))]
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind is None:
        raise ConfigError(
            f"stages need a transformers model or a GPT-MoE, and this is a {type(model).__name__}"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{kind}: stages need blocks that follow each other, and this model has an encoder and "
            "a decoder; train it without stages"
        )
    if shared := getattr(config.get_text_config(), "num_kv_shared_layers", 0):
        raise ConfigError(
            f"{kind}: num_kv_shared_layers={shared} blocks use keys and values of earlier ones, "
            "which may be in another stage; train it without stages"
        )
    lists = {_outermost_list(model, path) for path in experts_paths(model)}
    if len(lists) != 1 or None in lists:
        raise ConfigError(
            f"{kind}: stages need blocks that follow each other in one list of modules; its "
            "experts are not in one"
        )
    (path,) = lists
    assert path is not None
    return [f"{path}.{name}" for name, _ in model.get_submodule(path).named_children()]


def _outermost_list(model: nn.Module, path: str) -> str | None:
    parts = path.split(".")
    for length in range(1, len(parts)):
        outer = ".".join(parts[:length])
        if isinstance(model.get_submodule(outer), nn.ModuleList):
            return outer
    return None


@dataclass(frozen=True)
class Passing:
    """Tensors of a micro-batch between two stages."""

    tensors: Sequence[Tensor]
    """Hidden states, then the inputs of the balance loss from the blocks so far (the logits of each
    router; for a GPT-MoE the losses of all blocks, as one tensor), then results of pre-gates."""
    ahead: Ahead = field(default_factory=list)
    """Form of the results of pre-gates, with tensors on the meta device."""

    @classmethod
    def of(cls, hidden: Tensor, recorded: Sequence[Tensor], ahead: Ahead) -> "Passing":
        form = _map_ahead(ahead, lambda tensor: torch.empty_like(tensor, device="meta"))
        return cls([hidden, *recorded, *_tensors(ahead)], form)

    def split(self) -> tuple[Tensor, Sequence[Tensor], Ahead]:
        """Return hidden states, inputs of the balance loss, and results of pre-gates."""
        end = len(self.tensors) - len(_tensors(self.ahead))
        results = iter(self.tensors[end:])
        return self.tensors[0], self.tensors[1:end], _map_ahead(self.ahead, lambda _: next(results))

    def message(self) -> list[Tensor]:
        """Return everything as tensors, for another rank; the form of results of pre-gates comes
        last."""
        if not self.ahead:
            return [*self.tensors]
        form = bytearray(pickle.dumps(self.ahead))
        return [*self.tensors, torch.frombuffer(form, dtype=torch.uint8).to(self.tensors[0].device)]

    @classmethod
    def received(cls, message: Sequence[Tensor]) -> "Passing":
        *tensors, form = message
        if form.dtype is not torch.uint8:
            return cls(message)
        return cls(tensors, pickle.loads(bytes(form.tolist())))


def _map_ahead(ahead: Ahead, function: Callable[[Tensor], Tensor]) -> Ahead:
    return [{n: map_tensors(value, function) for n, value in chain.items()} for chain in ahead]


def _tensors(ahead: Ahead) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _map_ahead(ahead, note)
    return found


class EndOfStage(BaseException):
    """Raised to end the forward of a model after the last block of a stage. Not an Exception, which
    the model might handle."""

    def __init__(self, passing: Passing) -> None:
        super().__init__()
        self.passing = passing


@dataclass
class _Running:
    """State of a forward through the blocks of a stage."""

    blocks: range
    incoming: Passing | None
    balances: list[Tensor]
    """Balance losses of the blocks of a GPT-MoE so far."""
    skipped: Iterator[Tensor]
    """Balance losses of blocks that are still to be skipped."""


class StagedBlocks:
    """The blocks of a model. While `run` calls the forward of the model, only those of one stage
    compute."""

    def __init__(self, model: nn.Module) -> None:
        self.paths = find_blocks(model)
        self._blocks = [model.get_submodule(path) for path in self.paths]
        self._local = threading.local()  # other threads may use the whole model
        for number, block in enumerate(self._blocks):
            if _MARK in block.__dict__ and block.__dict__[_MARK][1]() is not None:
                raise ConfigError("the model is divided into stages already; close those first")
            if _MARK not in block.__dict__:
                block.__class__ = _staged(type(block))
            block.__dict__[_MARK] = (number, weakref.ref(self))  # no cycle with the model

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, number: int) -> nn.Module:
        return self._blocks[number]

    def run(
        self, blocks: range, incoming: Passing | None, forward: Callable[[], Any]
    ) -> Passing | Any:
        """Return the tensors that pass from `blocks` to the next ones, or the result of `forward`
        if they are the last. `incoming` comes from the blocks before; None for the first ones."""
        losses: list[Tensor] = []
        if incoming is not None and isinstance(self._blocks[0], Block):
            losses = [loss for stack in incoming.split()[1] for loss in stack.unbind()]
        self._local.running = _Running(blocks, incoming, losses, iter(list(losses)))
        try:
            result = forward()
        except EndOfStage as end:
            return end.passing
        finally:
            self._local.running = None
        if blocks.stop < len(self):
            raise ConfigError(
                f"{self.paths[blocks.stop - 1]} was not called: the forward of this model does not "
                "pass its blocks in order; train it without stages"
            )
        return result

    def call(
        self, number: int, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute or skip a block that the model calls."""
        running: _Running | None = getattr(self._local, "running", None)
        if running is None:
            return plain(*args, **kwargs)
        block, blocks = self._blocks[number], running.blocks
        if number < blocks.start:
            hidden = args[0] if args else kwargs["hidden_states"]
            if number == blocks.start - 1:
                assert running.incoming is not None
                hidden, recorded, ahead = running.incoming.split()
                put_ahead(ahead)
                if not isinstance(block, Block):
                    _recorded_logits().extend(recorded)
            if isinstance(block, Block):
                return hidden, None if block.moe is None else next(running.skipped)
            return hidden
        result = plain(*args, **kwargs)
        hidden = result
        if isinstance(block, Block):
            hidden, balance = result
            running.balances += [] if balance is None else [balance]
        if not isinstance(hidden, Tensor):
            raise ConfigError(
                f"{self.paths[number]} returns {type(hidden).__name__}, not hidden states alone; "
                "train this model without stages"
            )
        if number == blocks.stop - 1 < len(self) - 1:
            recorded = [torch.stack(running.balances)] if running.balances else []
            if not isinstance(block, Block):
                recorded = _recorded_logits()
            raise EndOfStage(Passing.of(hidden, recorded, results_ahead()))
        return result

    def close(self) -> None:
        """Restore the classes of the blocks."""
        for block in self._blocks:
            del block.__dict__[_MARK]
            block.__class__ = type(block).__mro__[1]


def _recorded_logits() -> list[Tensor]:
    """Return the logits of routers that the running forward has recorded for its balance loss."""
    from transformers.utils.output_capturing import _active_collector

    recorded = _active_collector.get()
    return [] if recorded is None else recorded.get("router_logits", [])


def _staged(plain: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a block's class whose calls go through `StagedBlocks.call`, except in
    recomputations."""

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        number, find = self.__dict__[_MARK]
        blocks = find()
        if blocks is None:
            return plain.__call__(self, *args, **kwargs)
        return blocks.call(number, functools.partial(plain.__call__, self), args, kwargs)

    made = type(plain.__name__, (plain,), {"__call__": __call__, "__module__": plain.__module__})
    made.__qualname__ = plain.__qualname__
    return made


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, receive: Callable[[Tensor], None]) -> Any:
        ctx.receive = receive
        return hidden.detach()  # no view: the model may change it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.receive(grad)
        return None, None, None


def entering(hidden: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
    """Return hidden states as the input of a stage: a backward ends there, and `receive` is called
    with their gradient. Nothing keeps the hidden states themselves alive."""
    anchor = torch.zeros((), requires_grad=True)
    entered: Tensor = _Entry.apply(anchor, hidden, receive)  # type: ignore[no-untyped-call]
    return entered

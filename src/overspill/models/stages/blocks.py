"""The blocks of a transformers model, and how one of its forwards passes only some of them."""

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overspill.core.errors import ConfigError
from overspill.models.huggingface.adapt import experts_paths

_MARK = "_overspill_stage"


def find_blocks(model: nn.Module) -> list[str]:
    """The paths of the decoder blocks, lowest first: the elements of the outermost list of modules
    that has the experts."""
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind is None:
        raise ConfigError(f"stages need a transformers model, and this is a {type(model).__name__}")
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


class EndOfStage(BaseException):
    """Ends the forward of a model after the last block of a stage. No Exception, which the model
    might handle."""

    def __init__(self, passed: list[Tensor]) -> None:
        super().__init__()
        self.passed = passed


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
        self, blocks: range, incoming: Sequence[Tensor] | None, forward: Callable[[], Any]
    ) -> list[Tensor] | Any:
        """Return the tensors that pass from `blocks` to the next ones, or the result of `forward`
        if they are the last: the hidden states, and the logits of all routers so far if the model
        records them. `incoming` is the same from the blocks before; None for the first ones."""
        self._local.running = (blocks, incoming)
        try:
            result = forward()
        except EndOfStage as end:
            return end.passed
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
        """A block is called by the model."""
        running = getattr(self._local, "running", None)
        if running is None:
            return plain(*args, **kwargs)
        blocks, incoming = running
        if number < blocks.start - 1:
            return args[0] if args else kwargs["hidden_states"]
        if number == blocks.start - 1:
            _recorded_logits().extend(incoming[1:])
            return incoming[0]
        hidden = plain(*args, **kwargs)
        if not isinstance(hidden, Tensor):
            raise ConfigError(
                f"{self.paths[number]} returns {type(hidden).__name__}, not hidden states alone; "
                "train this model without stages"
            )
        if number == blocks.stop - 1 < len(self) - 1:
            raise EndOfStage([hidden, *_recorded_logits()])
        return hidden

    def close(self) -> None:
        """Gives the blocks their classes back."""
        for block in self._blocks:
            del block.__dict__[_MARK]
            block.__class__ = type(block).__mro__[1]


def _recorded_logits() -> list[Tensor]:
    """The logits of routers that the running forward has recorded for its balance loss."""
    from transformers.utils.output_capturing import _active_collector

    recorded = _active_collector.get()
    return [] if recorded is None else recorded.get("router_logits", [])


def _staged(plain: type[nn.Module]) -> type[nn.Module]:
    """A class of blocks that ask before they compute, outside of their recomputation."""

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
    """Hidden states as the input of a stage: a backward ends there, and `receive` gets their
    gradient. Nothing holds the hidden states themselves."""
    anchor = torch.zeros((), requires_grad=True)
    entered: Tensor = _Entry.apply(anchor, hidden, receive)  # type: ignore[no-untyped-call]
    return entered

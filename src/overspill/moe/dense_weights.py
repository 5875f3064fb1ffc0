"""Weights of dense parameters in host memory, copied to the device block by block.

The data of each parameter is pinned host memory in the form of a device tensor: for optimizers,
state dicts and modules that are called on their own it is a parameter like any other, only slow.
While the model runs, the parameters of the block that computes refer to a copy on the device, and
the next block is copied. Copies are ordinary tensors: where autograd saves one for backward, it
lives until then. Gradients go to host memory when they are complete.
"""

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from overspill.core.interrupt import DeferredInterrupt
from overspill.moe.dense_memory import DenseMemory
from overspill.transfer.driver import copy_on
from overspill.transfer.streams import CopyStream, StreamEvent, record_event, wait_event


@dataclass(eq=False)
class DenseBlock:
    """Parameters that are copied together, when one of the modules is called. Without modules they
    are never copied."""

    name: str
    modules: list[nn.Module] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    held: list["_Held"] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)


def dense_blocks(model: nn.Module, experts: Collection[int] = ()) -> list[DenseBlock]:
    """All parameters whose id is not in `experts`: one block for each element of an outermost
    ModuleList (a decoder layer), one for what is outside of them (final norm and head), and one for
    embeddings. A lookup reads few rows of those, so it needs no copy."""
    rest, tables = DenseBlock("the head"), DenseBlock("embeddings")
    blocks, seen = [tables, rest], set(experts)
    find_output = getattr(model, "get_output_embeddings", lambda: None)
    output = find_output()

    def add(block: DenseBlock, module: nn.Module) -> None:
        found = [p for p in module.parameters(recurse=False) if p.numel() and id(p) not in seen]
        if found:
            seen.update(map(id, found))
            block.parameters += found
            if not isinstance(module, nn.Embedding):
                block.modules.append(module)

    def visit(module: nn.Module, name: str, block: DenseBlock) -> None:
        if not isinstance(module, nn.Embedding) or module is output:
            add(block, module)
        for child_name, child in module.named_children():
            path, inside = f"{name}.{child_name}" if name else child_name, block
            if block is rest and isinstance(module, nn.ModuleList):
                inside = DenseBlock(path)
                blocks.append(inside)
            visit(child, path, inside)

    visit(model, "", rest)
    for module in model.modules():  # those that no other module shares
        add(tables, module)
    return [block for block in blocks if block.parameters]


def buffer_bytes(blocks: Sequence[DenseBlock], training: bool) -> int:
    """Device memory for blocks in host memory: one that computes and one that is copied; in
    training the largest gradient, as it is made and as it is scaled or added."""
    largest = max((block.nbytes for block in blocks if block.modules), default=0)
    gradient = max((p.nbytes for block in blocks for p in block.parameters), default=0)
    return 2 * largest + (2 * gradient if training else 0)


@dataclass
class _Held:
    """A parameter in host memory."""

    parameter: nn.Parameter
    host: Tensor
    version: int = 0  # of the parameter when its copy was made

    def point_to(self, copy: Tensor) -> None:
        if self.parameter.data_ptr() == self.host.data_ptr():  # else the user has set other data
            self.version = self.parameter._version
            self.parameter.data = copy

    def put_back(self, copy: Tensor) -> None:
        if self.parameter.data_ptr() == copy.data_ptr():
            if self.parameter._version != self.version:  # a module has changed its weights
                self.host.copy_(copy)
            self.parameter.data = self.host


@dataclass(frozen=True)
class _Copy:
    """A block on the device."""

    block: DenseBlock
    tensors: list[Tensor]
    arrived: StreamEvent


class _Thread(threading.local):
    reads_in_place = False


_THREAD = _Thread()


@contextmanager
def read_in_place() -> Iterator[None]:
    """Modules that this thread calls within the block read their weights in host memory."""
    before, _THREAD.reads_in_place = _THREAD.reads_in_place, True
    try:
        yield
    finally:
        _THREAD.reads_in_place = before


class DenseWeights:
    """Holds the dense parameters of a model in host memory.

    Parameters refer to copies only within a forward of the model and within a backward. If several
    threads are in one, no parameter changes under them: they use what is there, at worst in host
    memory.
    """

    def __init__(self, device: torch.device, memory: DenseMemory, copies: CopyStream) -> None:
        self._device = device
        self._memory = memory
        self._copies = copies
        self._lock = threading.RLock()  # guards all below
        self._passes: set[int] = set()  # threads in a forward, and ~ids of backward passes
        self._current: _Copy | None = None  # parameters refer to it
        self._next: _Copy | None = None
        self._previous: DenseBlock | None = None  # before the current one
        # by the last two blocks, since a backward comes in another order
        self._followers: dict[tuple[DenseBlock | None, DenseBlock | None], DenseBlock] = {}
        self._handles: list[Any] = []

    @torch.no_grad()
    def hold(self, model: nn.Module) -> None:
        """Move the parameters of `model` to host memory; its experts are elsewhere already."""
        for block in dense_blocks(model):
            for parameter in block.parameters:
                host = self._memory.empty_like(parameter)
                host.copy_(parameter)
                parameter.data = host
                block.held.append(_Held(parameter, host))
                if parameter.is_floating_point():
                    trained = parameter.requires_grad
                    parameter.requires_grad_(
                        True
                    )  # it may be later; torch refuses a hook until then
                    keep = _Hook(self._keep_gradient)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(keep))
                    parameter.requires_grad_(trained)
            use = _Hook(self._use, block)
            for module in block.modules:
                self._handles.append(module.register_forward_pre_hook(use))
            block.modules.clear()  # the model must not be part of a reference cycle
        self._wrap_forward(model)

    def _wrap_forward(self, model: nn.Module) -> None:
        """Not with hooks, since peft calls the method itself."""
        plain = model.forward
        bound = inspect.ismethod(plain) and plain.__self__ is model
        # a strong reference to a method of the model would be a cycle
        find: Callable[[], Any] = weakref.WeakMethod(plain) if bound else lambda: plain

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._running():
                return find()(*args, **kwargs)

        forward.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]
        model.forward = forward

    def close(self) -> None:
        """Remove the hooks. The parameters keep their memory."""
        with self._lock:
            self._drop_copies()
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._followers.clear()

    # -- copies ---------------------------------------------------------------------------

    @contextmanager
    def _running(self) -> Iterator[None]:
        """A forward of the model."""
        thread = threading.get_ident()
        with self._lock, DeferredInterrupt():
            if not self._passes - {thread}:
                self._drop_copies()  # none, unless an interrupt has left some
            elif self._current is not None:  # of another thread, perhaps on another stream
                self._arrive(self._current)
            self._passes.add(thread)
        try:
            yield
        finally:
            self._end(thread)

    def _is_alone(self) -> bool:
        """Whether a pass is running here, and no other one. A backward starts at its first call."""
        key = threading.get_ident()
        if key not in self._passes:
            task = torch._C._current_graph_task_id()
            if task == -1:
                return False
            key = ~task
            if key not in self._passes:
                self._passes.add(key)
                end = functools.partial(self._end, key)
                weakref.finalize(end, self._end, key).atexit = False  # a failure drops callbacks
                torch.autograd.Variable._execution_engine.queue_callback(end)
        return self._passes == {key}

    def _end(self, key: int) -> None:
        with self._lock, DeferredInterrupt():
            self._passes.discard(key)
            if not self._passes:
                self._drop_copies()

    def _use(self, block: DenseBlock, *_: object) -> None:
        """A module of `block` is called."""
        current = self._current
        if (current is not None and current.block is block) or _THREAD.reads_in_place:
            return
        # copies are used by graphs, which inference mode does not allow
        with self._lock, DeferredInterrupt(), torch.inference_mode(False), torch.no_grad():
            if not self._is_alone():
                return
            last = None if self._current is None else self._current.block
            self._followers[self._previous, last] = block
            self._put_back()
            if self._next is None or self._next.block is not block:
                self._discard_next()
                self._next = self._copy(block)
            self._current, self._next, self._previous = self._next, None, last
            self._arrive(self._current)
            for held, copy in zip(block.held, self._current.tensors, strict=True):
                held.point_to(copy)
            following = self._followers.get((last, block))
            if following is not None:
                self._next = self._copy(following)

    def _copy(self, block: DenseBlock) -> _Copy:
        pairs = [(torch.empty_like(held.host), held.host) for held in block.held]
        # kernels that are queued may still use the memory for something else
        free = record_event(self._device)
        arrived = self._copies.copy(pairs, block.name, [free])
        return _Copy(block, [copy for copy, _ in pairs], arrived)

    def _arrive(self, copy: _Copy) -> None:
        """Let the current stream use a copy, which may have been allocated for another."""
        wait_event(self._device, copy.arrived)
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            for tensor in copy.tensors:
                tensor.record_stream(stream)

    def _discard_next(self) -> None:
        if self._next is not None and self._copies.stream is not None:
            for tensor in self._next.tensors:  # no other stream waits for the end of the copy
                tensor.record_stream(self._copies.stream)
        self._next = None

    def _put_back(self) -> None:
        if self._current is not None:
            for held, copy in zip(self._current.block.held, self._current.tensors, strict=True):
                held.put_back(copy)
        self._current = None

    def _drop_copies(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._put_back()
        self._discard_next()
        self._previous = None

    # -- gradients ------------------------------------------------------------------------

    def _keep_gradient(self, parameter: Tensor) -> None:
        """The gradient of a backward was added to `parameter.grad`. The next one is added to the
        same tensor."""
        grad = parameter.grad
        if grad is None or grad.layout != torch.strided or grad.requires_grad:
            return
        if grad.device.type == self._device.type and not self._memory.owns(grad):
            with torch.no_grad():
                host = self._memory.empty_like(grad)
                if grad.is_cuda:  # in the order of its stream, which may use its memory again
                    copy_on(torch.cuda.current_stream(grad.device), host, grad)
                else:
                    host.copy_(grad)
                parameter.grad = host


class _Hook:
    """Calls a method of an object that it does not keep alive. In a copy of a module, and in one
    that was pickled, it does nothing."""

    def __init__(self, method: Callable[..., None] | None = None, *first: object) -> None:
        self._find = (lambda: None) if method is None else weakref.WeakMethod(method)
        self._first = first

    def __call__(self, *args: object) -> None:
        method = self._find()
        if method is not None:
            method(*self._first, *args)

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()

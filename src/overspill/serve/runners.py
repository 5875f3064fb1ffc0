"""Forward passes of a model over the tokens of several requests."""

import abc
import gc
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import OrderError
from overspill.hardware.machine import available_memory
from overspill.models.attention_cache import IN_USE, ReplacedAttention, attention_cache
from overspill.models.gpt import GPTMoE
from overspill.models.huggingface.recurrent import RecurrentStates
from overspill.models.huggingface.relative import RelativeAttention
from overspill.models.huggingface.rotary import FixedRotary
from overspill.models.huggingface.seq2seq import EncoderDecoder, is_encoder_decoder
from overspill.models.huggingface.sparse import SparseAttention
from overspill.moe.engine import Engine
from overspill.moe.placeholder import ExpertPlaceholder
from overspill.serve.checkpoints import Checkpoints
from overspill.serve.paged import Layout, PagedCache, SourceSpan, Span
from overspill.serve.request import Request
from overspill.serve.sampling import Chosen
from overspill.serve.scheduler import BatchItem
from overspill.serve.states import Part, StateSlots
from overspill.serve.support import has_states
from overspill.serve.weights_version import WeightsVersion
from overspill.trace.spans import Span as TraceSpan

_PIECE = 512
"""Tokens of a prompt in a pass that computes states again: longer ones may not fit into memory."""


class Runner(abc.ABC):
    """Computes tokens of requests with the keys and values of earlier tokens."""

    chosen: Chosen | None = None
    """The tokens that the device has drawn in the last batch, if it has; valid until the next
    batch."""

    @abc.abstractmethod
    def run(self, batch: Sequence[BatchItem]) -> Tensor:
        """Return logits [N, V] after the last token of each request of the batch."""

    def continue_with(self, batch: Sequence[BatchItem], tokens_N: Tensor) -> Tensor | None:
        """Return logits after one more token of each request of a batch with one token each, before
        the host has read the tokens: `tokens_N` are on the device. None if the model cannot be
        computed without the host."""
        return None

    def room(self) -> int:
        """Return the number of prompt tokens for which there is memory in the next batch; 0 if that
        is not known."""
        return 0

    def weights_changed(self, thorough: bool) -> bool:
        """Return whether weights have changed since the last call, so that keys and values are out
        of date. Unless `thorough`, only counted changes are seen: not all weights are looked at."""
        return False

    def free_memory(self) -> bool:
        """Free memory for a batch that did not fit; return False if there is none to free."""
        return False

    def forget(self, request: Request) -> None:  # noqa: B027
        """Free what belongs to a request that has ended, or will be computed again."""

    def check(self) -> None:  # noqa: B027
        """Raise the failure of the CPU's part of a batch whose tokens are known, if it failed."""

    def discard(self) -> None:  # noqa: B027
        """Ignore failures of batches that have begun and are not wanted any more."""

    def pause(self) -> None:  # noqa: B027
        """Let threads sleep: nothing is computed for a while."""

    def stats(self) -> dict[str, Any]:
        """Return counters of experts by the place where they were found."""
        return {}

    def take_spans(self) -> list[TraceSpan]:
        """Return the times since the last call at which the CPU computed experts."""
        return []

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys, values and states."""
        return 0

    def close(self) -> None:  # noqa: B027
        """Free memory and threads; the model may be used otherwise."""


class PagedRunner(Runner):
    """Computes all tokens of a batch in one pass of the model's modules. Keys and values are in
    blocks that requests share."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        n_blocks: int,
        block_size: int,
        context: int,
        max_batch: int,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """With `checkpoints`, passes copy states for them."""
        self._model = model
        self._device = device
        self._engine: Engine = model.overspill
        if not isinstance(model, GPTMoE):
            _check_not_served(self._engine)
        self._placeholders = [p for p in model.parameters() if isinstance(p, ExpertPlaceholder)]
        # for activations, without a GPU
        self._host_room = 0 if device.type == "cuda" else available_memory() // 4
        self._cache = PagedCache(n_blocks, block_size)
        self._attention: AbstractContextManager[None] = nullcontext()
        self._seq2seq: EncoderDecoder | None = None
        if not isinstance(model, GPTMoE):
            self._attention = ReplacedAttention(model)
            if is_encoder_decoder(model.config):
                self._seq2seq = EncoderDecoder(model, context)
        self._slots: StateSlots | None = None
        """Slots of states, for models that have more than keys and values."""
        states = None
        if has_states(model):
            states = RecurrentStates(model, max_batch)
            self._slots = StateSlots(states, max_batch, block_size, checkpoints)
        others = SparseAttention(model), RelativeAttention(model), FixedRotary(model)
        self._replacements = [each for each in (self._seq2seq, states, *others) if each is not None]
        self._version = WeightsVersion(model)
        self._engine.servers.add(self)  # last: a failure leaves the model to others

    def room(self) -> int:
        """Return the number of prompt tokens for which there is memory, estimated by
        `_token_bytes`: a batch that does not fit is computed in smaller ones."""
        top_k = max(each.top_k or 0 for each in self._placeholders)
        if not top_k:  # no pass yet: keys and values may not be allocated
            return 0
        free = self._host_room if self._host_room else self._engine.memory.free_bytes()
        return max(0, free) // _token_bytes(self._engine, top_k)

    def run(self, batch: Sequence[BatchItem]) -> Tensor:
        with self._replaced():
            logits = self._run(batch)
        if any(count > 1 for _, count in batch):
            self._version.after_forward()
        return logits

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """Context in which the model computes batches."""
        with ExitStack() as stack:
            for each in self._replacements:
                stack.enter_context(each.replaced())
            stack.enter_context(self._attention)
            stack.enter_context(_evaluating(self._model))
            yield

    def _run(self, batch: Sequence[BatchItem]) -> Tensor:
        return self._compute(self._parts(batch))

    def _parts(self, batch: Sequence[BatchItem]) -> list[Part]:
        """Return the tokens that a pass computes, after states that it needs are restored."""
        if self._slots is not None:
            for request in self._slots.restore(batch):
                self._compute_again(request)
        return [Part(item.request, item.request.computed, item.n_new) for item in batch]

    def _compute_again(self, request: Request) -> None:
        """Compute the states of a request as the first time: the answer token by token."""
        prompt = min(request.prompt_tokens, request.computed)
        for before in range(0, prompt, _PIECE):
            self._compute([Part(request, before, min(_PIECE, prompt - before))], keep=False)
        for before in range(prompt, request.computed):
            self._compute([Part(request, before, 1)], keep=False)

    def _compute(self, parts: Sequence[Part], keep: bool = True) -> Tensor:
        """Return logits after the last token of each part, computed by the model's own modules.
        Without `keep`, no states are copied for checkpoints."""
        layout = Layout([span_of(part) for part in parts], self._cache.block_size, self._device)
        rows = (part.request.tokens[part.before :][: part.n_new] for part in parts)
        tokens = torch.tensor([list(itertools.chain.from_iterable(rows))], device=self._device)
        self._cache.begin(layout)
        if self._slots is not None:
            self._slots.begin_pass(parts, self._device, keep)
        with attention_cache(self._cache):
            logits = self._forward(tokens, layout, parts)
        if self._slots is not None:
            self._slots.end_pass(parts, keep)
        return logits

    def _forward(self, tokens_1T: Tensor, layout: Layout, parts: Sequence[Part]) -> Tensor:
        if self._seq2seq is not None:
            requests = [part.request for part in parts]
            sources = [each.source for each in requests if not each.source_computed]
            return self._seq2seq(tokens_1T[0], layout.positions, sources, layout.last)
        if isinstance(self._model, GPTMoE):
            out = self._model(tokens_1T, positions=layout.positions, rows=layout.last)
        else:
            out = self._model(
                input_ids=tokens_1T,
                position_ids=layout.positions[None],
                use_cache=False,
                logits_to_keep=layout.last,
            )
        logits: Tensor = out.logits[0]
        return logits

    def weights_changed(self, thorough: bool) -> bool:
        return self._version.changed(dense=thorough)

    def forget(self, request: Request) -> None:
        if self._slots is not None:
            self._slots.forget(request)

    @property
    def cache_bytes(self) -> int:
        return self._cache.nbytes + (0 if self._slots is None else self._slots.memory.nbytes)

    def close(self) -> None:
        self._cache.close()
        if self._slots is not None:
            self._slots.memory.close()
        self._engine.servers.discard(self)


def span_of(part: Part, slot: int = 0) -> Span:
    """Return the tokens of a part for the cache of keys and values; `slot` is that of its state."""
    request, source = part.request, None
    if request.source:
        new = not request.source_computed
        source = SourceSpan(request.source_blocks, len(request.source), new)
    return Span(request.blocks, part.before, part.n_new, source, slot)


def _check_not_served(engine: Engine) -> None:
    if engine.servers:
        gc.collect()  # an LLM that was deleted without close() refers to itself
    if engine.servers:
        raise OrderError(IN_USE)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Context in which a model that is being trained computes without dropout."""
    training = [m for m in model.modules() if m.training] if model.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _token_bytes(engine: Engine, top_k: int) -> int:
    """Return the bytes of the activations of a token in a pass through a layer: in its experts, and
    some tensors of the dense part, partly in fp32."""
    shape = engine.shape
    experts = top_k * (2 * shape.d_model + shape.in_rows + shape.d_hidden)
    return (experts + 24 * shape.d_model) * engine.dtype.itemsize


class SequentialRunner(Runner):
    """Computes one request after another, each with a cache of transformers: for models with other
    states than keys and values, or attention of their own."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._caches: dict[Request, tuple[Any, int]] = {}
        self._version = WeightsVersion(model)
        _check_not_served(model.overspill)
        model.overspill.servers.add(self)

    def weights_changed(self, thorough: bool) -> bool:
        return self._version.changed(dense=thorough)

    def close(self) -> None:
        self._model.overspill.servers.discard(self)

    def run(self, batch: Sequence[BatchItem]) -> Tensor:
        # some requests may have to be computed again
        self._caches = {r: cache for r, cache in self._caches.items() if r.computed}
        logits = torch.cat([self._run(*item) for item in batch])
        self._version.after_forward()
        return logits

    def _run(self, request: Request, count: int) -> Tensor:
        with _evaluating(self._model):
            return self._run_in_evaluation(request, count)

    def _run_in_evaluation(self, request: Request, count: int) -> Tensor:
        cache, length = self._caches.pop(request, (None, 0))
        if length != request.computed:  # an interrupted pass has changed it
            cache, length = None, 0
        end = request.computed + count
        tokens = torch.tensor([request.tokens[length:end]], device=self._device)
        out = self._model(
            input_ids=tokens,
            attention_mask=torch.ones(1, end, dtype=torch.long, device=self._device),
            position_ids=torch.arange(length, end, device=self._device)[None],
            past_key_values=cache,
            use_cache=True,
        )
        self._caches[request] = out.past_key_values, end
        logits: Tensor = out.logits[:, -1]
        return logits

    def forget(self, request: Request) -> None:
        self._caches.pop(request, None)

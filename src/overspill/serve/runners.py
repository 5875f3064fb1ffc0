"""Forward passes of a model over the tokens of several requests."""

import abc
import gc
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from overspill.core.errors import OrderError
from overspill.hardware.machine import available_memory
from overspill.models.attention_cache import IN_USE, ReplacedAttention, attention_cache
from overspill.models.gpt import GPTMoE
from overspill.models.huggingface.recurrent import RecurrentStates, States, StateSpan
from overspill.models.huggingface.relative import RelativeAttention
from overspill.models.huggingface.seq2seq import EncoderDecoder, is_encoder_decoder
from overspill.models.huggingface.sparse import SparseAttention
from overspill.moe.engine import Engine
from overspill.moe.placeholder import ExpertPlaceholder
from overspill.serve.checkpoints import Checkpoints
from overspill.serve.options import DecodingOptions
from overspill.serve.paged import Layout, PagedCache, SourceSpan, Span
from overspill.serve.request import Request
from overspill.serve.sampling import Chosen, Draw
from overspill.serve.scheduler import Work
from overspill.serve.states import Part, StateSlots
from overspill.serve.support import has_states, splits_prompts
from overspill.serve.weights_version import WeightsVersion
from overspill.trace.spans import Span as TraceSpan

if TYPE_CHECKING:  # it needs Triton
    from overspill.serve.decode.decode import Decode


_PIECE = 512
"""Tokens of a prompt in a pass that computes states again: longer ones may not fit into memory."""


class Runner(abc.ABC):
    """Computes tokens of requests with the keys and values of those before them."""

    chosen: Chosen | None = None
    """The tokens that the last batch has drawn by itself, if it has; valid until the next one."""

    @abc.abstractmethod
    def run(self, batch: Sequence[Work]) -> Tensor:
        """Logits [N, V] after the last token of each request of the batch."""

    def continue_with(self, batch: Sequence[Work], tokens_N: Tensor) -> Tensor | None:
        """Logits after one more token of each request of a batch with one token each, before the
        host knows which: `tokens_N` are on the device. None if the model cannot be computed without
        the host."""
        return None

    def room(self) -> int:
        """Tokens of prompts for which there is memory in the next batch; 0 if that is not known."""
        return 0

    def weights_changed(self, thorough: bool) -> bool:
        """Whether weights have changed since the last call, so that keys and values are of others.
        Not `thorough`: as far as it is known without looking at all weights."""
        return False

    def give_memory(self) -> bool:
        """Makes memory free for a batch that did not fit; False if there is none to give."""
        return False

    def forget(self, request: Request) -> None:  # noqa: B027
        """The request has ended, or will be computed again."""

    def check(self) -> None:  # noqa: B027
        """Raises what failed beside the device in a batch whose tokens are known."""

    def discard(self) -> None:  # noqa: B027
        """Batches that have begun are not wanted: forgets what fails in them."""

    def pause(self) -> None:  # noqa: B027
        """Nothing is computed for a while."""

    def stats(self) -> dict[str, Any]:
        """Return counters of experts by the place where they were found, if known."""
        return {}

    def take_spans(self) -> list[TraceSpan]:
        """When the CPU computed experts, since the last call."""
        return []

    @property
    def cache_bytes(self) -> int:
        """Memory of keys and values."""
        return 0

    def close(self) -> None:  # noqa: B027
        """The model is used otherwise from now on."""


class PagedRunner(Runner):
    """All tokens of a batch in one pass; keys and values are in blocks that requests share."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        n_blocks: int,
        block_size: int,
        context: int,
        max_batch: int,
        fused: bool,
        decoding: DecodingOptions | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """`fused`: one new token of each request is computed by kernels for that, as `decoding`
        says. With `checkpoints`, passes copy states for them."""
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
        self._checkpoints = checkpoints
        self._states: RecurrentStates | None = None
        self._slots: StateSlots | None = None
        if has_states(model):
            self._states, self._slots = RecurrentStates(model, max_batch), StateSlots(max_batch)
        replaced = self._seq2seq, self._states, SparseAttention(model), RelativeAttention(model)
        self._replacements = [each for each in replaced if each is not None]
        self._splits = splits_prompts(model)
        self._decode: Decode | None = None
        if fused:
            from overspill.serve.decode import decode

            limits, options = (context, max_batch), decoding or DecodingOptions()
            others = self._seq2seq, self._states
            self._decode = decode.Decode(model, self._cache, *limits, options, *others)
        self._version = WeightsVersion(model)
        self._addresses = self._version.addresses()  # that captured steps read
        self._engine.servers.add(self)  # last: a failure leaves the model to others

    def room(self) -> int:
        """As far as `_token_bytes` tells: a batch that does not fit is computed in smaller ones."""
        top_k = max(each.top_k or 0 for each in self._placeholders)
        if not top_k:  # no pass yet: keys and values may not be allocated
            return 0
        free = self._host_room if self._host_room else self._engine.memory.free_bytes()
        return max(0, free) // _token_bytes(self._engine, top_k)

    def give_memory(self) -> bool:
        return self._decode is not None and self._decode.give_memory()

    def run(self, batch: Sequence[Work]) -> Tensor:
        with self._replaced():
            logits = self._run(batch)
        if any(count > 1 for _, count in batch):
            self._version.after_forward()
        return logits

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """Within it, the model computes batches."""
        with ExitStack() as stack:
            for each in self._replacements:
                stack.enter_context(each.replaced())
            stack.enter_context(self._attention)
            stack.enter_context(_evaluating(self._model))
            yield

    def _run(self, batch: Sequence[Work]) -> Tensor:
        if self._states is not None and self._slots is not None:
            for request, _ in batch:
                if request.beginning is not None:
                    self._states.copy_in(self._slots.resume(request), request.beginning)
            for request in self._slots.lost(batch):
                self._compute_again(request)
        parts = [Part(work.request, work.request.computed, work.n_new) for work in batch]
        # a step reads states: a sequence that begins has none
        continues = self._slots is None or all(part.before for part in parts)
        if self._decode is not None and continues and all(count == 1 for _, count in batch):
            known = [r.tokens[r.computed] for r, _ in batch]
            logits = self._step(known, parts, [r.draw() for r, _ in batch])
            if logits is not None:
                return logits
        self.chosen = None
        return self._compute(parts)

    def _compute_again(self, request: Request) -> None:
        """The states of a request, as the first time: the answer token by token."""
        prompt = min(request.prompt_tokens, request.computed)
        piece = _PIECE if self._splits else prompt
        for before in range(0, prompt, piece):
            self._compute([Part(request, before, min(piece, prompt - before))], keep=False)
        for before in range(prompt, request.computed):
            self._compute([Part(request, before, 1)], keep=False)

    def _compute(self, parts: Sequence[Part], keep: bool = True) -> Tensor:
        """Logits after the last token of each part, by the model's own modules. Without `keep`, no
        states are copied for checkpoints."""
        passing = nullcontext() if self._decode is None else self._decode.passing()
        layout = Layout([_span(part) for part in parts], self._cache.block_size, self._device)
        rows = (part.request.tokens[part.before :][: part.n_new] for part in parts)
        tokens = torch.tensor([list(itertools.chain.from_iterable(rows))], device=self._device)
        self._cache.begin(layout)
        if self._states is not None and self._slots is not None:
            counts = [part.n_new for part in parts]
            copies = [self._new_copies(part) if keep else {} for part in parts]
            self._states.begin(counts, self._slots.begin(parts, copies), self._device)
        with passing, attention_cache(self._cache):
            logits = self._forward(tokens, layout, parts)
        if self._slots is not None:
            self._slots.end(parts)
            if keep:
                self._copy_states(parts)
                for part, made in zip(parts, copies, strict=True):
                    part.request.checkpoints |= made
        return logits

    def _new_copies(self, part: Part) -> dict[int, States]:
        """Of a piece of a prompt: its last full block, and the last one that was computed before
        without a checkpoint (others have the same beginning). The same prompt needs its last token
        again, and the block before if that is the end of one."""
        if self._checkpoints is None or part.n_new == 1:
            return {}
        end, size = part.before + part.n_new, self._cache.block_size
        full = end - 1 if end == part.request.prompt_tokens else end
        wanted = full // size * size, part.request.known
        return {seen: {} for seen in wanted if part.before < seen <= end}

    def _copy_states(self, parts: Sequence[Part]) -> None:
        """After a pass: of those of one token, if it is the last of a block worth keeping."""
        if self._checkpoints is None or self._states is None or self._slots is None:
            return
        interval = self._checkpoints.answer_blocks * self._cache.block_size
        for request, before, n_new in parts:
            seen = before + 1
            if n_new == 1 and (seen % interval == 0 or seen == request.known):
                request.checkpoints[seen] = self._states.copy_out(self._slots.slot(request))

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

    def continue_with(self, batch: Sequence[Work], tokens_N: Tensor) -> Tensor | None:
        if self._decode is None:
            return None
        parts = [Part(r, r.computed + 1, 1) for r, _ in batch]
        try:
            with self._replaced():
                return self._step(tokens_N, parts, [r.draw(1) for r, _ in batch])
        except torch.OutOfMemoryError:  # it may be the first step; `run` makes memory free for it
            return None

    def _step(
        self, tokens: Sequence[int] | Tensor, parts: Sequence[Part], draws: Sequence[Draw]
    ) -> Tensor | None:
        assert self._decode is not None
        states = [None] * len(parts) if self._slots is None else self._slots.begin(parts)
        spans = [_span(part, state) for part, state in zip(parts, states, strict=True)]
        computed = self._decode.run(tokens, spans, draws)
        if self._slots is not None:
            (self._slots.unchanged if computed is None else self._slots.end)(parts)
        if computed is None:
            return None
        self._copy_states(parts)
        self.chosen = computed.chosen
        return computed.logits_BV

    def weights_changed(self, thorough: bool) -> bool:
        changed = self._version.changed(dense=thorough)
        if self._decode is not None and self._addresses != self._version.addresses():
            raise OrderError(
                "dense weights of the model were replaced by other tensors (assign=True?), and "
                "decoding reads the old ones; close this LLM and make a new one"
            )
        return changed

    def forget(self, request: Request) -> None:
        if self._slots is not None:
            self._slots.forget(request)

    @property
    def cache_bytes(self) -> int:
        return self._cache.nbytes + (0 if self._states is None else self._states.nbytes)

    def check(self) -> None:
        if self._decode is not None:
            self._decode.check()

    def discard(self) -> None:
        if self._decode is not None:
            self._decode.discard()

    def pause(self) -> None:
        if self._decode is not None:
            self._decode.pause()

    def stats(self) -> dict[str, Any]:
        return {} if self._decode is None else self._decode.stats()

    def take_spans(self) -> list[TraceSpan]:
        return [] if self._decode is None else self._decode.take_spans()

    def close(self) -> None:
        if self._decode is not None:
            self._decode.close()
        self._cache.close()
        if self._states is not None:
            self._states.close()
        self._engine.servers.discard(self)


def _span(part: Part, state: StateSpan | None = None) -> Span:
    request, source = part.request, None
    if request.source:
        new = not request.source_computed
        source = SourceSpan(request.source_blocks, len(request.source), new)
    slot = 0 if state is None else state.slot
    return Span(request.blocks, part.before, part.n_new, source, slot)


def _check_not_served(engine: Engine) -> None:
    if engine.servers:
        gc.collect()  # an LLM that was deleted without close() refers to itself
    if engine.servers:
        raise OrderError(IN_USE)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """A model that is being trained computes without dropout inside."""
    training = [m for m in model.modules() if m.training] if model.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _token_bytes(engine: Engine, top_k: int) -> int:
    """Memory of the activations of a token in a pass through a layer: in its experts, and some
    tensors of the dense part, partly in fp32."""
    shape = engine.shape
    experts = top_k * (2 * shape.d_model + shape.in_rows + shape.d_hidden)
    return (experts + 24 * shape.d_model) * engine.dtype.itemsize


class SequentialRunner(Runner):
    """One request after another, each with a cache of transformers: for models with other states
    than keys and values, or attention of their own."""

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

    def run(self, batch: Sequence[Work]) -> Tensor:
        # some requests may have to be computed again
        self._caches = {r: cache for r, cache in self._caches.items() if r.computed}
        logits = torch.cat([self._run(*work) for work in batch])
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

"""One token of each request of a batch, computed without the host."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overspill.compute.activation import form_of
from overspill.compute.cpu_kernel import why_unsupported
from overspill.compute.record_format import layer_formats
from overspill.core.errors import ConfigError
from overspill.core.interrupt import DeferredInterrupt
from overspill.core.routing import RoutingSource
from overspill.models.huggingface.recurrent import RecurrentStates
from overspill.models.huggingface.seq2seq import EncoderDecoder
from overspill.models.pregate import pregate_level
from overspill.moe.engine import Engine
from overspill.moe.placeholder import ExpertPlaceholder
from overspill.plan.eviction import CACHE_POLICIES
from overspill.plan.slot_sizes import most_slots
from overspill.serve.decode.cache import ExpertCache, experts_by_size
from overspill.serve.decode.cpu_experts import CpuExperts
from overspill.serve.decode.graphs import CaptureError, DecodeGraphs
from overspill.serve.decode.linked_experts import LinkedExperts
from overspill.serve.decode.modes import new_mode
from overspill.serve.decode.module_step import ModuleStep, can_step
from overspill.serve.decode.rates import read_rates
from overspill.serve.decode.seq2seq import read_seq2seq_decoder
from overspill.serve.decode.step import Batch, Computed, DecodeStep
from overspill.serve.decode.step_experts import MissingExperts, StepExperts
from overspill.serve.decode.step_observer import StepObserver
from overspill.serve.decode.structure import read_decoder
from overspill.serve.decode.table import ExpertTable
from overspill.serve.options import DecodingOptions
from overspill.serve.paged import PagedCache, Span
from overspill.serve.sampling import Draw
from overspill.trace.spans import Span as TraceSpan
from overspill.transfer.mapped import can_map

_log = logging.getLogger("overspill")
_MODULES = "the model's own modules compute each token"
_CACHE_SHARE = 0.75
"""Share of the free GPU memory that copies of experts get; the rest is for longer prompts."""


class _OffGpu(NamedTuple):
    """Access of steps to experts that are not resident on the GPU."""

    missing: MissingExperts
    cache: ExpertCache
    """Copies of the most used experts in GPU memory."""
    cpu: CpuExperts | None
    """The same object as `missing`, if the CPU computes missing experts."""


class Decode:
    """Computes one token of each sequence of a batch. Experts that are not on the device are
    computed by the CPU, or copied there; the most used ones get a copy that stays."""

    def __init__(
        self,
        model: Any,
        cache: PagedCache,
        context: int,
        max_batch: int,
        options: DecodingOptions,
        seq2seq: EncoderDecoder | None = None,
        states: RecurrentStates | None = None,
    ) -> None:
        """`seq2seq` computes an encoder-decoder; `states` are the states of a model that has more
        than keys and values."""
        engine = model.overspill
        self._model = model
        self._engine: Engine = engine
        self._max_batch = max_batch
        self._max_blocks = -(-context // cache.block_size)
        self._cache = cache
        self._slots = options.slots
        self._seq2seq = seq2seq
        self._states = states
        self._first = 0 if seq2seq is None else seq2seq.encoder_layers
        """The first layer of experts that steps compute."""
        self._level = pregate_level(model)
        self._rates = read_rates(engine.device)
        self._placeholders = [p for p in model.parameters() if isinstance(p, ExpertPlaceholder)]
        activation = self._placeholders[0].activation
        formats = layer_formats(engine.layout.format, engine.n_layers)
        self._no_cpu = reason = why_unsupported(engine.dtype, engine.shape, activation, formats)
        """Why the CPU cannot compute experts; None if it can."""
        fast = reason is None and self._rates.cpu >= self._rates.link
        self._mode = new_mode(options, self._level, fast)
        _check_migrate(options.migrate, engine, reason)
        self._policy = CACHE_POLICIES[options.cache_policy]
        with torch.inference_mode(False):  # what is made here outlives it
            self._table = ExpertTable(engine)
            self._decoder = (
                read_decoder(model, context) if seq2seq is None else read_seq2seq_decoder(model)
            )
            if self._decoder is not None:
                if engine.device.type == "cuda":
                    torch.cuda.empty_cache()  # of weights that have become parts of others
                attentions = self._decoder.attentions
                first = next(iter(attentions.values()))
                like = self._decoder.embedding.new_empty(first.kv_heads, first.width)
                self._memory = cache.allocate([*attentions], like)
        if options.mode == "lookahead" and self._decoder is None and not options.learns:
            raise ConfigError(
                f"mode='lookahead' is not for {type(model).__name__}: its routers are not known; "
                "choose another mode, or predictor='learned' (--predictor learned)"
            )
        learns = options.learns and engine.n_layers > 1
        self._observer = StepObserver(model) if learns else None
        # the model cannot be a graph
        self._refused = self._decoder is None and not can_step(model, self._placeholders)
        unread = self._table.why_not_packed(activation)
        if unread is not None:
            self._refused = True
            _log.info("%s: kernels do not read packed experts with %s", _MODULES, unread)
        if activation is not None and form_of(activation, engine.shape.gated) is None:
            _log.info("%s: kernels do not have the activation %s", _MODULES, activation.name)
        self._on_cpu = self._mode.on_cpu or engine.memory.uses_disk
        self._held = not (self._refused or (self._on_cpu and reason is not None))
        self._held = self._held and not engine.can_train  # training needs the memory
        if self._held:  # copies use the memory better: any expert may have one
            engine.memory.hold_residents(self)
        self._n_moves = -1  # of experts, as the table has them
        self._n_changes = 0  # of weights, as copies have them
        self._off_gpu: _OffGpu | None = None
        self._stays_on_gpu = False  # steps cannot find experts that are not on the device
        # with experts on the host or without, by what chooses experts instead of the routers
        self._graphs: dict[tuple[bool, tuple[RoutingSource, ...]], DecodeGraphs] = {}

    def run(
        self, tokens: Sequence[int] | Tensor, spans: Sequence[Span], draws: Sequence[Draw]
    ) -> Computed | None:
        """Compute the logits after the tokens, which may be on the device, and draw the next ones.
        Returns None if a step cannot find some experts. Valid until the next call."""
        engine = self._engine
        # no thread moves experts before the step is on the stream; Ctrl-C would lose GPU slots
        with engine.exclusive(), DeferredInterrupt():
            complete = all(count == engine.n_experts for count in engine.residents[self._first :])
            if not self._can_step() or not (complete or self._can_reach_missing()):
                return None
            engine.recover()
            self._follow_moves()
            if complete:
                self._table.apply()
                return self._step(None, tokens, spans, draws)
            off_gpu = self._off_gpu
            assert off_gpu is not None
            if off_gpu.cpu is None:
                off_gpu.cache.before_step()
                return self._step(off_gpu, tokens, spans, draws)
            off_gpu.cpu.resume()
            off_gpu.cache.before_step()
            try:
                return self._step(off_gpu, tokens, spans, draws)
            finally:
                off_gpu.cpu.launched()

    def _step(
        self,
        off_gpu: _OffGpu | None,
        tokens: Sequence[int] | Tensor,
        spans: Sequence[Span],
        draws: Sequence[Draw],
    ) -> Computed | None:
        missing = None if off_gpu is None else off_gpu.missing
        try:
            computed = self._graphs_of(missing).run(tokens, spans, draws)
        except CaptureError as error:
            if self._decoder is not None:
                raise
            self._refused = True
            if self._off_gpu is not None:
                self._off_gpu.cache.close()
            self._release_residents()
            _log.info("%s without a CUDA graph: %s", _MODULES, error)
            return None
        if off_gpu is not None:
            off_gpu.cache.after_step(computed.ids_LBK)
            if self._observer is not None:
                self._observer.observe(self._first, computed)
        return computed

    def _follow_moves(self) -> None:
        """Update the table, and whatever else has addresses of experts, after experts have moved or
        weights have changed."""
        changes = self._engine.records.n_changes
        if (self._n_moves, self._n_changes) == (self._engine.n_moves, changes):
            return
        keep = self._n_changes == changes
        self._n_moves, self._n_changes = self._engine.n_moves, changes
        addresses = self._engine.addresses.device_addresses()
        if self._off_gpu is None:
            self._table.set_all(addresses)
            return
        missing, cache, cpu = self._off_gpu
        cache.follow_moves(addresses, keep)
        missing.update()
        if cpu is not None:
            # an upload keeps a host slot until the steps have ended that may wait for one
            cache.limit_uploads(cpu.free_slots)

    def _can_step(self) -> bool:
        """Return whether steps can compute this model, as it is now."""
        if self._decoder is not None or self._refused:
            return not self._refused
        # routing may be replaced for a while: in all layers, or in none
        replaced = [each.source is not None for each in self._placeholders[self._first :]]
        return all(replaced) or not any(replaced)

    def _graphs_of(self, missing: MissingExperts | None) -> DecodeGraphs:
        """Return the graphs of steps with these missing experts, and the routing sources of now."""
        found = (each.source for each in self._placeholders[self._first :])
        sources = tuple(source for source in found if source is not None)
        key = missing is not None, sources
        if key not in self._graphs:
            predictor = None if self._observer is None else self._observer.predictor
            experts = StepExperts(self._table, missing, self._mode)
            step: Callable[[Batch], Computed]
            if self._decoder is None:
                others = self._seq2seq, self._states, predictor
                step = ModuleStep(self._model, experts, self._cache, *others)
            else:
                size = self._cache.block_size
                args = self._decoder, experts, self._memory, size, predictor, self._states
                step = DecodeStep(*args)
            if isinstance(missing, LinkedExperts):
                step = partial(_step_with_copies, step, missing)
            limits = self._max_batch, self._max_blocks, self._cache.spare_block
            source_blocks = 0 if self._seq2seq is None else self._max_blocks
            device = self._engine.device
            self._graphs[key] = DecodeGraphs(
                step, *limits, device, sources, source_blocks, self._first, self._states
            )
        return self._graphs[key]

    def _can_reach_missing(self) -> bool:
        """Return whether steps find experts that are not on the device."""
        if self._stays_on_gpu:
            return False
        if self._off_gpu is not None:  # experts that leave the device take host slots
            return self._off_gpu.cpu is None or self._off_gpu.cpu.fits
        first = self._placeholders[0]
        if first.top_k is None:  # no pass yet: the modules compute a prompt of one token
            return False
        try:
            if not can_map(self._engine.device):
                raise ConfigError(f"{self._engine.device} cannot access pinned memory")
            with torch.inference_mode(False):  # the buffers outlive it
                missing = self._new_missing(first, first.top_k)
        except ConfigError as error:
            self._stays_on_gpu = True
            self._release_residents()
            _log.info("%s while experts are not on the GPU: %s", _MODULES, error)
            return False
        self._n_moves = -1
        cpu = missing if isinstance(missing, CpuExperts) else None
        slots = self._count_slots(0 if isinstance(missing, CpuExperts) else missing.most_bytes)
        policy = self._policy(self._engine.n_layers - self._first, self._engine.n_experts)
        cache = ExpertCache(self._engine, self._table, slots, policy, first=self._first)
        self._off_gpu = _OffGpu(missing, cache, cpu)
        return True

    def _new_missing(self, first: ExpertPlaceholder, top_k: int) -> CpuExperts | LinkedExperts:
        engine, table = self._engine, self._table
        size = 1 << (self._max_batch - 1).bit_length()
        if self._on_cpu and self._no_cpu is not None:
            raise ConfigError(f"the CPU cannot compute them: {self._no_cpu}")
        if not self._on_cpu:
            every = engine.n_experts
            sizes = {min(every, top_k << n) for n in range(size.bit_length())}  # by batch
            sizes = {every} if self._mode.copies_all else sizes
            return LinkedExperts(engine, table, max(1, self._level), sizes)
        share, inject = self._rates.link_share, engine.settings.inject
        return CpuExperts(engine, table, first.activation, top_k, size, share, inject)

    def _count_slots(self, others: int) -> int:
        """Return the number of GPU slots within the budget, beside what is allocated (at least one
        prompt was computed before) and `others` bytes. By default 0 if the model is trained too,
        whose activations need the memory."""
        engine = self._engine
        elsewhere = experts_by_size(engine, self._first)
        use = engine.memory.gpu_use()
        if self._slots is not None or use is None or engine.can_train:
            return min(self._slots or 0, sum(elsewhere.values()))
        free = _CACHE_SHARE * (use["budget"] - use["reserved"]) - others
        return most_slots(elsewhere, int(free))

    def wait(self) -> None:
        """Wait until no step needs host slots that experts on disk share: a pass of the modules
        would lose experts that it has read ahead."""
        if self._off_gpu is None or not self._engine.memory.uses_disk:
            return
        self._synchronize()
        if self._off_gpu.cpu is not None:
            self._off_gpu.cpu.wait_released()

    def _synchronize(self) -> None:
        if self._engine.device.type == "cuda":
            torch.cuda.current_stream(self._engine.device).synchronize()

    def passing(self) -> AbstractContextManager[None]:
        """Return a context for a pass of the model's modules, which may read copies of experts on
        the device."""
        self.wait()
        if self._off_gpu is None or not self._engine.settings.prompt_replicas:
            return nullcontext()
        return self._off_gpu.cache.lent()

    def free_memory(self) -> bool:
        """Free GPU memory for a prompt; return False if there is none to free."""
        if self._off_gpu is not None and self._off_gpu.cache.shrink():
            return True
        return self._release_residents()  # experts that live on the GPU may leave it

    def _release_residents(self) -> bool:
        held, self._held = self._held, False
        if held:
            self._engine.memory.release_residents(self)
        return held

    def stats(self) -> dict[str, Any]:
        """Return how many experts steps have found on the device, and how well experts were
        predicted."""
        learned = {} if self._observer is None else self._observer.stats()
        if self._off_gpu is None:
            return learned
        _, cache, cpu = self._off_gpu
        hits, uses = cache.hits_L, cache.uses_L
        return {
            "expert_slots": cache.n_slots,
            "expert_hit_rate": [float(h / max(u, 1)) for h, u in zip(hits, uses, strict=True)],
            "experts_missed": cache.n_missed,
            "experts_on_cpu": 0 if cpu is None else cpu.n_misses,
            **learned,
        }

    @property
    def _cpu(self) -> CpuExperts | None:
        """The experts that the CPU computes for steps, once it does."""
        return None if self._off_gpu is None else self._off_gpu.cpu

    def take_spans(self) -> list[TraceSpan]:
        """Return the times since the last call at which the CPU computed experts."""
        return [] if self._cpu is None else self._cpu.take_spans()

    def check(self) -> None:
        """Raise the failure of a step that has ended, if it has failed."""
        if self._cpu is not None:
            self._cpu.check()

    def discard(self) -> None:
        """Wait for the steps that have begun, and ignore their failures."""
        if self._off_gpu is None:
            return
        self._synchronize()
        with suppress(Exception):
            self.check()

    def pause(self) -> None:
        """Let threads sleep: no step follows for a while."""
        if self._observer is not None:
            self._observer.idle()
        if self._cpu is not None and not self._engine.lifetime.forked:
            self._cpu.pause()

    def close(self) -> None:
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)  # a step may wait for the CPU
        if self._observer is not None:
            self._observer.close()
        self._graphs.clear()
        self._memory = {}
        self._release_residents()
        if self._off_gpu is not None:
            self._off_gpu.cache.close()
            self._off_gpu.missing.close()


def _check_migrate(migrate: str, engine: Engine, reason: str | None) -> None:
    """Refuse a setting that this machine cannot follow. `reason` is why the CPU cannot compute the
    experts; None if it can."""
    if migrate == "copy" and engine.memory.uses_disk:
        raise ConfigError(
            "migrate='copy' copies experts from host memory, and some are on disk; give more "
            "host_memory (--host-memory), or leave migrate out"
        )
    if migrate == "cpu" and reason is not None:
        raise ConfigError(
            f"migrate='cpu' needs experts that the CPU can compute; here it cannot: {reason}; "
            "use migrate='copy', or leave it out"
        )


def _step_with_copies(
    step: Callable[[Batch], Computed], linked: LinkedExperts, batch: Batch
) -> Computed:
    try:
        return step(batch)
    except BaseException:
        with suppress(RuntimeError):  # the first failure counts
            linked.abort()
        raise

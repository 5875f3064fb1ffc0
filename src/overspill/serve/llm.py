"""`overspill.LLM`: text and tokens from a model whose experts are on any tier."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from overspill.core.errors import ConfigError, OrderError
from overspill.core.options import check_options, init_takes, values_of
from overspill.hardware.machine import available_memory
from overspill.hardware.native import has_triton
from overspill.models.budgets import Budgets
from overspill.models.huggingface.recurrent import pin_copies
from overspill.models.pregate import pregate_level
from overspill.moe.settings import Settings
from overspill.plan.limits import MemoryLimits
from overspill.plan.pieces import PieceSizes
from overspill.serve import conversation
from overspill.serve.background import Background, Submission, raise_error
from overspill.serve.blocks import BlockPool
from overspill.serve.checkpoints import Checkpoints
from overspill.serve.decode.modes import check_decoding, new_mode
from overspill.serve.grammar import Compilation, Grammars
from overspill.serve.loop import ServingLoop
from overspill.serve.options import LLMArguments, LLMOptions
from overspill.serve.pacing import Pacing
from overspill.serve.params import Piece, Result, SamplingParams
from overspill.serve.prompts import (
    PlainPrompts,
    Prompt,
    Prompts,
    check_ids,
    check_prompt,
    list_prompts,
    params_of_each,
)
from overspill.serve.request import Request
from overspill.serve.rules import make_rules
from overspill.serve.runners import PagedRunner, Runner, SequentialRunner
from overspill.serve.scheduler import Scheduler
from overspill.serve.seq2seq import SourcePrompts
from overspill.serve.source import open_source
from overspill.serve.support import has_states, why_not_paged
from overspill.serve.text import TextStream, need_codec
from overspill.trace.spans import Span

_log = logging.getLogger("overspill")
_LEAST_SLOTS = 2
"""GPU slots for prompts: one expert computes while another loads."""
_BLOCK = 16
"""Tokens of a block of keys and values."""
_CHECKPOINT_SHARE = 1 / 16
"""Share of free host memory for states that requests with the same beginning continue from."""
_PINNED_CHECKPOINTS = 2 << 30
"""Most bytes of such states beside a GPU: pinning them takes a second."""
_LEAST_PIECE = 512
"""Tokens of prompts in a batch; more where that is measured to be faster."""
_ANSWERS_SHARE = 0.25
"""Share of the time for answers that run while prompts are computed: answers go on visibly, and a
prompt takes a third longer."""


class LLM:
    """Generates text with a Mixture-of-Experts model that may be larger than the GPU.

    `model` is the folder of a Hugging Face checkpoint, a GGUF file, a repository of the hub, the
    folder of a run of `overspill train` or `finetune`, or a model from `overspill.load` or
    `overspill.offload`. A folder of a LoRA adapter is served with the base model that it names. An
    adapter is added to the weights of dense layers; its part of experts stays beside their weights,
    in all memory.

    Prompts of models with an encoder and a decoder (Switch Transformers, NLLB-MoE) are sources for
    the encoder; `SamplingParams` has their languages, and a prompt for the decoder.

    Several threads may use it at once: their requests are computed together.
    """

    @init_takes(LLMArguments)
    def __init__(self, model: Any, options: LLMArguments) -> None:
        """Load a model for inference, or take one that is loaded. Arguments after `disk` are given
        by name."""
        check_options(options, LLMOptions)
        gpu_only = options.mode == "gpu-only"
        budgets = Budgets(
            **values_of(options, MemoryLimits),
            host_slots=options.host_slots,
            mode="gpu" if gpu_only else "auto",
            slots=None if options.slots is None else max(_LEAST_SLOTS, options.slots),
            settings=options.settings or Settings(),
            quiet=True,
        )
        check_decoding(options, budgets.compute_device)
        if not isinstance(model, str | os.PathLike):
            _check_loaded(options)
        self._options = options
        self._source = source = open_source(model, budgets, options, _BLOCK)
        self._closed = False
        self.model = source.model
        """The model itself, as a module of PyTorch."""
        self.adapter: Path | None = source.adapter
        """Folder of the LoRA adapter in its weights."""
        self.device: torch.device = source.model.overspill.device
        self.context = source.context
        try:
            check_decoding(options, self.device)  # a given model may be on another one
            self._loop = self._new_loop()
        except BaseException:  # the mode may not be for this model
            if source.owned:
                source.model.overspill.close()
            raise
        new_prompts = SourcePrompts if source.has_encoder else PlainPrompts
        self._prompts: Prompts = new_prompts(
            source.model, source.codec, self._vocabulary(), source.context
        )
        self._grammars = Grammars(source.codec, source.ends, self._vocabulary())
        self._background = Background(self._loop)

    def _new_loop(self) -> ServingLoop:
        source, options = self._source, self._options
        max_batch = options.max_batch
        new_mode(options, pregate_level(source.model))  # it may refuse the model
        on_gpu = self.device.type == "cuda"
        reason = why_not_paged(source.model)
        paged = reason is None
        stateful = has_states(source.model)
        checkpoints = self._new_checkpoints() if stateful else None
        runner: Runner
        if paged:
            dense_there = not source.model.overspill.placement.dense_weights
            limits = source.n_blocks, _BLOCK, source.context, max_batch
            if on_gpu and dense_there and has_triton("fused decoding"):
                from overspill.serve.fused_runner import FusedRunner  # imports Triton

                runner = FusedRunner(source.model, self.device, *limits, options, checkpoints)
                if checkpoints is not None:
                    pin_copies(source.model, checkpoints.limit)
            else:
                runner = PagedRunner(source.model, self.device, *limits, checkpoints)
        else:
            name = type(source.model).__name__
            _log.warning("%s computes one request after another: %s", name, reason)
            runner = SequentialRunner(source.model, self.device)
        share = paged and not source.has_encoder  # a decoder depends on the source too
        pool = BlockPool(source.n_blocks, _BLOCK, share, checkpoints)
        chunk = options.prefill_chunk if paged else source.context
        pieces = PieceSizes(_LEAST_PIECE if chunk is None else chunk, chunk)
        scheduler = Scheduler(pool, max_batch, pieces.size(0), paged, stateful)
        stream = torch.cuda.current_stream(self.device) if on_gpu else None
        pacing = Pacing(_ANSWERS_SHARE)
        return ServingLoop(runner, scheduler, source.ends, stream, pacing, pieces)

    def _new_checkpoints(self) -> Checkpoints:
        """Return checkpoints with a share of the host memory that is free now."""
        free, budget = available_memory(), self.model.overspill.memory.budget_by_tier()["host"]
        limit = int(_CHECKPOINT_SHARE * min(free, free if budget is None else budget))
        on_gpu = self.device.type == "cuda"
        return Checkpoints(min(limit, _PINNED_CHECKPOINTS) if on_gpu else limit)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]:
        """Return the results of the prompts (texts or lists of token ids), in their order. `params`
        are for all prompts, or a list with one for each. If one of several fails, the others are
        finished first."""
        listed = list_prompts(prompts)
        requests = [
            self._request(*each)
            for each in zip(listed, params_of_each(params, listed), strict=True)
        ]
        try:
            for request in requests:
                self._loop.add(request)
            self._loop.run_until(lambda: all(request.finished for request in requests))
        finally:
            for request in requests:
                self._loop.remove(request)
        for request in requests:
            raise_error(request)
        return [request.result() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Yield the answer to one prompt piece by piece, while it is generated."""
        (checked,) = params_of_each(params, [prompt])
        return self._stream(self._request(prompt, checked))

    def _stream(self, request: Request) -> Iterator[Piece]:
        self._loop.add(request)
        try:
            while True:
                self._loop.run_until(lambda: not request.pieces.empty())
                piece = request.pieces.get()
                if piece.finish_reason == "error":
                    raise_error(request)
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:  # also if the caller stops reading
            self._loop.remove(request)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        on_piece: Callable[[Piece], None] | None = None,
    ) -> Submission:
        """Start to answer a prompt and return at once: a thread of this LLM computes. `on_piece` is
        called there for each piece, and must not wait; the last piece has a `finish_reason`. If
        `on_piece` raises, the request is cancelled."""
        if on_piece is not None and not callable(on_piece):
            raise ConfigError(f"on_piece={on_piece!r} must be a function that takes a Piece")
        (checked,) = params_of_each(params, [prompt])
        return self._background.submit(self._request(prompt, checked), on_piece)

    def compile_schema(self, params: SamplingParams) -> Compilation | None:
        """Begin to compile the `json_schema` of `params` and return at once; None if they have
        none. The result is used in a `with` statement: within it, `submit` does not wait once the
        compilation is done, and leaving it earlier cancels the compilation."""
        self._check_open()
        return None if params.json_schema is None else self._grammars.compile(params.schema_text())

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of all prompts and answers before the next batch. Needed after
        changes of weights that are not detected, such as those of `parameter.data`."""
        self._loop.restart()

    def stats(self) -> dict[str, Any]:
        """Return counters of requests and tokens, and the places of experts. Waits for no batch."""
        stats, engine = self._loop.stats, self.model.overspill
        pool, scheduler = self._loop.scheduler.pool, self._loop.scheduler
        waits = sorted(stats.waits)
        return {
            "requests": stats.requests,
            "prompt_tokens": stats.prompt_tokens,
            "new_tokens": stats.new_tokens,
            "decode_tokens": stats.decode_tokens,
            "decode_seconds": stats.decode_seconds,
            "tokens_per_second": stats.decode_tokens / max(stats.decode_seconds, 1e-9),
            "time_to_first_token": waits[len(waits) // 2] if waits else None,
            "running": len(scheduler.running),
            "waiting": self._loop.n_waiting,
            "kv_blocks": pool.n_blocks,
            "kv_blocks_free": pool.n_free,
            "cache_bytes": self._loop.runner.cache_bytes,
            "checkpoints": len(pool.checkpoints),
            "checkpoint_bytes": pool.checkpoints.nbytes,
            "bytes": engine.bytes_by_tier(),
            "budgets": engine.memory.budget_by_tier(),
            "gpu_reserved": engine.memory.reserved_bytes(),
            "uploaded_bytes": engine.recorder.counters().get("upload", 0),
            **self._loop.runner.stats(),
        }

    def take_spans(self) -> list[Span]:
        """Return the times since the last call at which the CPU computed experts that were not on
        the GPU, at most the latest 4096: for a timeline."""
        return self._loop.runner.take_spans()

    def chat_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_arguments: Any,
    ) -> list[int]:
        """Return the prompt of a chat (`[{"role": "user", "content": "..."}]`) by the model's chat
        template, which gets `tools` and the other arguments; without a template, the lines of the
        chat as plain text. An encoder-decoder has no chats."""
        return self.check_chat_tokens(messages, tools, template_arguments, None)

    def check_chat_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
        check: conversation.Check | None,
    ) -> list[int]:
        """Return `chat_tokens`; `check` is called with the text of the prompt before it is
        tokenized, and may raise."""
        self.check_chats()
        codec = self._source.codec
        return conversation.chat_tokens(codec, messages, tools, arguments, check)

    def check_chats(self) -> None:
        """Raise if this model has no chats: an encoder-decoder answers single prompts."""
        if self.has_encoder:
            raise ConfigError(
                f"{type(self.model).__name__} has an encoder and a decoder: it answers single "
                "prompts, no chats; use generate (overspill generate, /v1/completions)"
            )

    @property
    def has_chat_template(self) -> bool:
        return conversation.has_template(self._source.codec)

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template; its variables show which features it supports."""
        return conversation.template_of(self._source.codec)

    @property
    def has_encoder(self) -> bool:
        """Whether prompts are sources for an encoder, and a decoder writes the answers."""
        return self._source.has_encoder

    @property
    def languages(self) -> list[str]:
        """Names of the languages of sources and answers in the tokenizer; empty for most models."""
        return list(self._prompts.languages)

    def check_params(self, params: SamplingParams) -> None:
        """Raise if this model cannot have these languages or this decoder prompt."""
        self._prompts.check(params)

    def encode(self, text: str, src_lang: str | None = None) -> list[int]:
        """Return the tokens of a text, which may be a source in a language."""
        return self._prompts.encode(text, src_lang)

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least, 0 if it is not known. Far faster than
        `encode`, for texts that may be longer than the context."""
        return self._prompts.least(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        check_ids(tokens, self._vocabulary(), "tokens")
        return need_codec(self._source.codec).decode(list(tokens))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        check_ids([token], self._vocabulary(), "token")
        return need_codec(self._source.codec).token_bytes(token)

    def close(self) -> None:
        """Free the model if it was loaded here; a given model can be used otherwise again."""
        if self._closed:
            return
        if self.model.overspill.lifetime.forked:  # it has neither threads nor a GPU
            self._closed = True
            return
        self._background.close()
        self._closed = True
        self._grammars.close()
        self._loop.close()
        self._background.join()
        if self._source.owned:
            self.model.overspill.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        self.model.overspill.lifetime.check_process()
        if self._closed:
            raise OrderError("this LLM was closed; make a new one")

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        self._check_open()
        codec, vocabulary = self._source.codec, self._vocabulary()
        given = prompt if isinstance(prompt, str) else check_prompt(prompt)
        source, tokens = self._prompts.read(given, params)
        if params.stops and codec is None:
            raise ConfigError("this model has no tokenizer: stop strings cannot be found")
        for token in params.logit_bias or ():
            if token >= vocabulary:
                raise ConfigError(f"logit_bias has token id {token}; this model has {vocabulary}")
        grammar = None
        if params.json_schema is not None:
            grammar = self._grammars.from_schema(params.schema_text())
        most = min(params.max_tokens, self.context - len(tokens))
        rules = make_rules(params, grammar, self._source.ends)
        text = TextStream(codec, params.stops)
        return Request(tokens, params, text, most, rules, source)

    def _vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])


def _check_loaded(options: LLMArguments) -> None:
    """Raise if arguments are given that are for the loading of a model: this one is loaded."""
    given = values_of(options, MemoryLimits) | {
        "host_slots": options.host_slots,
        "mode": options.mode if options.mode == "gpu-only" else None, "dtype": options.dtype,
        "settings": options.settings, "packed": options.packed,
        "quantize": options.quantize,
    }  # fmt: skip
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{name}={value!r} is for a model that is loaded here; give it to overspill.load"
            )
    if options.adapter is not None:
        raise ConfigError(
            f"adapter={os.fspath(options.adapter)!r} needs a path as model; for a model that is "
            "loaded already, load what overspill.merge makes of both"
        )

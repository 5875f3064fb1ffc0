"""`overspill.LLM`: text and tokens from a model whose experts are on any tier."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from overspill.core.errors import ConfigError, OrderError, OverspillError
from overspill.hardware.native import has_triton
from overspill.models.budgets import Budgets, Size
from overspill.models.pregate import pregate_level
from overspill.serve.blocks import BlockPool
from overspill.serve.decode.modes import check_mode, new_mode
from overspill.serve.loop import ServingLoop
from overspill.serve.params import Piece, Result, SamplingParams
from overspill.serve.request import Request
from overspill.serve.runners import PagedRunner, Runner, SequentialRunner
from overspill.serve.scheduler import Scheduler
from overspill.serve.source import CacheRequest, open_source
from overspill.serve.support import can_page
from overspill.serve.text import TextStream
from overspill.trace.spans import Span

Prompt = str | Sequence[int]

_LEAST_SLOTS = 2
"""For prompts: one expert computes while another loads."""
_BLOCK = 16
"""Tokens of a block of keys and values."""
_CHUNK = 512
"""Tokens of prompts in a batch beside requests that run."""


class LLM:
    """Generates text with a Mixture-of-Experts model that may be larger than the GPU.

    `model` is the folder of a Hugging Face checkpoint, a repository of the hub, the folder of a run
    of `overspill train`, or a model from `overspill.load(..., train=False)`. `context` is the most
    tokens of a prompt and its answer; `max_batch` the most requests that run at once. `slots` are
    the GPU slots for copies of experts that are in host memory; without, as many as fit into
    `gpu_memory`. The other arguments are those of `overspill.load`.

    Several threads may use it at once: their requests are computed together.
    """

    def __init__(
        self,
        model: Any,
        gpu_memory: Size = None,
        host_memory: Size = None,
        disk: str | Path | None = None,
        mode: str = "auto",
        slots: int | None = None,
        host_slots: int | None = None,
        context: int = 4096,
        max_batch: int = 16,
        device: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
    ) -> None:
        check_mode(mode)
        for name, value in (("context", context), ("max_batch", max_batch)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
        if slots is not None and (
            not isinstance(slots, int) or isinstance(slots, bool) or slots < 0
        ):
            raise ConfigError(f"slots={slots!r} must be a whole number of at least 0")
        streaming = None if slots is None else max(_LEAST_SLOTS, slots)
        budgets = Budgets(
            gpu_memory, host_memory, disk, device, "gpu" if mode == "gpu-only" else "auto",
            streaming, host_slots,
        )  # fmt: skip
        if not isinstance(model, str | os.PathLike):
            given = {
                "gpu_memory": gpu_memory, "host_memory": host_memory, "disk": disk,
                "mode": mode if mode == "gpu-only" else None, "host_slots": host_slots,
                "device": device, "dtype": dtype,
            }  # fmt: skip
            _check_not_given(given)
        asked = CacheRequest(context, max_batch, _BLOCK)
        self._source = source = open_source(model, budgets, asked, dtype)
        self._closed = False
        self.model = source.model
        """The model itself, as a module of PyTorch."""
        self.device: torch.device = source.model.overspill.device
        self.context = source.context
        try:
            self._loop = self._new_loop(max_batch, slots, mode)
        except BaseException:  # the mode may not be for this model
            if source.owned:
                source.model.overspill.close()
            raise

    def _new_loop(self, max_batch: int, slots: int | None, mode: str) -> ServingLoop:
        source = self._source
        new_mode(mode, pregate_level(source.model))  # it may refuse the model
        on_gpu = self.device.type == "cuda"
        paged = can_page(source.model)
        runner: Runner
        if paged:
            dense_there = not source.model.overspill.placement.dense_weights
            fused = on_gpu and dense_there and has_triton("fused decoding")
            limits = source.n_blocks, _BLOCK, source.context, max_batch, fused, slots, mode
            runner = PagedRunner(source.model, self.device, *limits)
        else:
            runner = SequentialRunner(source.model, self.device)
        pool = BlockPool(source.n_blocks, _BLOCK, share=paged)
        scheduler = Scheduler(pool, max_batch, _CHUNK if paged else source.context, paged)
        stream = torch.cuda.current_stream(self.device) if on_gpu else None
        return ServingLoop(runner, scheduler, source.ends, stream)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]:
        """The results of the prompts (texts or lists of token ids), in their order. `params` are
        for all prompts, or one for each. If one of several fails, the others are finished first."""
        listed = _list_prompts(prompts)
        requests = [
            self._request(*each) for each in zip(listed, _each(params, listed), strict=True)
        ]
        try:
            for request in requests:
                self._loop.add(request)
            self._loop.run_until(lambda: all(request.finished for request in requests))
        finally:
            for request in requests:
                self._loop.remove(request)
        for request in requests:
            _raise(request)
        return [request.result() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """The text of one prompt while it is made."""
        (checked,) = _each(params, [prompt])
        return self._stream(self._request(prompt, checked))

    def _stream(self, request: Request) -> Iterator[Piece]:
        self._loop.add(request)
        try:
            while True:
                self._loop.run_until(lambda: not request.pieces.empty())
                piece = request.pieces.get()
                if piece.finish_reason == "error":
                    _raise(request)
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:  # also if the caller stops reading
            self._loop.remove(request)

    def stats(self) -> dict[str, Any]:
        """What was served so far, and where the experts are."""
        stats, engine = self._loop.stats, self.model.overspill
        waits = sorted(stats.waits)
        return {
            "requests": stats.requests,
            "prompt_tokens": stats.prompt_tokens,
            "new_tokens": stats.new_tokens,
            "decode_tokens": stats.decode_tokens,
            "decode_seconds": stats.decode_seconds,
            "tokens_per_second": stats.decode_tokens / max(stats.decode_seconds, 1e-9),
            "time_to_first_token": waits[len(waits) // 2] if waits else None,
            "cache_bytes": self._loop.runner.cache_bytes,
            "bytes": engine.bytes_by_tier(),
            "uploaded_bytes": engine.recorder.counters().get("upload", 0),
            **self._loop.runner.stats(),
        }

    def take_spans(self) -> list[Span]:
        """When the CPU computed experts that were not on the GPU, since the last call (the latest
        4096 times): for a timeline."""
        return self._loop.runner.take_spans()

    def chat_tokens(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The prompt of a chat (`[{"role": "user", "content": "..."}]`) by the model's chat
        template; without one, the lines of the chat as plain text."""
        tokenizer = getattr(self._source.codec, "tokenizer", None)
        if tokenizer is not None and tokenizer.chat_template is not None:
            try:
                ids = tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
                )
            except Exception as error:  # jinja and templates raise any type
                raise ConfigError(f"the chat template refuses this chat: {error}") from error
            return [int(token) for token in ids]
        if self._source.codec is None:
            raise ConfigError("this model has no tokenizer; a chat needs one")
        return self._source.codec.encode("\n".join(message["content"] for message in messages))

    def close(self) -> None:
        """Frees the model if it was loaded here; a given model can be used otherwise again."""
        if self._closed:
            return
        self._closed = True
        if self.model.overspill.lifetime.forked:  # it has neither threads nor a GPU
            return
        self._loop.close()
        if self._source.owned:
            self.model.overspill.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise OrderError("this LLM was closed; make a new one")

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        self._check_open()
        codec, vocabulary = self._source.codec, self._vocabulary()
        if isinstance(prompt, str):
            if codec is None:
                raise ConfigError("this model has no tokenizer; give token ids instead of text")
            tokens = codec.encode(prompt)
        else:
            tokens = list(_check_prompt(prompt))
        if not tokens:
            raise ConfigError("the prompt is empty; give at least one token")
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool):
                raise ConfigError(f"{token!r} in a prompt is not a token id (a whole number)")
            if not 0 <= token < vocabulary:
                raise ConfigError(f"token id {token} is not one of the {vocabulary} of this model")
        if len(tokens) >= self.context:
            raise ConfigError(
                f"a prompt of {len(tokens)} tokens leaves no room in the context of "
                f"{self.context}; shorten it, or raise context= (--context) if the model allows it"
            )
        if params.stops and codec is None:
            raise ConfigError("this model has no tokenizer: stop strings cannot be found")
        most = min(params.max_tokens, self.context - len(tokens))
        return Request(tokens, params, TextStream(codec, params.stops), most)

    def _vocabulary(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])


def _check_not_given(options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(
                f"{name}={value!r} is for a model that is loaded here; give it to overspill.load"
            )


def _list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = list(_check_prompt(prompts))
    if listed and all(isinstance(each, int) for each in listed):
        return [listed]
    return [each if isinstance(each, str) else _check_prompt(each) for each in listed]


def _check_prompt(prompt: Any) -> Any:
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise ConfigError(f"{prompt!r} is no prompt; give texts or lists of token ids")
    return prompt


def _each(
    params: SamplingParams | Sequence[SamplingParams] | None, prompts: Sequence[Prompt]
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    for each in params if isinstance(params, list | tuple) else [params]:
        if not isinstance(each, SamplingParams):
            raise ConfigError(f"{each!r} is not SamplingParams; give overspill.SamplingParams(...)")
    if len(params) != len(prompts):
        raise ConfigError(f"{len(params)} params for {len(prompts)} prompts; give one for each")
    return list(params)


def _raise(request: Request) -> None:
    error = request.error
    if error is None:
        return
    if isinstance(error, OverspillError):
        raise error
    raise OverspillError(f"a batch failed: {type(error).__name__}: {error}") from error

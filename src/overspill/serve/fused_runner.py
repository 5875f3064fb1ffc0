"""Batches of one token of each request as decoding steps, other batches through the modules."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import OrderError
from overspill.serve.checkpoints import Checkpoints
from overspill.serve.decode.decode import Decode
from overspill.serve.options import DecodingOptions
from overspill.serve.runners import PagedRunner, span_of
from overspill.serve.sampling import Draw
from overspill.serve.scheduler import BatchItem
from overspill.serve.states import Part
from overspill.serve.weights_version import WeightsVersion
from overspill.trace.spans import Span


class FusedRunner(PagedRunner):
    """Computes one new token of each request with few kernels, on a GPU as a CUDA graph. Needs
    Triton."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        n_blocks: int,
        block_size: int,
        context: int,
        max_batch: int,
        decoding: DecodingOptions | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        super().__init__(model, device, n_blocks, block_size, context, max_batch, checkpoints)
        try:
            self._decode = Decode(
                model,
                self._cache,
                context,
                max_batch,
                decoding or DecodingOptions(),
                self._seq2seq,
                None if self._slots is None else self._slots.memory,
            )
        except BaseException:
            self._engine.servers.discard(self)
            raise
        self._version = WeightsVersion(model)  # weights may have become parts of others
        self._addresses = self._version.addresses()  # that captured steps read

    def free_memory(self) -> bool:
        return self._decode.free_memory()

    def _run(self, batch: Sequence[BatchItem]) -> Tensor:
        parts = self._parts(batch)
        may_step = self._slots is None or self._slots.may_step(parts)
        if may_step and all(count == 1 for _, count in batch):
            known = [r.tokens[r.computed] for r, _ in batch]
            logits = self._step(known, parts, [r.draw() for r, _ in batch])
            if logits is not None:
                return logits
        self.chosen = None
        return self._compute(parts)

    def _compute(self, parts: Sequence[Part], keep: bool = True) -> Tensor:
        with self._decode.passing():
            return super()._compute(parts, keep)

    def continue_with(self, batch: Sequence[BatchItem], tokens_N: Tensor) -> Tensor | None:
        parts = [Part(r, r.computed + 1, 1) for r, _ in batch]
        try:
            with self._replaced():
                return self._step(tokens_N, parts, [r.draw(1) for r, _ in batch])
        except torch.OutOfMemoryError:  # it may be the first step; `run` makes memory free for it
            return None

    def _step(
        self, tokens: Sequence[int] | Tensor, parts: Sequence[Part], draws: Sequence[Draw]
    ) -> Tensor | None:
        """Return the logits of a decoding step; None if the modules have to compute it."""
        slots, numbers = self._slots, [0] * len(parts)
        if slots is not None:
            numbers = [span.slot for span in slots.begin(parts)]
        spans = [span_of(part, number) for part, number in zip(parts, numbers, strict=True)]
        computed = self._decode.run(tokens, spans, draws)
        if slots is not None:
            slots.end_step(parts, done=computed is not None)
        if computed is None:
            return None
        self.chosen = computed.chosen
        return computed.logits_BV

    def weights_changed(self, thorough: bool) -> bool:
        changed = super().weights_changed(thorough)
        if self._addresses != self._version.addresses():
            raise OrderError(
                "dense weights of the model were replaced by other tensors (assign=True?), and "
                "decoding reads the old ones; close this LLM and make a new one"
            )
        return changed

    def check(self) -> None:
        self._decode.check()

    def discard(self) -> None:
        self._decode.discard()

    def pause(self) -> None:
        self._decode.pause()

    def stats(self) -> dict[str, Any]:
        return self._decode.stats()

    def take_spans(self) -> list[Span]:
        return self._decode.take_spans()

    def close(self) -> None:
        self._decode.close()
        super().close()

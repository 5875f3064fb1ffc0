"""Counters of requests and tokens."""

from collections import deque

from overspill.serve.request import Request
from overspill.serve.scheduler import BatchItem


class Stats:
    """Counters of requests and tokens since the start."""

    def __init__(self) -> None:
        self.requests = 0
        self.prompt_tokens = 0
        self.new_tokens = 0
        self.decode_seconds = 0.0
        self.decode_tokens = 0
        self.waits: deque[float] = deque(maxlen=1000)  # until the first token, the last ones

    def count(self, batch: list[BatchItem], seconds: float) -> None:
        """Count the tokens of a batch, before they are counted as computed."""
        new = [request.computed >= request.prompt_tokens for request, _ in batch]
        self.prompt_tokens += sum(
            item.request.pending_source
            + min(item.n_new, item.request.prompt_tokens - item.request.computed)
            for item, is_new in zip(batch, new, strict=True)
            if not is_new
        )
        if all(new) and all(count == 1 for _, count in batch):
            self.decode_seconds += seconds
            self.decode_tokens += len(batch)

    def finish(self, request: Request) -> None:
        """Count a request that has ended."""
        self.requests += 1
        self.new_tokens += len(request.new_tokens)
        if request.first_token_at is not None:
            self.waits.append(request.first_token_at - request.asked_at)

"""GET /stats: what the server does now, for its web page."""

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overspill.server.service import Service


def read_stats(service: "Service") -> dict[str, Any]:
    """Figures as JSON; None for what is not known, such as hit rates without a GPU cache."""
    engine = service.llm.stats()
    layers: list[float] | None = engine.get("expert_hit_rate")
    return {
        "model": service.name,
        "device": str(service.llm.device),
        "context": service.llm.context,
        "uptime_seconds": time.monotonic() - service.began,
        "draining": service.draining,
        "running": engine["running"],
        "waiting": engine["waiting"],
        "in_flight": service.in_flight,
        "max_batch": service.max_batch,
        "max_queue": service.config.limits.max_queue,
        "requests": engine["requests"],
        "prompt_tokens": engine["prompt_tokens"],
        "new_tokens": service.rate.total,
        "tokens_per_second": service.rate.per_second(),
        "time_to_first_token": engine["time_to_first_token"],
        "hit_rate": sum(layers) / len(layers) if layers else None,
        "hit_rate_per_layer": layers or None,
        "bytes_per_tier": engine["bytes"],
        "budget_per_tier": engine["budgets"],
        "gpu_reserved": engine["gpu_reserved"],
        "cache_bytes": engine["cache_bytes"],
        "kv_blocks": engine["kv_blocks"],
        "kv_blocks_free": engine["kv_blocks_free"],
    }

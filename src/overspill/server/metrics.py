"""GET /metrics: counters and histograms for Prometheus."""

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from overspill.server.answers import Answers

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600)
_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """Counters of requests and answers, and the figures of the engine."""

    def __init__(self, read_stats: Callable[[], dict[str, Any]]) -> None:
        """`read_stats` returns the figures of the engine, as `Service.stats`."""
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "overspill_http_requests", "Requests by path and status", ("path", "status"),
            registry=registry,
        )  # fmt: skip
        self._first = Histogram(
            "overspill_time_to_first_token_seconds", "From a request to its first token",
            buckets=_FIRST, registry=registry,
        )  # fmt: skip
        self._token = Histogram(
            "overspill_time_per_token_seconds", "Mean time between the tokens of an answer",
            buckets=_TOKEN, registry=registry,
        )  # fmt: skip
        self._cancelled = Counter(
            "overspill_cancelled", "Requests whose client has gone before their end",
            registry=registry,
        )  # fmt: skip
        registry.register(_Engine(read_stats))

    def count_request(self, path: str, status: int) -> None:
        """Count a request by its path and its status."""
        self._requests.labels(path, str(status)).inc()

    def count_answers(self, answers: Answers) -> None:
        """Record the times of answers that have ended."""
        if answers.disconnected:
            self._cancelled.inc()
        for times in answers.times:
            if times.first is not None:
                self._first.observe(times.first - answers.asked_at)
                if times.tokens > 1:
                    self._token.observe((times.last - times.first) / (times.tokens - 1))

    def text(self) -> bytes:
        """Return all figures in the text format of Prometheus."""
        return generate_latest(self._registry)


class _Engine(Collector):
    """Figures of the engine, read when Prometheus asks for them."""

    def __init__(self, read_stats: Callable[[], dict[str, Any]]) -> None:
        self._read_stats = read_stats

    def describe(self) -> Iterable[Metric]:
        return ()  # else it would be collected when it is registered

    def collect(self) -> Iterable[Metric]:
        stats = self._read_stats()
        gauges = {
            "running": "Answers that are computed",
            "waiting": "Answers that wait for others",
            "tokens_per_second": "New tokens of all answers, in the last five seconds",
            "hit_rate": "Share of expert uses that found the expert on the GPU",
            "kv_blocks": "Blocks of keys and values",
            "kv_blocks_free": "Blocks of keys and values that no answer holds",
            "cache_bytes": "Memory of keys and values",
        }
        for name, text in gauges.items():
            if stats[name] is not None:
                yield GaugeMetricFamily(f"overspill_{name}", text, stats[name])
        for name, text in (("prompt_tokens", "Tokens of prompts"), ("new_tokens", "New tokens")):
            yield CounterMetricFamily(f"overspill_{name}", text, stats[name])
        for name, sizes, text in (
            ("bytes", stats["bytes_per_tier"], "Memory by tier"),
            ("budget_bytes", stats["budget_per_tier"], "Memory that may be used, by tier"),
        ):
            tiers = GaugeMetricFamily(f"overspill_{name}", text, labels=["tier"])
            for tier, size in sizes.items():
                if size is not None:
                    tiers.add_metric([tier], size)
            yield tiers
        if stats["hit_rate_per_layer"]:
            text = "Share of expert uses that found the expert on the GPU"
            layers = GaugeMetricFamily("overspill_layer_hit_rate", text, labels=["layer"])
            for number, rate in enumerate(stats["hit_rate_per_layer"]):
                layers.add_metric([str(number)], rate)
            yield layers

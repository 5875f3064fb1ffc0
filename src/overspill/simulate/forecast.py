"""Predicts the time of a training step on the GPUs of one node, from rates measured on one GPU.

Four resources work in parallel, and the slowest one determines the step: each GPU with its compute
and exchanges, each link with uploads, host memory, and the CPU with its updates of experts in host
memory. The node has one host memory and one CPU, however many GPUs it has. Gradients are not
clipped: with clipping, updates begin only after the backward.

Ranks wait for each other at every exchange of tokens, so a layer takes as long as its busiest GPU.
Uploads of static placement run ahead of the routing and are hidden behind other layers. Those of
dynamic placement begin after the routing; in the backward it is known, and they are hidden too.

Shapes: L layers, G GPUs, E experts of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from overspill.core.errors import ConfigError
from overspill.plan.placement import (
    PlacementCosts,
    Rows,
    dynamic_rows,
    layer_seconds,
    static_rows,
    uploaded,
)

_WEIGHT = 2
"""Bytes of a bf16 weight, gradient or activation."""
_UPDATE = 26
"""Bytes of host memory that AdamW on the CPU reads and writes for each parameter."""
_DEVICE_UPDATE = 28
"""Bytes of GPU memory that AdamW on the GPU reads and writes for each parameter: it also reads the
gradient and writes the weight there."""
_PASSES = 4
"""Number of times that a step with recomputation multiplies by a matrix: forward, again, and two
products of the backward."""
_EXCHANGES = 5
"""Exchanges of token rows in a step: two of the forward; of the backward, inputs and gradients to
GPUs, and gradients back."""


@dataclass(frozen=True)
class NodeRates:
    """Rates of a node, each one with all other resources in use."""

    link: float
    """Bytes a second from pinned host memory to one GPU."""
    host_memory: float
    """Bytes a second, reads and writes, of the CPU and of all copies together."""
    cpu_update: float
    """Parameters a second of AdamW on all cores."""
    compute: float
    """Operations a second that one GPU reaches in training."""
    device_memory: float
    """Bytes a second of the memory of one GPU."""
    exchange: float
    """Bytes a second that one GPU sends to others, while it receives as many."""
    all_links: float | None = None
    """Bytes a second of all links together. None: the links of GPUs are independent."""
    through_host: bool = False
    """GPUs exchange tokens through host memory, on the links of the uploads."""

    def __post_init__(self) -> None:
        for name, rate in vars(self).items():
            if rate is not None and not isinstance(rate, bool) and not rate > 0:
                raise ConfigError(f"{name}={rate} must be above 0")


@dataclass(frozen=True)
class TrainingWork:
    """Sizes of a model, and the routing of one step on all GPUs together."""

    expert: int
    """Parameters of one expert."""
    dense: int
    """Parameters besides the experts; every GPU has them."""
    dense_active: int
    """Dense parameters that compute for every token: all but the embedding."""
    d_model: int
    tokens: int
    rows_LE: Sequence[Sequence[int]]
    """Token rows of each expert."""

    @property
    def experts(self) -> int:
        """Parameters of all experts."""
        return self.expert * sum(map(len, self.rows_LE))


@dataclass(frozen=True)
class Forecast:
    """Busy seconds of each resource in a step."""

    gpu: float
    exchange: float
    """Part of `gpu`: the time in which it exchanges tokens and gradients of dense parameters."""
    uploads: float
    host_memory: float
    cpu_update: float

    @property
    def seconds(self) -> float:
        return max(self.gpu, self.uploads, self.host_memory, self.cpu_update)

    @property
    def limit(self) -> str:
        """The resource that determines the step."""
        times = {
            "CPU optimizer": self.cpu_update,
            "host memory": self.host_memory,
            "uploads": self.uploads,
            "exchange" if self.exchange > self.gpu / 2 else "GPU": self.gpu,
        }
        return max(times, key=times.__getitem__)


def forecast(
    work: TrainingWork,
    rates: NodeRates,
    n_gpus: int,
    resident: float = 0.0,
    dynamic: bool = False,
) -> Forecast:
    """The time of a step. `resident` is the share of the experts that live on the GPU of their
    owner with their optimizer states; the others are streamed. `dynamic`: with dynamic placement
    if that is faster."""
    if not 0 <= resident <= 1:
        raise ConfigError(f"resident={resident} is a share of the experts; give 0 to 1")
    if n_gpus < 1:
        raise ConfigError(f"n_gpus={n_gpus} must be at least 1")
    found = [_step(work, rates, n_gpus, resident, on) for on in {False, dynamic}]
    return min(found, key=lambda step: step.seconds)


def _step(
    work: TrainingWork, rates: NodeRates, n_gpus: int, resident: float, dynamic: bool
) -> Forecast:
    one_pass = _costs(work, rates, n_gpus, resident)
    layers = [_Layer.of(rows, n_gpus, one_pass, resident == 1, dynamic) for rows in work.rows_LE]
    others = (n_gpus - 1) / n_gpus  # share of the token rows that another GPU computes
    row_bytes = _EXCHANGES * _WEIGHT * work.d_model * others
    dense_bytes = 2 * _WEIGHT * work.dense * others  # the all-reduce of gradients
    busiest = sum(layer.most_rows for layer in layers)
    exchange = (busiest * row_bytes + dense_bytes) / rates.exchange

    streamed = (1 - resident) * work.experts
    updated = work.dense + resident * work.experts / n_gpus
    dense = 2 * _PASSES * work.dense_active * work.tokens / n_gpus / rates.compute
    gpu = dense + sum(layer.seconds for layer in layers) + exchange
    gpu += updated * _DEVICE_UPDATE / rates.device_memory

    uploads_G = sum((layer.uploads_G for layer in layers), np.zeros(n_gpus, np.int64))
    uploads = 2 * one_pass.upload * float(uploads_G.max())
    # weights in two passes and a gradient; those of resident experts move between GPUs
    copied = 3 * _WEIGHT * work.expert * float(uploads_G.sum())
    host_bytes = _UPDATE * streamed + (1 - resident) * copied
    if rates.through_host:
        exchanged = sum(map(sum, work.rows_LE)) * row_bytes + n_gpus * dense_bytes
        exchanged += copied if resident == 1 else 0
        host_bytes += 2 * exchanged  # written for one GPU, read by another
        uploads += exchange
    return Forecast(
        gpu, exchange, uploads, host_bytes / rates.host_memory, streamed / rates.cpu_update
    )


def _costs(work: TrainingWork, rates: NodeRates, n_gpus: int, resident: float) -> PlacementCosts:
    """Costs of one pass through a layer."""
    # GPUs that upload at the same time share what all of them can read
    link = min(rates.link, (rates.all_links or rates.link * n_gpus) / n_gpus)
    link = min(link, rates.host_memory / n_gpus)
    # a copy of a resident expert comes from its owner
    rate, share = (rates.exchange, 1.0) if resident == 1 else (link, 1 - resident)
    upload = share * _WEIGHT * work.expert / rate
    return PlacementCosts(upload, 2 * work.expert / rates.compute, wait=upload)


@dataclass(frozen=True)
class _Layer:
    seconds: float
    """Busy time of the busiest GPU in all passes."""
    most_rows: int
    uploads_G: Rows

    @classmethod
    def of(
        cls, rows_E: Sequence[int], n_gpus: int, one: PlacementCosts, resident: bool, dynamic: bool
    ) -> "_Layer":
        static_GE = rows_GE = static_rows(rows_E, n_gpus)
        if dynamic:
            step = PlacementCosts(2 * one.upload, _PASSES * one.row, one.wait)
            rows_GE = dynamic_rows(rows_E, n_gpus, step, resident)
        most_rows = int(rows_GE.sum(1).max())
        seconds = _PASSES * most_rows * one.row
        if not np.array_equal(rows_GE, static_GE):
            # the uploads of the forward delay it where they take longer than its compute
            forward = layer_seconds(rows_GE, one, resident) + one.wait
            seconds += forward - most_rows * one.row
        return cls(seconds, most_rows, uploaded(rows_GE, resident))

"""How much of an exchange is hidden where experts are streamed: groups of experts instead of
partitions. The experts are frozen, so the CPU optimizer does not decide the time of a step."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpipe_layers import DEVICE, NUMBERS, RATES, W1, Layer, Row, milliseconds, show
from record import metric, write_record
from torch import Tensor, nn

import overspill
from overspill.moe.settings import Settings
from overspill.parallel.exchange.loopback import LoopbackExchange

SPEC = replace(W1, experts=16)
LAYERS, SLOTS = 4, 32


class Stack(nn.Module):
    """Layers in a row, so that experts of the next one are uploaded ahead."""

    def __init__(self, spec: Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(spec.build(None) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def offloaded(spec: Layer) -> Stack:
    model = Stack(spec)
    for layer in model.layers:
        for parameter in layer.expert_parameters():  # type: ignore[operator]
            parameter.requires_grad_(False)
    settings = Settings(residency=False, follow_usage=False)
    overspill.offload(
        model, mode="host", slots=SLOTS, device=str(DEVICE), settings=settings, quiet=True
    )
    return model


def step(model: Stack, x: Tensor, dy: Tensor) -> Callable[[], None]:
    x = x.detach().requires_grad_()

    def work() -> None:
        model(x).backward(dy)

    return work


def streamed_row(model: Stack, rate: float, rows: str, alone: float) -> tuple[Row, float]:
    """A row of the table, and the gain of the best number of groups over one group."""
    engine: Any = model.overspill
    engine.loop_back(LoopbackExchange(DEVICE, rate))
    work, times = step(model, SPEC.rows(SPEC.tokens), SPEC.rows(SPEC.tokens)), {}
    for n in NUMBERS:
        engine.switch(replace(engine.settings, exchange_groups=n, received_rows=rows))
        times[n] = statistics.median(milliseconds(work))
    gain = times[1] / min(times.values())
    row = {
        "link, GB/s": rate,
        "received rows": rows,
        "no exchange, ms": f"{alone:.2f}",
        **{f"n = {n}, ms": f"{times[n]:.2f}" for n in NUMBERS},
        "gain": f"{gain:.2f}",
    }
    show(row)
    return row, gain


def streamed(out: Path | None) -> None:
    model = offloaded(SPEC)
    overspill.AdamW(model)
    work = step(model, SPEC.rows(SPEC.tokens), SPEC.rows(SPEC.tokens))
    alone = statistics.median(milliseconds(work))
    found = [streamed_row(model, rate, rows, alone) for rate in RATES for rows in ("send", "keep")]
    engine: Any = model.overspill
    engine.close()
    write_record(
        "mpipe-streamed",
        {
            "row": "groups of streamed experts over a throttled link: time of one group over the "
            "best",
            "model": f"{LAYERS} layers of {SPEC.experts} frozen experts, {SPEC.tokens:,} tokens",
        },
        {"gain": metric([gain for _, gain in found], "×")},
        None,
        out,
        table=[row for row, _ in found],
    )

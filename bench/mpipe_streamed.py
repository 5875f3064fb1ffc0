"""How much of an exchange is hidden where experts are streamed: groups of experts instead of
partitions. The experts are frozen, so the CPU optimizer does not decide the time of a step."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from loopback import loop_back
from mpipe_layers import NUMBERS, W1, Layer, Row, Setup, median, show
from record import metric, write_record
from torch import Tensor, nn

import overspill
from overspill.moe.settings import Settings

SPEC = replace(W1, experts=16, tokens=16384)
RATES = (12, 25, 50)
ROUNDS = 3  # a step takes some 100 ms
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
    settings = Settings(residency=False)
    overspill.offload(
        model, mode="host", slots=SLOTS, device=str(spec.device), settings=settings, quiet=True
    )
    return model


def step(model: Stack, x: Tensor, dy: Tensor) -> Callable[[], None]:
    x = x.detach().requires_grad_()

    def work() -> None:
        model(x).backward(dy)

    return work


def streamed_row(
    model: Stack, spec: Layer, setup: Setup, rate: float, rows: str, alone: float
) -> tuple[Row, float]:
    """A row of the table, and the gain of the best number of groups over one group."""
    engine: Any = model.overspill
    loop_back(engine, setup.link(rate))
    work, times = step(model, spec.rows(spec.tokens), spec.rows(spec.tokens)), {}
    for n in NUMBERS:
        engine.switch(replace(engine.settings, exchange_groups=n, received_rows=rows))
        times[n] = median(work, spec.device, ROUNDS)
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


def streamed(setup: Setup) -> None:
    """Record mpipe-streamed."""
    spec = setup.layer(SPEC)
    model = offloaded(spec)
    optimizer = overspill.AdamW(model)
    work = step(model, spec.rows(spec.tokens), spec.rows(spec.tokens))
    alone = median(work, spec.device, ROUNDS)
    found = [
        streamed_row(model, spec, setup, rate, rows, alone)
        for rate in setup.few(RATES, 1)
        for rows in ("send", "keep")
    ]
    engine: Any = model.overspill
    engine.close()
    del optimizer
    write_record(
        "mpipe-streamed",
        {
            "row": "groups of streamed experts over a throttled link: time of one group over the "
            "best",
            "model": f"{LAYERS} layers of {spec.experts} frozen experts, {spec.tokens:,} tokens",
        },
        {"gain": metric([gain for _, gain in found], "×")},
        None,
        setup.out,
        table=[row for row, _ in found],
    )

"""The timeline of one training step: S, C and R of all partitions, forward and backward.

By the tables of docs/moe-layer.md, GPT-XL's layer computes 32,768 tokens in 10 ms, and exchanges
them in 13 ms at the full speed of the link. With four times as many tokens, S, C and R of each of
four partitions take 3 ms or more, several times as long as their launches.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mpipe_layers import GPT_XL, LAYERS, Setup, milliseconds
from record import metric, write_record

from overspill.trace.picture import draw_timeline
from overspill.trace.spans import Span

PICTURE = "timeline-moe-layer.png"
RECORD = "mpipe-timeline"
_COLOURS = ("#2f6db3", "#c8702a", "#2f7d4f", "#7b4fa3", "#18808a", "#a8456b", "#8a6d1d", "#5c6773")
_LABELS = (
    (r"([SCR])(\d+)", r"\1\2"),
    (r"S of x (\d+)", r"S'\1"),
    (r"offload T_\w+ (\d+)", r"D\1"),
    (r"prefetch T_\w+ (\d+)", r"H\1"),
)
"""Names of spans in the pipeline and in the paper: copies to the host are D, copies to the device
are H. Others, such as the exchange of routing weights, belong to no partition."""


@dataclass(frozen=True)
class Timeline:
    """Work of a timeline."""

    layer: str = GPT_XL.name
    tokens: int = 131072
    link: float = 50.0
    partitions: int = 4
    strategy: str = "S4"
    """Which the layer selects for this link, by the tables of docs/moe-layer.md."""

    @property
    def title(self) -> str:
        return (
            f"MoELayer, {self.partitions} partitions, {self.strategy}: forward and backward of "
            f"{self.layer}'s layer, {self.tokens:,} tokens, link of {self.link:g} GB/s"
        )


def record_step(setup: Setup, wanted: Timeline) -> list[Span]:
    """The spans of one step, after one that warms up."""
    spec = setup.layer(next(spec for spec in LAYERS if spec.name == wanted.layer))
    exchange = setup.link(wanted.link)
    layer = spec.build(exchange, partitions=wanted.partitions, strategy=wanted.strategy)
    work = spec.step(layer, setup.batch(wanted.tokens))
    milliseconds(work, setup.device)
    exchange.recorder.start()
    work()
    if setup.device.type == "cuda":
        torch.cuda.synchronize()
    exchange.recorder.stop()
    return sorted(exchange.recorder.spans(), key=lambda span: span.start_ns)


def partition_of(name: str) -> tuple[str, int | None]:
    """The label of a span, and its partition."""
    for pattern, label in _LABELS:
        if match := re.fullmatch(pattern, name):
            return match.expand(label), int(match[match.lastindex or 1])
    return name, None


def draw(spans: Sequence[Span], path: Path, title: str) -> None:
    """Partitions have different colours, the same ones in forward and backward."""
    named = [(span, *partition_of(span.name)) for span in spans]
    labelled = [span._replace(name=label) for span, label, _ in named]
    colours = {
        span: _COLOURS[number % len(_COLOURS)]
        for span, (_, _, number) in zip(labelled, named, strict=True)
        if number is not None
    }
    draw_timeline(labelled, path, title, colours)


def timeline(setup: Setup, wanted: Timeline) -> None:
    spans = record_step(setup, wanted)
    begin, end = spans[0].start_ns, max(span.end_ns for span in spans)
    config = {
        "row": f"the step of {PICTURE}",
        "title": wanted.title,
        "picture": PICTURE,
        "spans": [_text(span, begin) for span in spans],
    }
    write_record(RECORD, config, {"step": metric([(end - begin) / 1e6], "ms")}, None, setup.out)


def draw_recorded(record: dict[str, Any], out: Path) -> None:
    config = record["config"]
    draw([_span(text) for text in config["spans"]], out / config["picture"], config["title"])


def _text(span: Span, begin: int) -> str:
    """A span in one line of a record, from the begin of the step."""
    return f"{span.row}, {span.name}, {span.start_ns - begin}, {span.end_ns - begin}, {span.bytes}"


def _span(text: str) -> Span:
    row, name, *numbers = text.split(", ")
    return Span(row.removeprefix("gpu "), name, *map(int, numbers))  # the row's name before

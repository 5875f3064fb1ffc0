"""The pipelined MoE layer on one GPU: token rows travel in a loop through pinned host memory, at
the speed of another machine's link.

PYTHONPATH=src python3 bench/mpipe.py overlap granularity memory strategy
PYTHONPATH=src python3 bench/mpipe.py streamed
PYTHONPATH=src python3 bench/mpipe.py timeline --out docs
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from mpipe_layers import DEVICE, W1, milliseconds, step
from mpipe_overlap import granularity, overlap
from mpipe_reuse import memory, strategy
from mpipe_streamed import streamed

from overspill.parallel.exchange.loopback import LoopbackExchange
from overspill.trace.picture import draw_timeline


def timeline(out: Path | None) -> None:
    exchange = LoopbackExchange(DEVICE, 50)
    layer = W1.build(exchange, partitions=4, strategy="S3")
    work = step(layer, W1.rows(16384), W1.rows(16384))
    milliseconds(work)
    exchange.recorder.start()
    work()
    torch.cuda.synchronize()
    exchange.recorder.stop()
    title = "MoELayer, 4 partitions, S3: forward and backward of W1's layer, 16,384 tokens, 50 GB/s"
    path = Path(out or ".") / "timeline-moe-layer.png"
    draw_timeline(exchange.recorder.spans(), path, title)
    print(path)


PARTS: dict[str, Callable[[Path | None], None]] = {
    part.__name__: part for part in (overlap, granularity, memory, strategy, streamed, timeline)
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=[*PARTS])
    parser.add_argument("--out", type=Path, default=None, help="folder for records and pictures")
    args = parser.parse_args(arguments)
    for name in args.parts:
        PARTS[name](args.out)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

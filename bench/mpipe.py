"""The pipelined MoE layer on one GPU: token rows travel in a loop through pinned host memory, at
the speed of another machine's link.

PYTHONPATH=src python3 bench/mpipe.py overlap granularity memory strategy
PYTHONPATH=src python3 bench/mpipe.py streamed
PYTHONPATH=src python3 bench/mpipe.py figure-8 figure-9 figure-10 figure-11 figure-12 figure-13
PYTHONPATH=src python3 bench/mpipe.py timeline
PYTHONPATH=src python3 bench/mpipe.py draw    # the pictures of these records; needs no GPU
"""

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from mpipe_figures import FIGURES
from mpipe_granularity import granularity
from mpipe_layers import LAYERS, Setup
from mpipe_memory import memory
from mpipe_overlap import overlap
from mpipe_pictures import draw_all
from mpipe_strategy import strategy
from mpipe_streamed import streamed
from mpipe_timeline import RECORD, Timeline, draw_recorded, timeline
from record import RESULTS, ROOT

from overspill.plan.reuse import STRATEGIES

PARTS: dict[str, Callable[[Setup], None]] = {
    part.__name__.replace("_", "-"): part
    for part in (overlap, granularity, memory, strategy, streamed, *FIGURES)
}


def draw(out: Path | None) -> None:
    """Pictures of the records in `out` or bench/results, into `out` or docs."""
    results, pictures = out or RESULTS, out or ROOT / "docs"
    drawn = draw_all(results, pictures)
    if (recorded := results / f"{RECORD}.json").is_file():
        draw_recorded(json.loads(recorded.read_text()), pictures)
        drawn.append(RECORD)
    if not drawn:
        raise SystemExit(f"{results.name}/ has no record of a figure or of the timeline")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "timeline", "draw"])
    parser.add_argument("--out", type=Path, help="folder for records and pictures")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU; needs --out")
    one = parser.add_argument_group("timeline")
    one.add_argument("--layer", choices=[spec.name for spec in LAYERS], default=Timeline.layer)
    one.add_argument("--tokens", type=int, default=Timeline.tokens)
    one.add_argument("--link", type=float, default=Timeline.link, help="GB/s")
    one.add_argument("--partitions", type=int, default=Timeline.partitions)
    one.add_argument("--strategy", choices=[*STRATEGIES], default=Timeline.strategy)
    args = parser.parse_args(arguments)
    wanted = Timeline(args.layer, args.tokens, args.link, args.partitions, args.strategy)
    parts = {**PARTS, "timeline": partial(timeline, wanted=wanted)}
    for name in args.parts:
        if name == "draw":
            draw(args.out)
            continue
        parts[name](Setup(args.out, args.smoke))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""Loading a large checkpoint: rate compared with the disk, and peak host memory.

PYTHONPATH=src python3 bench/load.py --size 30 --folder FOLDER
PYTHONPATH=src python3 bench/load.py --gpt-oss --size 20 --folder FOLDER   # packed, and stays so
PYTHONPATH=src python3 bench/load.py --gpt-oss --smoke --folder FOLDER     # tiny, on the CPU
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpt_oss import DENSE_GB, LAYER_GB, gpt_oss, write_checkpoint
from hf_train import mixtral_8x7b
from record import Limit, Metric, metric, write_record
from ssd import disk_bandwidth

import overspill
from overspill.core.packing import QUANTIZATIONS
from overspill.hardware.machine import peak_resident_memory
from overspill.tiers.slab import HostSlab

_PINNED = 4 << 30
"""Bytes pinned to see how fast that is."""


def make(folder: Path, args: argparse.Namespace) -> None:
    """Writes a checkpoint of about `--size`: Mixtral-8x7B or gpt-oss-120b with fewer layers."""
    if args.gpt_oss:
        layers = max(1, round((args.size - DENSE_GB) / LAYER_GB))
        write_checkpoint(folder, gpt_oss(layers, args.smoke))
        return
    layers = max(1, round((args.size - 0.5) / 2.9))
    model = overspill.from_config(
        mixtral_8x7b(layers), "40GiB", dtype=torch.bfloat16, mode="host", train=False
    )
    overspill.save(model, folder)
    model.overspill.close()


def drop_cache(folder: Path) -> None:
    """Drops the files from the page cache, so that they are read from the disk."""
    for file in folder.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def pinning_rate(nbytes: int) -> float:
    """Bytes a second that become pinned memory, as an engine allocates it."""
    slot, start = 16 << 20, time.perf_counter()
    slab = HostSlab("pinning", max(1, nbytes // slot), slot, torch.cuda.is_available())
    took = time.perf_counter() - start
    slab.close()
    return nbytes / took


def timed_load(checkpoint: Path, args: argparse.Namespace) -> tuple[Any, dict[str, Metric]]:
    """The model, and how long it took to load."""
    marks: dict[str, float] = {}

    def progress(what: str, done: int, total: int) -> None:
        marks.setdefault(f"{what} begins", time.perf_counter())
        marks[f"{what} ends"] = time.perf_counter()

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before = pages * os.sysconf("SC_PAGE_SIZE")
    start = time.perf_counter()
    model = overspill.load(
        checkpoint, None if args.smoke else "40GiB", mode="host", train=args.train,
        progress=progress, quiet=True, quantize=args.quantize, packed=args.gpt_oss,
        device="cpu" if args.smoke else None,
    )  # fmt: skip
    took = time.perf_counter() - start
    engine = model.overspill
    size = checkpoint_bytes(checkpoint)
    fill = marks["filling the store ends"] - marks["filling the store begins"]
    stored = engine.shape.numel * engine.dtype.itemsize  # bytes of an expert that are read
    if args.gpt_oss:
        stored = engine.layout.weight_bytes
    filled = (engine.n_layers * engine.n_experts - 1) * stored
    for name, at in marks.items():
        print(f"{at - start:7.2f} s {name}")
    print(f"total: {took:.2f} s for {size / 1e9:.1f} GB", flush=True)
    over = peak_resident_memory() - before - engine.bytes_by_tier()["host"]
    return model, {
        "whole_rate": metric([size / took / 1e9], "GB/s"),
        "reading": metric([filled / fill / 1e9], "GB/s"),
        "whole_load": metric([took], "s"),
        "beyond_the_store": metric([over / 2**30], "GiB"),
        "peak": metric([peak_resident_memory() / 2**30], "GiB"),
    }


def checkpoint_bytes(checkpoint: Path) -> int:
    return sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))


def write(
    model: Any, metrics: dict[str, Metric], size: int, disk: float, args: argparse.Namespace
) -> None:
    row, name = f"loading a checkpoint of {size / 1e9:.0f} GB", "load-30gb"
    source, most = "disk, direct I/O, reads, measured just before the load", disk
    if args.gpt_oss:
        pinning = pinning_rate(1 << 20 if args.smoke else _PINNED)
        metrics |= {
            "disk": metric([disk / 1e9], "GB/s"),
            "pinning": metric([pinning / 1e9], "GB/s"),
        }
        name, most = "load-gpt-oss-120b", min(disk, pinning)
        row += f" of gpt-oss-120b's shape, {model.overspill.n_layers} of 36 layers, MXFP4, packed"
        slower = "disk, direct I/O, reads" if disk <= pinning else "pinning of memory"
        source = f"{slower}, the slower of both, measured in the same run"
    if args.quantize:
        name, row = f"{name}-{args.quantize}", row + f", experts packed as {args.quantize}"
    details = {
        "row": row,
        "show": [key for key in metrics if key not in ("whole_rate", "peak")],
        "placement": model.overspill.describe(),
    }
    write_record(name, details, metrics, Limit(most / 1e9, "GB/s", source), args.out)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=30, help="GB")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gpt-oss", action="store_true", help="gpt-oss in MXFP4, not Mixtral")
    parser.add_argument("--train", action="store_true", help="also plan memory for an optimizer")
    parser.add_argument("--make", action="store_true", help="only write the checkpoint")
    parser.add_argument("--quantize", choices=QUANTIZATIONS, help="pack the experts")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint for a later call")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU; needs --out")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(arguments)
    if args.gpt_oss and (args.train or args.quantize):
        parser.error("--gpt-oss is packed already: leave out --train and --quantize")
    if args.smoke and (args.out is None or not args.gpt_oss):
        parser.error("--smoke needs --gpt-oss and --out FOLDER: records are not for bench/results")
    checkpoint = args.folder / "checkpoint"
    if args.make or (args.smoke and not checkpoint.exists()):
        make(checkpoint, args)
    if args.make:
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    if not checkpoint.exists():  # in another process: its memory would count
        start = time.perf_counter()
        given = ["--size", str(args.size), "--folder", str(args.folder)]
        given += ["--gpt-oss"] if args.gpt_oss else []
        subprocess.run([sys.executable, __file__, "--make", *given], check=True)
        print(f"made in {time.perf_counter() - start:.1f} s", flush=True)
    drop_cache(checkpoint)
    if torch.cuda.is_available():
        torch.cuda.init()
    record, count = (1 << 20, 8) if args.smoke else (80 << 20, 96)
    disk = disk_bandwidth(args.folder, record, count)["read"]
    model, metrics = timed_load(checkpoint, args)
    write(model, metrics, checkpoint_bytes(checkpoint), disk, args)
    model.overspill.close()
    if not args.keep:
        shutil.rmtree(checkpoint)


if __name__ == "__main__":
    main()

"""Loading a large checkpoint: rate compared with the disk, and peak host memory.

PYTHONPATH=src python3 bench/load.py --size 30 --folder FOLDER
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from hf_train import mixtral_8x7b
from record import Limit, metric, write_record
from ssd import disk_bandwidth

import overspill
from overspill.core.packing import QUANTIZATIONS
from overspill.hardware.machine import peak_resident_memory


def make(folder: Path, gigabytes: float) -> None:
    """Writes a checkpoint of about this size: Mixtral-8x7B with fewer layers."""
    layers = max(1, round((gigabytes - 0.5) / 2.9))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=30, help="GB")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--train", action="store_true", help="also plan memory for an optimizer")
    parser.add_argument("--make", action="store_true", help="only write the checkpoint")
    parser.add_argument("--quantize", choices=QUANTIZATIONS, help="pack the experts")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint for a later call")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    checkpoint = args.folder / "checkpoint"
    if args.make:
        make(checkpoint, args.size)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    if not checkpoint.exists():
        start = time.perf_counter()
        again = [sys.executable, __file__, "--make", "--size", str(args.size)]
        subprocess.run([*again, "--folder", str(args.folder)], check=True)
        print(f"made in {time.perf_counter() - start:.1f} s", flush=True)
    drop_cache(checkpoint)
    torch.cuda.init()
    disk = disk_bandwidth(args.folder, 80 << 20, 96)["read"]
    marks: dict[str, float] = {}

    def progress(what: str, done: int, total: int) -> None:
        marks.setdefault(f"{what} begins", time.perf_counter())
        marks[f"{what} ends"] = time.perf_counter()

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before = pages * os.sysconf("SC_PAGE_SIZE")
    start = time.perf_counter()
    model = overspill.load(
        checkpoint, "40GiB", mode="host", train=args.train, progress=progress, quiet=True,
        quantize=args.quantize,
    )  # fmt: skip
    took = time.perf_counter() - start
    engine = model.overspill
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    fill = marks["filling the store ends"] - marks["filling the store begins"]
    n_experts = engine.n_layers * engine.n_experts
    filled = (n_experts - 1) * engine.shape.numel * engine.dtype.itemsize
    for name, at in marks.items():
        print(f"{at - start:7.2f} s {name}")
    print(f"total: {took:.2f} s for {size / 1e9:.1f} GB", flush=True)
    over = peak_resident_memory() - before - engine.bytes_by_tier()["host"]
    metrics = {
        "whole_rate": metric([size / took / 1e9], "GB/s"),
        "reading": metric([filled / fill / 1e9], "GB/s"),
        "whole_load": metric([took], "s"),
        "beyond_the_store": metric([over / 2**30], "GiB"),
        "peak": metric([peak_resident_memory() / 2**30], "GiB"),
    }
    details = {
        "row": f"loading a checkpoint of {size / 1e9:.0f} GB"
        + (f", experts packed as {args.quantize}" if args.quantize else ""),
        "show": ["whole_load", "reading", "beyond_the_store"],
        "placement": engine.describe(),
    }
    source = "disk, direct I/O, reads, measured just before the load"
    name = f"load-30gb-{args.quantize}" if args.quantize else "load-30gb"
    write_record(name, details, metrics, Limit(disk / 1e9, "GB/s", source), args.out)
    engine.close()
    if not args.keep:
        shutil.rmtree(checkpoint)


if __name__ == "__main__":
    main()

"""Training with experts on an SSD: the share of the disk's bandwidth that a step uses.

PYTHONPATH=src python3 bench/ssd.py --disk FOLDER --host-memory 16GiB
"""

import argparse
import threading
import time
from pathlib import Path

from record import Limit, metric, write_record
from workload import SEQ, Work, build, measure, optimize, show

from overspill.models.presets import get_preset
from overspill.tiers.slab import HostSlab
from overspill.tiers.ssd import RecordFile

WORKERS = 8


def disk_bandwidth(folder: Path, slot_bytes: int, slots: int) -> dict[str, float]:
    """Bytes per second of direct I/O on records of the benchmark's size: write, read, and both at
    once (equal amounts, counted together)."""
    file = RecordFile(folder / "bandwidth.bin", slots, slot_bytes)
    slab = HostSlab("bandwidth", WORKERS, slot_bytes, pinned=False)

    def timed(kinds: str) -> float:
        def work(worker: int) -> None:
            for slot in range(worker, slots, WORKERS):
                # half of the workers write while the others read
                if kinds == "write" or (kinds == "both" and (worker + slot // WORKERS) % 2):
                    file.write(slot, slab[worker])
                else:
                    file.read(slot, slab[worker])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(WORKERS)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return slots * slot_bytes / (time.perf_counter() - start)

    try:
        return {kinds: timed(kinds) for kinds in ("write", "read", "both")}
    finally:
        file.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="moe-m")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--gpu-memory", default="12GiB")
    parser.add_argument("--host-memory", default="16GiB")
    parser.add_argument("--disk", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--warm", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--timeline", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    args.disk.mkdir(parents=True, exist_ok=True)
    config = get_preset(args.preset, n_experts=args.experts)
    before = disk_bandwidth(args.disk, 80 << 20, 96)
    print({kind: f"{rate / 1e9:.2f} GB/s" for kind, rate in before.items()}, flush=True)
    budgets = {"gpu_memory": args.gpu_memory, "host_memory": args.host_memory, "disk": args.disk}
    model = build(config, **budgets, mode="disk")
    engine = model.overspill
    optimizer = optimize(model)
    work = Work(args.batch)
    measure(model, optimizer, work, args.warm, 1, traced=0)
    start = engine.recorder.counters()
    name = f"ssd-{args.preset}-{args.experts}"
    timeline = None if args.timeline is None else args.timeline / name
    began = time.perf_counter()
    title = f"{args.preset} with {args.experts} experts, {args.host_memory} of host memory"
    run = measure(model, optimizer, work, 0, args.steps, timeline, 1, title)
    took = time.perf_counter() - began
    moved = {kind: engine.recorder.counters()[kind] - start[kind] for kind in start}
    show(name, run)
    placement = engine.describe()
    engine.close()
    after = disk_bandwidth(args.disk, 80 << 20, 96)
    rate = (moved["ssd read"] + moved["ssd write"]) / took / 1e9
    ceiling = (before["both"] + after["both"]) / 2 / 1e9
    print({kind: f"{rate / 1e9:.2f} GB/s" for kind, rate in after.items()}, flush=True)
    metrics = {
        "disk_bandwidth": metric([rate], "GB/s"),
        "tokens_per_second": metric(run.speed, "tokens/s"),
        "step": metric(run.seconds, "s"),
        "read": metric([moved["ssd read"] / 1e9 / (args.steps + 1)], "GB/step"),
        "written": metric([moved["ssd write"] / 1e9 / (args.steps + 1)], "GB/step"),
        "disk_read": metric([before["read"] / 1e9, after["read"] / 1e9], "GB/s"),
        "disk_write": metric([before["write"] / 1e9, after["write"] / 1e9], "GB/s"),
        "host_memory": metric([run.host_bytes / 2**30], "GiB"),
    }
    details = {
        "row": f"{args.preset} {args.experts} experts, {args.host_memory} of host memory",
        "show": ["tokens_per_second", "host_memory"],
        "placement": placement,
        "batch": f"{args.batch}×{SEQ}",
        "parameters": config.total_params,
    }
    source = "disk, direct I/O, reads and writes at once, measured before and after"
    write_record(name, details, metrics, Limit(ceiling, "GB/s", source), args.out)


if __name__ == "__main__":
    main()

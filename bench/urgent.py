"""Waiting time of an urgent upload while background uploads occupy the link.

PYTHONPATH=src python3 bench/urgent.py
"""

import argparse
import random
import statistics
import time
from pathlib import Path

import torch
from record import Limit, metric, write_record

from overspill.core.expert_map import ExpertMap
from overspill.core.experts import ExpertShape
from overspill.tiers.layout import RecordLayout
from overspill.tiers.slab import device_slab
from overspill.tiers.store import ExpertStore
from overspill.trace.recorder import Recorder
from overspill.transfer.new_uploader import new_uploader
from overspill.transfer.streams import CopyStream
from overspill.transfer.uploader import Target, Uploader

N_EXPERTS = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    device = torch.device("cuda")
    layout = RecordLayout(ExpertShape(1024, 4096, gated=False), torch.bfloat16)
    store = ExpertStore(1, ExpertMap.whole(N_EXPERTS), layout, N_EXPERTS, 0, pinned=True)
    store.memory.wait_allocated()
    recorder = Recorder(device=device)
    slab = device_slab(N_EXPERTS, layout.weight_bytes, device)
    stream = CopyStream("upload", device, recorder, None)
    uploader = new_uploader(store, slab, stream, N_EXPERTS)
    recorder.start()
    waits, arrivals, rates = [], [], []
    numbers = random.Random(1)
    for _ in range(args.trials):
        recorder.clear()
        wait, arrival, rate = trial(store, uploader, recorder, numbers)
        waits.append(wait)
        arrivals.append(arrival)
        rates.append(rate)
    copy = layout.weight_bytes / statistics.median(rates)
    copies = [wait / copy for wait in waits]
    ordered = sorted(copies)
    print(f"one copy {copy * 1e3:.3f} ms; waits in copies: median {statistics.median(copies):.2f}")
    metrics = {
        "wait": metric(copies, "copies"),
        "of_95_in_100": metric([ordered[int(0.95 * len(ordered))]], "copies"),
        "arrival": metric([a * 1e3 for a in arrivals], "ms"),
        "link": metric([rate / 1e9 for rate in rates], "GB/s"),
    }
    config = {
        "row": f"wait of an urgent upload under {N_EXPERTS - 1} background uploads of 17 MB",
        "show": ["of_95_in_100", "arrival", "link"],
        "compare": f"first come, first served: up to {N_EXPERTS - 1} copies",
        "trials": args.trials,
    }
    limit = Limit(1.0, "copies", "one copy of a record")
    write_record("urgent-load", config, metrics, limit, args.out)
    uploader.close()
    store.close()


def trial(
    store: ExpertStore, uploader: Uploader, recorder: Recorder, numbers: random.Random
) -> tuple[float, float, float]:
    """Seconds from the request to the start and the end of its copy, and the rate of the others."""
    with store.sync.lock:
        for entry in store.places.entries:  # all experts have to be uploaded again
            store.begin_update(entry)
            store.end_update(entry)
        background = [Target(e, e.number, "background") for e in store.places.entries[1:]]
        uploader.set_targets(background)
    time.sleep(2e-3 + numbers.random() * 5e-3)  # during the background uploads
    with store.sync.lock:
        asked = time.perf_counter_ns()
        uploader.set_targets([Target(store.places.entries[0], 0, "urgent"), *background])
    uploader.wait_idle()
    torch.cuda.synchronize()
    spans = recorder.spans()
    urgent = [span for span in spans if span.name.endswith("urgent")]
    others = [span for span in spans if span.name.endswith("background")]
    rate = sum(s.bytes for s in others) / sum((s.end_ns - s.start_ns) / 1e9 for s in others)
    start = min(span.start_ns for span in urgent)
    end = max(span.end_ns for span in urgent)
    return max(0, start - asked) / 1e9, (end - asked) / 1e9, rate


if __name__ == "__main__":
    main()

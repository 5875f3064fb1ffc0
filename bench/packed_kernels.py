"""Microseconds that the experts of a layer of W2 take in a decoding step, packed and in bf16.

PYTHONPATH=src python3 bench/packed_kernels.py bf16 mxfp4 int4 fp8 [--tiles | --few] [--out FILE]
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from packed_models import PLAIN, RandomExperts
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from overspill.compute.activation_form import Form
from overspill.compute.decode import constants, packed_experts
from overspill.compute.decode.constants import Tile
from overspill.compute.decode.experts import experts
from overspill.compute.decode.packing import packed_records
from overspill.core.experts import ExpertId, ExpertShape

SHAPE = ExpertShape(2048, 768, gated=True)
N_EXPERTS, TOP_K, LAYERS = 128, 8, 12
SINGLE = [Tile(*each) for each in (
    (4, 256, 2), (2, 256, 2), (8, 256, 2), (4, 128, 1), (2, 128, 1), (4, 512, 4),
)]  # fmt: skip
SEVERAL = [Tile(*each) for each in ((64, 32, 4), (64, 16, 4), (32, 32, 4), (128, 32, 8))]
TRIED = (
    (1, ("PACKED_IN_TILE", "PACKED_OUT_TILE"), SINGLE),
    (64, ("PACKED_GROUP_TILE",), SEVERAL),
)


FEW: dict[str, tuple[tuple[int, ...], object, str, object]] = {
    "out (4, 256, 2)": ((1, 4), constants, "PACKED_OUT_TILE", Tile(4, 256, 2)),
    "out (4, 128, 1)": ((1, 4), constants, "PACKED_OUT_TILE", Tile(4, 128, 1)),
    "in (1, 128, 1)": ((1, 4), constants, "PACKED_IN_TILE", Tile(1, 128, 1)),
    "not early": ((1, 4), packed_experts, "early", lambda device: {"EARLY": False}),
    "group (32, 16, 2)": ((16, 64), constants, "PACKED_GROUP_TILE", Tile(32, 16, 2)),
    "group (128, 16, 8)": ((16, 64), constants, "PACKED_GROUP_TILE", Tile(128, 16, 8)),
}
"""Changes that `--few` measures: numbers of tokens, and the attribute that is set to a value."""


class Row(NamedTuple):
    """Microseconds of a layer, or of one of its kernels."""

    name: str
    tokens: int
    what: str
    us: float
    rate: float = 0.0


class Layers:
    """The experts of some layers on the GPU, and a step with random ones."""

    def __init__(self, name: str, layers: int = LAYERS) -> None:
        self.layers = layers
        self.base, self.packed = torch.empty(64, dtype=torch.bfloat16, device="cuda"), None
        form = Form.usual(SHAPE.gated)
        count = layers * N_EXPERTS
        if name == PLAIN:
            self.records = torch.randn(count, SHAPE.numel, device="cuda", dtype=torch.bfloat16)
            self.records *= 0.02
        else:
            source = RandomExperts(SHAPE, name)
            one = torch.empty(N_EXPERTS, source.format.nbytes, dtype=torch.uint8)
            for index, record in enumerate(one):
                source.fill(ExpertId(0, index), record)
            self.records = one.to("cuda").repeat(layers, 1)
            self.base = torch.empty(64, dtype=torch.uint8, device="cuda")
            self.packed = packed_records(source.format, form, self.base)
        self.nbytes = self.records[0].nbytes

    def step(self, x: Tensor, weights: Tensor, offsets_LBK: Tensor) -> Tensor:
        for offsets in offsets_LBK:
            args = x, weights, offsets, self.base, SHAPE.d_hidden, Form.usual(True), False, False
            y = experts(*args, packed=self.packed)
        return y

    def microseconds(self, batch: int) -> tuple[float, float]:
        """Microseconds of a layer, and bytes of its experts that it reads in a second."""
        step, read = self.prepare(batch)
        seconds = time_graph(step) / self.layers
        return 1e6 * seconds, read / seconds

    def prepare(self, batch: int) -> tuple[Callable[[], object], float]:
        """A step, and the bytes of experts that a layer of it reads."""
        torch.manual_seed(batch)
        ids = torch.rand(self.layers, batch, N_EXPERTS).topk(TOP_K).indices
        read = sum(len(set(layer.flatten().tolist())) for layer in ids) / self.layers * self.nbytes
        ids += torch.arange(self.layers)[:, None, None] * N_EXPERTS
        first = (self.records.data_ptr() - self.base.data_ptr()) // self.base.element_size()
        offsets = (first + ids * self.records.stride(0)).cuda()
        x = torch.randn(batch, SHAPE.d_model, dtype=torch.bfloat16, device="cuda")
        weights = torch.rand(batch, TOP_K, device="cuda")
        return lambda: self.step(x, weights, offsets), read

    def by_kernel(self, batch: int) -> dict[str, float]:
        """Microseconds of each kernel of a layer, which begin when the one before has ended."""
        step, _ = self.prepare(batch)
        step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(5):
                step()
            torch.cuda.synchronize()
        return {
            event.key: event.self_device_time_total / event.count
            for event in profiled.key_averages()
            if event.key.endswith("_kernel")
        }


def time_graph(step: Callable[[], object]) -> float:
    """Seconds of a step in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e4)
    return sorted(times)[len(times) // 2]


def try_tiles(layers: Layers, name: str) -> list[Row]:
    """Time each kernel with other tiles, with the tiles of the others unchanged."""
    rows = []
    for batch, names, tiles in TRIED:
        for which in names:
            before = getattr(constants, which)
            for tile in tiles:
                setattr(constants, which, tile)
                how = f"{which} {tuple(tile)}"
                try:
                    rows.append(Row(name, batch, how, *layers.microseconds(batch)))
                except Exception as error:  # too much shared memory
                    print(name, how, type(error).__name__, flush=True)
            setattr(constants, which, before)
    return rows


def compile_few(name: str) -> None:
    """Compiles the kernels of `measure_few`, each change in a process of its own."""
    command = [sys.executable, __file__, name, "--compile"]
    running = [subprocess.Popen([*command, change]) for change in ("", *FEW)]
    for process in running:
        process.wait()


def compile_change(name: str, change: str) -> None:
    batches, where, what, value = FEW.get(change, ((1, 4, 16, 64), constants, "WIDE", 2048))
    setattr(where, what, value)
    layers = Layers(name, 1)
    for batch in batches:
        layers.prepare(batch)[0]()
    torch.cuda.synchronize()


def measure_few(name: str) -> list[Row]:
    """A layer as it is and with each of a few changes."""
    layers = Layers(name)
    rows = [Row(name, batch, "", *layers.microseconds(batch)) for batch in (1, 4, 16, 64)]
    for change, (batches, where, what, value) in FEW.items():
        before = getattr(where, what)
        setattr(where, what, value)
        for batch in batches:
            try:
                rows.append(Row(name, batch, change, *layers.microseconds(batch)))
            except Exception as error:  # too much shared memory
                print(name, change, type(error).__name__, flush=True)
        setattr(where, what, before)
    for batch in (1, 64):
        rows += [Row(name, batch, *each) for each in layers.by_kernel(batch).items()]
    return rows


def measure(name: str, tiles: bool) -> list[Row]:
    layers = Layers(name)
    rows = []
    for batch in (1, 4, 16, 64):
        rows.append(Row(name, batch, "", *layers.microseconds(batch)))
        for kernel, time in layers.by_kernel(batch).items():
            rows.append(Row(name, batch, kernel, time))
    if tiles and name != PLAIN:
        rows += try_tiles(layers, name)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=[PLAIN, "mxfp4", "int4", "fp8"])
    parser.add_argument("--tiles", action="store_true", help="try others than those of the kernels")
    parser.add_argument("--few", action="store_true", help="only layers, also with a few changes")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="file to which the rows are written as JSON")
    args = parser.parse_args()
    if args.compile is not None:
        return compile_change(args.names[0], args.compile)
    if args.few:
        with ThreadPoolExecutor() as pool:
            list(pool.map(compile_few, args.names))
    rows = []
    for name in args.names:
        own = measure_few(name) if args.few else measure(name, args.tiles)
        for row in own:
            print(as_text(row), flush=True)
        rows += own
        torch.cuda.empty_cache()
    if args.out is not None:
        args.out.write_text(json.dumps([row._asdict() for row in rows]))


def as_text(row: Row) -> str:
    rate = f"{row.rate / 1e9:7.0f} GB/s" if row.rate else ""
    return f"{row.name:6} {row.tokens:3} tokens {row.us:7.1f} us {rate:12} {row.what}"


if __name__ == "__main__":
    main()

"""Microseconds that the experts of a layer of W2 take in a decoding step, packed and in bf16.

PYTHONPATH=src python3 bench/packed_kernels.py bf16 mxfp4 int4 fp8 [--tiles]
"""

import argparse
from collections.abc import Callable

import torch
from packed_models import PLAIN, RandomExperts
from torch import Tensor

from overspill.compute.activation import Form
from overspill.compute.decode import constants
from overspill.compute.decode.constants import Tile
from overspill.compute.decode.experts import experts
from overspill.compute.decode.packing import packed_records
from overspill.core.experts import ExpertId, ExpertShape

SHAPE = ExpertShape(2048, 768, gated=True)
N_EXPERTS, TOP_K, LAYERS = 128, 8, 12
SINGLE = [Tile(*each) for each in (
    (16, 64, 4), (8, 64, 4), (4, 64, 4), (32, 64, 4), (16, 32, 2), (8, 128, 8), (16, 128, 8),
    (4, 128, 4), (4, 256, 4), (8, 256, 8),
)]  # fmt: skip
SEVERAL = [Tile(*each) for each in (
    (64, 32, 4), (64, 16, 4), (32, 32, 4), (128, 32, 8), (64, 64, 4), (128, 16, 8), (64, 32, 8),
    (32, 16, 4),
)]  # fmt: skip


class Layers:
    """The experts of some layers on the GPU, and a step with random ones."""

    def __init__(self, name: str) -> None:
        self.base, self.packed = torch.empty(64, dtype=torch.bfloat16, device="cuda"), None
        form = Form.usual(SHAPE.gated)
        count = LAYERS * N_EXPERTS
        if name == PLAIN:
            self.records = torch.randn(count, SHAPE.numel, device="cuda", dtype=torch.bfloat16)
            self.records *= 0.02
        else:
            source = RandomExperts(SHAPE, name)
            one = torch.empty(N_EXPERTS, source.format.nbytes, dtype=torch.uint8)
            for index, record in enumerate(one):
                source.fill(ExpertId(0, index), record)
            self.records = one.to("cuda").repeat(LAYERS, 1)
            self.base = torch.empty(64, dtype=torch.uint8, device="cuda")
            self.packed = packed_records(source.format, form, self.base)
        self.nbytes = self.records[0].nbytes

    def step(self, x: Tensor, weights: Tensor, offsets_LBK: Tensor) -> Tensor:
        for offsets in offsets_LBK:
            args = x, weights, offsets, self.base, SHAPE.d_hidden, Form.usual(True), False, False
            y = experts(*args, packed=self.packed)
        return y

    def microseconds(self, batch: int) -> tuple[float, float]:
        """Of a layer; and bytes a second that it reads of its experts."""
        torch.manual_seed(batch)
        ids = torch.rand(LAYERS, batch, N_EXPERTS).topk(TOP_K).indices
        read = sum(len(set(layer.flatten().tolist())) for layer in ids) / LAYERS * self.nbytes
        ids += torch.arange(LAYERS)[:, None, None] * N_EXPERTS
        first = (self.records.data_ptr() - self.base.data_ptr()) // self.base.element_size()
        offsets = (first + ids * self.records.stride(0)).cuda()
        x = torch.randn(batch, SHAPE.d_model, dtype=torch.bfloat16, device="cuda")
        weights = torch.rand(batch, TOP_K, device="cuda")
        seconds = time_graph(lambda: self.step(x, weights, offsets)) / LAYERS
        return 1e6 * seconds, read / seconds


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


def try_tiles(layers: Layers, name: str) -> None:
    """The fastest tiles of each kernel, others as they are."""
    for batch, names, tiles in (
        (1, ("PACKED_IN_TILE", "PACKED_OUT_TILE"), SINGLE), (64, ("PACKED_GROUP_TILE",), SEVERAL),
    ):  # fmt: skip
        for which in names:
            before, found = getattr(constants, which), []
            for tile in tiles:
                setattr(constants, which, tile)
                try:
                    found.append((layers.microseconds(batch)[0], tile))
                except Exception as error:  # too much shared memory
                    print(name, which, tuple(tile), type(error).__name__, flush=True)
            setattr(constants, which, before)
            found.sort()
            best = ", ".join(f"{tuple(tile)} {time:.1f}" for time, tile in found)
            print(f"{name} {which} with {batch} tokens, us: {best}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=[PLAIN, "mxfp4", "int4", "fp8"])
    parser.add_argument("--tiles", action="store_true", help="try others than those of the kernels")
    args = parser.parse_args()
    rows = []
    for name in args.names:
        layers = Layers(name)
        if args.tiles and name != PLAIN:
            try_tiles(layers, name)
        for batch in (1, 4, 16, 64):
            time, rate = layers.microseconds(batch)
            rows.append(f"{name:6} {batch:3} tokens {time:7.1f} us {rate / 1e9:7.0f} GB/s")
        del layers
        torch.cuda.empty_cache()
    print("\n".join(rows))


if __name__ == "__main__":
    main()

"""The weight gradient of a CPU expert, formed in its backward or in its update from its factors.

PYTHONPATH=src python3 bench/factored.py            # record factored-gradients
PYTHONPATH=src python3 bench/factored.py --smoke    # tiny

Cores alone, bf16 weights and float32 moments. The two ways alternate, over more experts than the
caches hold. A backward takes all threads, as in the engine; so does an update here, while the
engine updates several experts at a time. "norm" is from the products of rows with each other;
"formed later" is the gradient from its factors, where others are added to it.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import metric, write_record
from torch import Tensor

from overspill.compute.cpu_kernel import (
    BackwardRows,
    ExpertRows,
    GradientKind,
    WeightGradient,
    cpu_isa,
    factor_row_bytes,
    kernel_backward,
)
from overspill.core.experts import ExpertShape
from overspill.hardware.machine import cpu_threads
from overspill.optim.arguments import AdamHyper, RecordState
from overspill.optim.factored import Factors, adamw_factored_, form_gradient, square_of
from overspill.optim.kernel import adamw_

SHAPES = {"1024×4096": ExpertShape(1024, 4096, False), "2048×768": ExpertShape(2048, 768, True)}
TINY = {"32×64": ExpertShape(32, 64, True)}
HYPER = AdamHyper(1e-3, 0.9, 0.999, eps=1e-8, weight_decay=0.1, step=2)
BF16 = torch.bfloat16


class Bench:
    def __init__(self, shape: ExpertShape, rows: int, experts: int, threads: int) -> None:
        self.shape, self.rows, self.threads, n = shape, rows, threads, shape.numel
        weights = [(0.02 * torch.randn(n)).to(BF16) for _ in range(experts)]
        self.states = [
            RecordState(w, torch.zeros(n, dtype=torch.int16), torch.zeros(n), torch.zeros(n))
            for w in weights
        ]
        self.x, self.dy = torch.randn(2, rows, shape.d_model).to(BF16)
        self.square = torch.zeros(1)
        self.formed = [torch.zeros(n, dtype=BF16) for _ in range(experts)]
        size = rows * factor_row_bytes(shape, BF16) // 2
        self.left = [torch.zeros(size, dtype=BF16) for _ in range(experts)]

    def factors(self, number: int) -> Factors:
        return Factors(self.left[number], self.rows, self.shape)

    def backward(self, number: int, memory: Tensor, kind: GradientKind) -> None:
        dx, dweight = torch.empty_like(self.x), torch.empty(self.rows)
        rows = BackwardRows(self.x, self.dy, torch.ones(self.rows), dx, dweight)
        expert = ExpertRows(self.states[number].weight, 0, self.rows)
        gradient = WeightGradient(memory, self.square, kind)
        kernel_backward(rows, [expert], self.shape, self.threads, gradients=[gradient])

    def works(self) -> dict[str, Callable[[int], Any]]:
        """The timed functions of an expert by their names, in this order."""
        formed, factored, threads = GradientKind.FORMED, GradientKind.FACTORED, self.threads
        return {
            "backward, formed": lambda n: self.backward(n, self.formed[n], formed),
            "update, formed": lambda n: adamw_(self.states[n], self.formed[n], HYPER, threads),
            "backward, factored": lambda n: self.backward(n, self.left[n], factored),
            "norm": lambda n: square_of(self.factors(n), threads),
            "update, factored": lambda n: adamw_factored_(
                self.states[n], self.factors(n), HYPER, threads
            ),
            "formed later": lambda n: form_gradient(self.factors(n), self.formed[n], threads),
        }

    def seconds(self, rounds: int) -> dict[str, float]:
        """Medians over rounds of the mean over experts."""
        found: dict[str, list[float]] = {name: [] for name in self.works()}
        for number in range(rounds + 1):
            total = dict.fromkeys(found, 0.0)
            for expert in range(len(self.states)):
                for name, work in self.works().items():
                    began = time.perf_counter()
                    work(expert)
                    total[name] += time.perf_counter() - began
            for name, each in total.items() if number else ():
                found[name].append(each / len(self.states))
        return {name: statistics.median(each) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="4,16,64,128,256")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="tiny")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    threads, experts = cpu_threads(None), 16
    if args.smoke:
        args.rows, args.rounds, threads, experts = "3", 1, 1, 2
    table, gains = [], {}
    for name, shape in (TINY if args.smoke else SHAPES).items():
        for rows in map(int, args.rows.split(",")):
            found = Bench(shape, rows, experts, threads).seconds(args.rounds)
            formed = found["backward, formed"] + found["update, formed"]
            factored = sum(found[n] for n in ("backward, factored", "norm", "update, factored"))
            gains[name, rows] = formed / factored
            times = {key: f"{1e3 * value:.2f} ms" for key, value in found.items()}
            gain = f"{gains[name, rows]:.2f}×"
            table.append({"expert": name, "token rows": str(rows), "faster by": gain, **times})
            print(table[-1], flush=True)
    details = {
        "row": "weight gradients of CPU experts: backward and update with factors, faster by (with "
        "the gradient formed in backward), median over sizes",
        "threads": threads,
        "instructions": cpu_isa(),
    }
    if not args.smoke or args.out is not None:
        metrics = {"speedup": metric(list(gains.values()), "×")}
        write_record("factored-gradients", details, metrics, None, args.out, table)


if __name__ == "__main__":
    main()

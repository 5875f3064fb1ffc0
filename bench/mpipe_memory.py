"""The memory that partitions save by sharing it.

The paper's bound is a ratio: equation 5, the memory that sharing saves, divided by the memory of a
layer whose partitions share nothing (equations 1, 2 and 4), is equation 6. Here no such layer with
several partitions exists: torch's allocator lets them share gradients of activations in any case.
One partition that keeps its activations shares nothing, so ratios are those to it.
"""

from functools import partial
from typing import NamedTuple

from mpipe_equations import saved_memory, saving_ratio
from mpipe_layers import GPT_XL, Layer, Row, Setup, show
from mpipe_peak import training_peak
from record import metric, write_record

from overspill.plan import reuse

REUSING = tuple(strategy.name for strategy in reuse.REUSING)
CLAIMED = 16384
"""Tokens of the headline."""
_MIB = 2**20


class Saving(NamedTuple):
    """Peaks of one training step in bytes, and the prediction of the paper."""

    unshared: int
    """One partition that keeps its activations."""
    kept: int
    """n partitions that keep their activations."""
    reused: int
    """n partitions that share memory."""
    ratio_bound: float
    """Equation 6."""
    bytes_bound: float
    """Equation 5."""

    @property
    def ratio(self) -> float:
        return 1 - self.reused / self.unshared

    @property
    def of_equation_6(self) -> float:
        return self.ratio / self.ratio_bound

    @property
    def of_equation_5(self) -> float:
        return (self.unshared - self.reused) / self.bytes_bound


def peak(setup: Setup, spec: Layer, tokens: int, n: int, strategy: str) -> int:
    build = partial(spec.build, setup.link(), partitions=n, strategy=strategy)
    return training_peak(spec, tokens, build)


def saving(spec: Layer, tokens: int, n: int, peaks: tuple[int, int, int]) -> Saving:
    rows = tokens * spec.top_k
    ratio = saving_ratio(rows, spec.d_model, spec.d_hidden, spec.experts, n)
    elements = saved_memory(rows, spec.d_model, spec.d_hidden, n)
    return Saving(*peaks, ratio, elements * spec.dtype.itemsize)


def memory_row(tokens: int, n: int, strategy: str, found: Saving) -> Row:
    return {
        "tokens": f"{tokens:,}",
        "n": n,
        "strategy": strategy,
        "no reuse, n = 1, MiB": f"{found.unshared / _MIB:,.0f}",
        "no reuse, n partitions, MiB": f"{found.kept / _MIB:,.0f}",
        "reuse, MiB": f"{found.reused / _MIB:,.0f}",
        "saved": f"{found.ratio:.0%}",
        "equation 6": f"{found.ratio_bound:.0%}",
        "of equation 6": f"{found.of_equation_6:.0%}",
        "bytes, of equation 5": f"{found.of_equation_5:.0%}",
    }


def memory(setup: Setup) -> None:
    spec, claimed = setup.layer(GPT_XL), (setup.batch(CLAIMED), 8)
    table, all_found, savings = [], [], []
    for tokens in map(setup.batch, setup.few((8192, CLAIMED, 32768))):
        unshared = peak(setup, spec, tokens, 1, "none")
        for n in (4, 8):
            kept = peak(setup, spec, tokens, n, "none")
            for name in setup.few(REUSING):
                peaks = unshared, kept, peak(setup, spec, tokens, n, name)
                found = saving(spec, tokens, n, peaks)
                all_found.append(found)
                savings += [100 * found.ratio] if (tokens, n) == claimed else []
                table.append(memory_row(tokens, n, name, found))
                show(table[-1])
    config = {
        "row": "peak of a training step of GPT-XL's layer with 16k tokens, saved by memory reuse",
        "compare": "against one partition that keeps its activations",
    }
    metrics = {
        "saved at 16k tokens": metric(savings, "%"),
        "of equation 6": metric([100 * found.of_equation_6 for found in all_found], "%"),
        "bytes, of equation 5": metric([100 * found.of_equation_5 for found in all_found], "%"),
    }
    write_record("mpipe-memory", config, metrics, None, setup.out, table)

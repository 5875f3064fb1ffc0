"""Whether an expert in host memory is faster on the CPU, or on the GPU after an upload."""

from typing import NamedTuple

from overspill.hardware.profile import Curve, ExpertCosts


class Comparison(NamedTuple):
    """The times of one direction, forward or backward."""

    name: str
    load: float
    cpu: Curve
    gpu: Curve

    def load_and_gpu(self, tokens: int) -> float:
        return self.load + self.gpu(tokens)

    def cpu_is_faster(self, tokens: int) -> bool:
        return self.cpu(tokens) <= self.load_and_gpu(tokens)

    def crossing(self, most: int) -> int:
        """The tokens, at most `most`, up to which the CPU is always faster; 0 if never."""
        slower = (count for count in range(1, most + 1) if not self.cpu_is_faster(count))
        return next(slower, most + 1) - 1


def comparisons(costs: ExpertCosts) -> tuple[Comparison, Comparison]:
    return (
        Comparison("forward", costs.load, costs.cpu_forward, costs.gpu_forward),
        Comparison("backward, frozen experts", costs.load, costs.cpu_backward, costs.gpu_backward),
    )

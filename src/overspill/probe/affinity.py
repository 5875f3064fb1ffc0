"""Who is faster with an expert that lies in host memory: the CPU where it lies, or the GPU after a
load."""

from typing import NamedTuple

from overspill.hardware.profile import Curve, ExpertCosts


class Contest(NamedTuple):
    """One way through an expert."""

    name: str
    load: float
    cpu: Curve
    gpu: Curve

    def loaded(self, tokens: int) -> float:
        return self.load + self.gpu(tokens)

    def cpu_wins(self, tokens: int) -> bool:
        return self.cpu(tokens) <= self.loaded(tokens)

    def cpu_wins_up_to(self, most: int) -> int:
        """The tokens, `most` at most, up to which the CPU always wins; 0: it loses with one."""
        losses = (count for count in range(1, most + 1) if not self.cpu_wins(count))
        return next(losses, most + 1) - 1


def contests(costs: ExpertCosts) -> tuple[Contest, Contest, Contest]:
    return (
        Contest("forward", costs.load, costs.cpu_forward, costs.gpu_forward),
        Contest("backward, frozen experts", costs.load, costs.cpu_backward, costs.gpu_backward),
        Contest("backward, trained experts", costs.load, costs.cpu_train, costs.gpu_train),
    )

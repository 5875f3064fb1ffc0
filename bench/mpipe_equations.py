"""Memory of a layer and savings of partitions that share memory: equations 1 to 6 of MPipeMoE.

Shapes: B token rows, M (d_model), H (d_hidden), n partitions.
"""

from typing import NamedTuple


class Memory(NamedTuple):
    """Elements of a layer on one device."""

    states: float
    """Parameters, gradients and both moments of Adam (equation 1)."""
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        return self.states + self.activations + self.buffers


def _states(d_model: int, d_hidden: int, n_experts: int) -> float:
    return 4.0 * (n_experts * d_model + 2 * d_hidden * d_model)


def unpipelined_memory(rows: int, d_model: int, d_hidden: int, n_experts: int) -> Memory:
    """Equations 1 to 3."""
    return Memory(
        _states(d_model, d_hidden, n_experts),
        4.0 * rows * d_model + rows * d_hidden,
        float(rows * d_model + rows * d_hidden),
    )


def pipelined_memory(rows: int, d_model: int, d_hidden: int, n_experts: int) -> Memory:
    """Equation 4: buffers for the gradients of all activations."""
    activations = 4.0 * rows * d_model + rows * d_hidden
    return Memory(_states(d_model, d_hidden, n_experts), activations, activations)


def saved_memory(rows: int, d_model: int, d_hidden: int, n: int) -> float:
    """Elements that n partitions save by sharing memory, of activations and as many of buffers
    (equation 5): two of n parts of T_DI and T_DO remain, and one of T_M."""
    each = 2.0 * rows * d_model * max(0, n - 2) / n + rows * d_hidden * (n - 1) / n
    return 2 * each


def saving_ratio(rows: int, d_model: int, d_hidden: int, n_experts: int, n: int) -> float:
    """Equation 6."""
    total = pipelined_memory(rows, d_model, d_hidden, n_experts).total
    return saved_memory(rows, d_model, d_hidden, n) / total

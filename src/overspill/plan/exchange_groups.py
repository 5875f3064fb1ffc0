"""Into which groups the experts of a layer are divided, so that the token rows of one group travel
while another one computes.

Each rank divides the experts that it computes, in the order in which it computes them, into groups
of neighbours. All ranks have equally many groups, some of which may be empty.

Shapes: G ranks that compute, E experts of all ranks.
"""

import numpy as np
from numpy.typing import NDArray

from overspill.core.errors import ConfigError

Rows = NDArray[np.int64]

MOST_GROUPS = 2
"""Groups that are chosen at most. Two were fastest for all links in the record mpipe-streamed: more
make waves of experts smaller, and launches take longer than is hidden."""
LEAST_ROWS = 16384
"""Token rows of a group, on the rank that has most; smaller groups were not measured."""


def choose_groups(rows_GE: Rows, least: int = LEAST_ROWS, most: int = MOST_GROUPS) -> int:
    """The number of groups that suits the token rows that each rank computes of each expert. The
    rank with most rows decides: the others wait for it."""
    busiest = int(np.argmax(rows_GE.sum(1)))
    used = int(np.count_nonzero(rows_GE[busiest]))
    return max(1, min(most, used, int(rows_GE[busiest].sum()) // least))


def divide_experts(rows_GE: Rows, order_GE: Rows, n: int) -> Rows:
    """The group of each expert on each rank, [G, E], with about as many token rows in each group.
    `order_GE` are the experts of each rank in the order in which it computes them."""
    sorted_GE = np.take_along_axis(rows_GE, order_GE, 1)
    ends_GE = sorted_GE.cumsum(1)
    # an expert belongs to the n-th of all rows that its middle lies in
    middle_GE = 2 * ends_GE - sorted_GE
    groups_GE = np.minimum(n * middle_GE // np.maximum(1, 2 * ends_GE[:, -1:]), n - 1)
    found_GE: Rows = np.empty_like(rows_GE)
    np.put_along_axis(found_GE, order_GE, groups_GE, 1)
    return found_GE


def check_groups(n: int | None, n_experts: int, n_ranks: int) -> None:
    """Raise if no rank has so many experts."""
    most = -(-n_experts // n_ranks)
    if n is not None and n > most:
        raise ConfigError(
            f"exchange_groups={n} exceeds the {most} experts of a layer that a rank holds "
            f"({n_experts} experts, {n_ranks} ranks); give at most {most}, or leave it out"
        )

"""Routing that does not come from a model's routers: drawn or replayed.

Random weights route almost evenly. Effects of popular experts are measured with these routings.
"""

from overspill.simulate.attach import routed_by
from overspill.simulate.drawn import DrawnRouting
from overspill.simulate.imbalance import hot_shares, imbalance, zipf_shares
from overspill.simulate.replayed import ReplayedRouting

__all__ = [
    "DrawnRouting",
    "ReplayedRouting",
    "hot_shares",
    "imbalance",
    "routed_by",
    "zipf_shares",
]

"""Measures this machine. `known_costs` reads or measures the costs of an expert."""

from overspill.probe.known import known_costs

__all__ = ["known_costs"]

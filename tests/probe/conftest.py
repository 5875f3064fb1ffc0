from tests.probe.little import little_effort, own_cache

__all__ = ["little_effort", "own_cache"]

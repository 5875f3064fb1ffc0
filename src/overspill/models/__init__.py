"""`GPTMoE` and its presets, imported on first use because torch is slow to import."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overspill.models.config import GPTConfig
    from overspill.models.gpt import GPTMoE
    from overspill.models.presets import get_preset

__all__ = ["GPTConfig", "GPTMoE", "get_preset"]

_HOMES = {"GPTConfig": "config", "GPTMoE": "gpt", "get_preset": "presets"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'overspill.models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"overspill.models.{_HOMES[name]}"), name)

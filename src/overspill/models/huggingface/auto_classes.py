"""Makes transformers' Auto classes know the model type of an exported GPT-MoE.

transformers takes seconds to import, so nothing of it is imported here: the classes are registered
when the modules that register them are imported, or now if they are already.
"""

import importlib
import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_log = logging.getLogger("overspill")
_REGISTERS = {
    "transformers.models.auto.configuration_auto": "overspill.models.huggingface.gpt_config",
    "transformers.models.auto.modeling_auto": "overspill.models.huggingface.gpt_model",
}
"""Module of transformers → module of Overspill that registers a class with it when imported."""


def register_when_imported() -> None:
    """Registers the classes as soon as transformers can know them."""
    later = {}
    for theirs, ours in _REGISTERS.items():
        if theirs in sys.modules:
            _register(ours)
        else:
            later[theirs] = ours
    if later:
        sys.meta_path.insert(0, _Finder(later))


def _register(module: str) -> None:
    """Errors are logged: they must not make transformers unusable."""
    try:
        importlib.import_module(module)
    except Exception as error:
        _log.warning(
            "exported GPT-MoE models cannot be loaded with this version of transformers (%s)", error
        )


class _Finder(MetaPathFinder):
    """Finds modules as Python does, and imports another one after each."""

    def __init__(self, followed_by: dict[str, str]) -> None:
        self._followed_by = followed_by

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        next_one = self._followed_by.get(name)
        spec = PathFinder.find_spec(name, path, target) if next_one else None
        if next_one is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_follow(module: ModuleType) -> None:
            execute(module)
            if self._followed_by.pop(name, None):  # a spec may be found without being loaded
                _register(next_one)

        spec.loader.exec_module = execute_and_follow  # type: ignore[method-assign]
        return spec

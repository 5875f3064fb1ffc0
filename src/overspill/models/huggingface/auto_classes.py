"""Makes transformers' Auto classes know the model type of an exported GPT-MoE.

transformers takes seconds to import, so nothing of it is imported here: the config is registered
when the module that it registers with has been imported, or now if it is already. The model is
registered when a config is made, since transformers imports its modules in many orders, in which
those that the model needs may be half imported.
"""

import importlib
import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_log = logging.getLogger("overspill")
_THEIRS = "transformers.models.auto.configuration_auto"
_OURS = "overspill.models.huggingface.gpt_config"
"""Module that registers the config when it is imported."""


def register_when_imported() -> None:
    """Registers the config as soon as transformers can know it."""
    if _THEIRS in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    """Register the config. Errors are logged, because they must not make transformers unusable."""
    try:
        importlib.import_module(_OURS)
    except Exception as error:
        _log.warning(
            "exported GPT-MoE models cannot be loaded with this version of transformers (%s)", error
        )


class _Finder(MetaPathFinder):
    """Finds the module of transformers as Python does, and registers the config after its
    import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _THEIRS else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:  # a spec may be found several times
                sys.meta_path.remove(self)
                _register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec

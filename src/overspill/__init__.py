"""Overspill: train and serve Mixture-of-Experts models that are larger than the GPU.

Names are imported on first use, so that `import overspill` and the command line's help are quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

from overspill.models.huggingface.auto_classes import register_when_imported

if TYPE_CHECKING:
    from overspill.core.errors import OverspillError
    from overspill.models.checkpoint_presets import preset_config
    from overspill.models.gpt import GPTMoE
    from overspill.models.huggingface.load import from_config, load
    from overspill.models.huggingface.merge import merge
    from overspill.models.huggingface.save import save
    from overspill.models.offload import offload
    from overspill.models.pregate import pregate
    from overspill.models.stages.stages import Stages
    from overspill.moe.moe_layer import MoELayer
    from overspill.moe.settings import Settings
    from overspill.optim.adamw import AdamW
    from overspill.serve.llm import LLM
    from overspill.serve.params import SamplingParams
    from overspill.train.hf_trainer import for_trainer

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AdamW",
    "GPTMoE",
    "MoELayer",
    "OverspillError",
    "SamplingParams",
    "Settings",
    "Stages",
    "__version__",
    "for_trainer",
    "from_config",
    "load",
    "merge",
    "offload",
    "pregate",
    "preset_config",
    "save",
]

_HOMES = {
    "AdamW": "overspill.optim.adamw",
    "GPTMoE": "overspill.models.gpt",
    "LLM": "overspill.serve.llm",
    "MoELayer": "overspill.moe.moe_layer",
    "OverspillError": "overspill.core.errors",
    "SamplingParams": "overspill.serve.params",
    "Settings": "overspill.moe.settings",
    "Stages": "overspill.models.stages.stages",
    "for_trainer": "overspill.train.hf_trainer",
    "from_config": "overspill.models.huggingface.load",
    "load": "overspill.models.huggingface.load",
    "preset_config": "overspill.models.checkpoint_presets",
    "merge": "overspill.models.huggingface.merge",
    "save": "overspill.models.huggingface.save",
    "offload": "overspill.models.offload",
    "pregate": "overspill.models.pregate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'overspill' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


register_when_imported()

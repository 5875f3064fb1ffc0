"""`overspill.pregate`: pre-gates for the MoE blocks of a model."""

import inspect
import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from overspill.core.errors import ConfigError, OrderError
from overspill.models.attention_cache import IN_USE
from overspill.models.huggingface.find_experts import experts_paths
from overspill.moe.layer import MoE
from overspill.moe.pregate import ChainGate, GatedBlock, IdsReader, install, positions
from overspill.moe.router import RouterOutput
from overspill.parallel.sharded import is_sharded

_GATES = ("gate", "router")
"""Names of the gate beside its experts."""
_PASSED_ON = {"pieces", "input_ids", "expert_bias", "padding_mask"}
"""Arguments of gates that are the same for all blocks."""
_LAYER_DROP = ("encoder_layerdrop", "decoder_layerdrop", "layerdrop")
"""Fields of configs."""


def pregate(model: Any, level: int = 1) -> Any:
    """Gives a model pre-gates, in place, before or after `overspill.offload`.

    The gate of MoE block m becomes the pre-gate of block m - level: it is computed there, on the
    input of that block's gate, and chooses and weights the experts of block m. The first `level`
    blocks keep their gates. A pre-gate starts with the weights of the gate and is then trained like
    any other parameter. Returns the model. `overspill.save` writes the conventional model, and the
    pre-gates beside it.
    """
    if isinstance(level, bool) or not isinstance(level, int) or level < 1:
        raise ConfigError(f"level={level!r} must be a whole number of at least 1")
    if hasattr(model, "get_base_model") or getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            f"{type(model).__name__} has adapters of peft; call overspill.pregate before they are "
            "added"
        )
    if any(is_sharded(parameter) for parameter in model.parameters()):
        raise ConfigError("a model that was offloaded with shard_dense cannot get pre-gates")
    if there := pregate_level(model):
        raise ConfigError(
            f"the model has pre-gates of level {there} already; for others, load the conventional "
            "model: overspill.load(..., pregate=False)"
        )
    if hasattr(model, "overspill") and model.overspill.servers:  # its LLM has keys and values
        raise OrderError(IN_USE)
    chains = find_chains(model)
    check_level(level, chains)
    for chain in chains:
        install(chain, level)
    if hasattr(model, "save_pretrained"):
        from overspill.models.huggingface.pregate_file import save_with_pregates

        save_with_pregates(model)
    return model


def pregate_level(model: nn.Module) -> int:
    """Return the level of a model's pre-gates; 0 if it has none."""
    return next((position.level for _, _, position in positions(model)), 0)


def check_level(level: int, chains: Sequence[list[GatedBlock]], asked: str | None = None) -> None:
    """Raise if a chain cannot have pre-gates of that level; `asked` is the option by which it was
    given."""
    shortest = min(chains, key=len)
    if level >= len(shortest):
        most = len(shortest) - 1
        advice = f"give at most {most}" if most else "it cannot have pre-gates"
        raise ConfigError(
            f"{asked or f'level={level}'} needs at least {level + 1} MoE blocks one after another, "
            f"the stack of {shortest[0].path} has {len(shortest)}: {advice}"
        )
    for chain in chains:
        for earlier, block in zip(chain, chain[level:], strict=False):
            for name in block.arguments[1:]:
                known = name in _PASSED_ON and name in earlier.arguments
                if not known and not hasattr(block.block, name):
                    raise ConfigError(
                        f"{block.path} cannot have a pre-gate: {type(block.gate).__name__} depends "
                        f"on {name}, which {earlier.path} does not know"
                    )


def find_chains(model: Any) -> list[list[GatedBlock]]:
    """Return the MoE blocks of a model, one list for each stack of layers. Raises for models that
    cannot have pre-gates."""
    kind = type(model).__name__
    if hasattr(model, "set_experts_implementation"):
        kind = model.config.model_type
        _refuse_layer_drop(model.config)
    paths = experts_paths(model)
    if not paths:
        raise ConfigError(f"{kind} has no Mixture-of-Experts layer that Overspill supports")
    chains: dict[str, list[GatedBlock]] = {}
    for path in paths:
        found = _find_block(model, path, kind)
        path = found.path
        chains.setdefault(re.sub(r"(^|\.)\d+(\.|$)", r"\1*\2", path, count=1), []).append(found)
    return list(chains.values())


def layer_drops(config: Any) -> dict[str, float]:
    """Return the config fields of layer drop that are in use, with the value that pre-gates
    require."""
    return {name: 0.0 for name in _LAYER_DROP if getattr(config, name, 0)}


def _refuse_layer_drop(config: Any) -> None:
    used = layer_drops(config)
    if used:
        fields = ", ".join(f"{name}={getattr(config, name)}" for name in used)
        zeros = ", ".join(f"{name}=0" for name in used)
        raise ConfigError(
            f"{config.model_type} cannot have pre-gates: its layers may be dropped in training "
            f"({fields}); load it with {zeros}"
        )


def _find_block(model: nn.Module, experts_path: str, kind: str) -> GatedBlock:
    """Return the block with these experts: their parent, or a `MoE`, which has them itself."""
    experts = model.get_submodule(experts_path)
    path = experts_path if isinstance(experts, MoE) else experts_path.rpartition(".")[0]
    block = model.get_submodule(path)
    gates = [block._modules[name] for name in _GATES if block._modules.get(name) is not None]
    parts = path.split(".")
    stack = layer = None
    for end in range(1, len(parts) + 1):
        above = model.get_submodule(".".join(parts[: end - 1]))
        if isinstance(above, nn.ModuleList):
            stack = model.get_submodule(".".join(parts[: end - 2]))
            layer = model.get_submodule(".".join(parts[:end]))
            break
    if len(gates) != 1 or stack is None or layer is None:
        raise ConfigError(
            f"{kind} cannot have pre-gates: {path} has no module for its gate, or is not in a list "
            "of layers"
        )
    (gate,) = gates
    assert gate is not None
    names = tuple(inspect.signature(gate.forward).parameters)
    reader: IdsReader = _ids_of_router
    if not isinstance(experts, MoE):
        from overspill.models.huggingface.expert_ids import find_reader

        reader = find_reader(path, block, gate, experts)
    return GatedBlock(path, stack, layer, block, gate, experts, names, reader)


def _ids_of_router(_: ChainGate, routing: RouterOutput) -> Tensor:
    return routing.expert_ids_TK

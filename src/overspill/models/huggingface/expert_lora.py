"""LoRA adapters of stacked experts, as they are read from an adapter's folder.

peft has two layouts. With `target_parameters` both matrices of all experts are one tensor each:
A [r * E, I], expert by expert, and B [O, r * E], the experts side by side for each rank. Adapters
of earlier transformers, whose experts were modules, have two matrices for each of them; there gate
and up projection are two halves of the rows of one matrix of today.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.core.experts import ExpertId
from overspill.models.fill import ExpertSource
from overspill.models.huggingface.conversion import Renamer, Sources
from overspill.models.huggingface.experts import HuggingFaceExperts, StackedExperts
from overspill.models.huggingface.lora_config import MATRIX_A, MATRIX_B, LoraConfig
from overspill.moe.adapters import Factors
from overspill.tiers.layout import LowRanks, RecordLayout
from overspill.tiers.safetensors_stream import StreamReader, TensorSpec


@dataclass(frozen=True)
class ExpertPart:
    """Two matrices whose product is added to experts, by the names of their tensors in the
    adapter."""

    a: str
    b: str
    scale: float
    expert: int | None = None
    """Index of the expert; None: the matrices are of all experts."""
    piece: int = 0
    pieces: int = 1
    """Number of equal pieces of the rows of the experts' matrix; the matrices change one of
    them."""


class ExpertChanges:
    """Changes of an adapter to stacks of experts."""

    def __init__(
        self,
        parts: Mapping[str, Sequence[ExpertPart]],
        layers: Mapping[str, StackedExperts],
        read: Callable[[str], Tensor],
        specs: Mapping[str, TensorSpec],
    ) -> None:
        """`parts` and `layers` have the names of stacks as keys; `read` returns a tensor of the
        adapter, in float32 or wider, and `specs` are the specs of all its tensors."""
        self._parts, self._layers, self._read, self._specs = parts, layers, read, specs
        # experts are read layer by layer, both stacks of some of them at the same time
        self._factors = functools.lru_cache(maxsize=4)(self._read_factors)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    @torch.no_grad()
    def add_to(self, weight: Tensor, name: str, expert: int) -> None:
        """Add the changes of one expert of a stack to its matrix, which is float32 or wider."""
        layer = self._layers[name]
        transposed = layer.shape.transposed
        for part in self._parts[name]:
            if part.expert is None:
                factors = self._factors(part, layer.n_experts)
                weight.copy_(factors.added_to(weight, expert, transposed))
            elif part.expert == expert:
                rows = (weight.T if transposed else weight).chunk(part.pieces)[part.piece]
                rows += (self._read(part.b) @ self._read(part.a)) * part.scale

    def ranks(self) -> LowRanks:
        """Return the largest ranks of both matrices of an expert in any layer. Raises if ranks
        differ by expert, whose records would then differ."""
        found = [0, 0]
        for name, parts in self._parts.items():
            layer, ranks = self._layers[name], Counter[int]()
            for part in parts:
                rank, n_experts = self._specs[part.a].shape[0], layer.n_experts
                for expert in range(n_experts) if part.expert is None else (part.expert,):
                    ranks[expert] += rank // n_experts if part.expert is None else rank
            if len(set(ranks.values())) > 1:
                raise ConfigError(
                    f"the adapter has ranks {min(ranks.values())} and {max(ranks.values())} for "
                    f"experts of {name}, and one rank is needed to serve it beside them; make a "
                    "checkpoint of it with overspill merge"
                )
            number = int(name.endswith(layer.names[1]))
            found[number] = max(found[number], *ranks.values())
        return LowRanks(*found)

    @torch.no_grad()
    def low_rank(self, name: str, expert: int) -> tuple[Tensor, Tensor]:
        """Return A [r, I] and B [O, r] of one expert of a stack, with the scale in B; of rank 0 if
        the stack is not changed."""
        layer = self._layers[name]
        size = layer.shape.sizes[int(name.endswith(layer.names[1]))]
        outputs, inputs = size[::-1] if layer.shape.transposed else size
        all_a, all_b = [torch.empty(0, inputs)], [torch.empty(outputs, 0)]
        for part in self._parts.get(name, ()):
            if part.expert is None:
                factors = self._factors(part, layer.n_experts)
                a, b = factors.a_ErI[expert], factors.b_EOr[expert]
            elif part.expert == expert:
                a, b = self._read(part.a), self._read(part.b)
            else:
                continue
            rows = torch.zeros(outputs, len(a), dtype=b.dtype)
            rows.chunk(part.pieces)[part.piece].copy_(b * part.scale)
            all_a.append(a)
            all_b.append(rows)
        return torch.cat(all_a), torch.cat(all_b, dim=1)

    def _read_factors(self, part: ExpertPart, n_experts: int) -> Factors:
        a, b = self._read(part.a), self._read(part.b)
        return Factors(
            a.view(n_experts, -1, a.shape[1]),
            b.view(b.shape[0], -1, n_experts).permute(2, 0, 1).contiguous(),
            part.scale,
        )


class AdaptedExperts:
    """Source of experts that reads them from `source`, and behind their weights the matrices of an
    adapter."""

    def __init__(
        self, source: ExpertSource, changes: ExpertChanges, layers: Sequence[HuggingFaceExperts]
    ) -> None:
        self._source, self._changes, self._layers = source, changes, layers
        self.format, self.ranks = source.format, changes.ranks()

    @property
    def buffer_bytes(self) -> int:
        """Bytes that `fill` needs besides a record."""
        return self._source.buffer_bytes

    def fill(self, expert: ExpertId, record: Tensor) -> None:
        """Read one expert into its record."""
        layer = self._layers[expert.layer]
        assert isinstance(layer, StackedExperts)
        layout = RecordLayout(layer.shape, layer.dtype, format=self.format, ranks=self.ranks)
        numel, _ = layout.bare
        self._source.fill(expert, record[:numel])
        record[numel:].zero_()
        for number, planes in enumerate(layout.low_rank):
            if planes is None:
                continue
            a_rI, b_Or = self._changes.low_rank(f"{layer.path}.{layer.names[number]}", expert.index)
            a, b = (each[0] for each in planes.of(layout.computed(record)[None]))
            a[: len(a_rI)], b[:, : len(a_rI)] = a_rI, b_Or


class StackMatching:
    """Finds the tensors of an adapter that are for stacks of experts, and refuses the ones of other
    models."""

    def __init__(
        self,
        config: LoraConfig,
        reader: StreamReader,
        layers: Sequence[HuggingFaceExperts],
        rename: Renamer,
        converters: Mapping[str, Any],
    ) -> None:
        self._config, self._reader = config, reader
        self._rename, self._converters = rename, converters
        self._layers = {layer.path: layer for layer in layers if isinstance(layer, StackedExperts)}
        self._stacks = {
            f"{p}.{name}": layer for p, layer in self._layers.items() for name in layer.names
        }
        self.parts: dict[str, dict[tuple[int | None, int], ExpertPart]] = {}
        """Parts by the name of the stack, then by expert and piece."""

    def names(self, name: str) -> bool:
        """Return whether a tensor of the model is a stack of experts."""
        return name in self._stacks

    def changes(self, read: Callable[[str], Tensor]) -> ExpertChanges:
        parts = {name: [*parts.values()] for name, parts in self.parts.items()}
        return ExpertChanges(parts, self._stacks, read, self._reader.specs)

    def add(self, path: str, key: str) -> bool:
        """Note a tensor of the adapter; return False if it is not for experts in a stack."""
        for end, field in ((MATRIX_A, "a"), (MATRIX_B, "b")):
            if path.endswith(f".{end}"):
                module = path.removesuffix(f".{end}")
                return self._add_to_all(module, field, key) or self._add_to_one(module, field, key)
        return False

    def _add_to_all(self, module: str, field: str, key: str) -> bool:
        """Note a matrix of all experts of a layer; return False if it is not one."""
        path, *wrappers = module.split(".base_layer")
        if path not in self._layers:  # a name of earlier transformers
            path = self._rename(f"{path}.down_proj")[0][0].removesuffix(".down_proj")
        if path not in self._layers:
            return False
        name = self._wrapped(path, len(wrappers), key)
        self._note(name, ExpertPart("", "", self._config.scale_of(name)), field, key)
        return True

    def _wrapped(self, path: str, depth: int, key: str) -> str:
        """Return the stack that a matrix is for. peft wraps the experts module once more for each
        targeted parameter, and the wrapper of the first one is innermost."""
        layer = self._layers[path]
        own = [name for name, _ in layer.module.named_parameters(recurse=False)]
        targeted = [n for n in own if self._config.targets_parameter(f"{path}.{n}")]
        if depth >= len(targeted):
            raise self._config.refused(f"it has {key}, which its target_parameters do not name")
        name = targeted[-1 - depth]
        if name not in layer.names[:2]:
            raise ConfigError(
                f"{self._config.folder} has {key}, an adapter of {name}, the biases of experts, "
                "which is not supported; merge this adapter with peft"
            )
        return f"{path}.{name}"

    def _add_to_one(self, module: str, field: str, key: str) -> bool:
        """Note a matrix of one expert, which was a module in earlier transformers; return False if
        it is not one."""
        name, pattern = self._rename(f"{module}.weight")[0]
        if pattern is None or name not in self._stacks:
            return False
        converter, n_experts = self._converters[pattern], self._stacks[name].n_experts
        if not Sources(converter).merges:
            raise ConfigError(
                f"{self._config.folder} has {key}, an adapter of experts in the layout of earlier "
                "transformers, which is not supported for this model; merge it with peft"
            )
        expert = int(re.findall(r"\.(\d+)\.", module)[-1])
        if expert >= n_experts:
            raise self._config.refused(f"it has {key}, and each layer has {n_experts} experts")
        pieces = len(converter.source_patterns)
        piece, scale = converter.source_patterns.index(pattern), self._config.scale_of(module)
        self._note(name, ExpertPart("", "", scale, expert, piece, pieces), field, key)
        return True

    def _note(self, name: str, part: ExpertPart, field: str, key: str) -> None:
        parts = self.parts.setdefault(name, {})
        known = parts.get((part.expert, part.piece), part)
        if getattr(known, field):
            raise self._config.refused(f"two of its tensors are for {name}")
        found = replace(known, a=key) if field == "a" else replace(known, b=key)
        parts[part.expert, part.piece] = found

    def check(self) -> None:
        """Raise if a tensor is missing, or is of another model."""
        for name, parts in self.parts.items():
            self._check_shapes(name, parts)
            pieces = {piece for _, piece in parts}
            whole = any(expert is None for expert, _ in parts)
            if not whole and len(parts) < len(pieces) * self._stacks[name].n_experts:
                raise self._config.refused(f"it has nothing for some of the experts of {name}")
        for name in self._stacks:
            if self._config.targets_parameter(name) and name not in self.parts:
                raise self._config.refused(
                    f"it has nothing for {name}, which its target_parameters name"
                )
        # an adapter of a model with fewer layers would change a part of this one
        adapted = {name.rpartition(".")[0] for name in self.parts}
        for path in sorted(self._layers.keys() - adapted) if adapted else ():
            raise self._config.refused(f"it changes other experts, and has nothing for {path}")

    def _check_shapes(self, name: str, parts: Mapping[tuple[int | None, int], ExpertPart]) -> None:
        layer = self._stacks[name]
        shape = layer.shape
        is_out = name.endswith(layer.names[1])
        rows, columns = (
            (shape.d_model, shape.d_hidden) if is_out else (shape.in_rows, shape.d_model)
        )
        for (expert, _), part in parts.items():
            if not part.a or not part.b:
                raise self._config.refused(f"it has {part.a or part.b} without the other matrix")
            specs = self._reader.specs
            rank = layer.n_experts * self._config.rank_of(name)
            if expert is not None:
                rank = specs[part.a].shape[0] if specs[part.a].shape else 0
            for key, expected in ((part.a, (rank, columns)), (part.b, (rows // part.pieces, rank))):
                if specs[key].shape != expected:
                    raise self._config.refused(
                        f"{key} has the shape {list(specs[key].shape)}; for {name} of this model "
                        f"and its ranks it would be {list(expected)}"
                    )

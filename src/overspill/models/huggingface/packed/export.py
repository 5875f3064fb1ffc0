"""Quantized checkpoints, which transformers and vLLM open: experts are packed, the rest is copied.

int4 and MXFP4 have the layout of compressed-tensors, FP8 the layout of DeepSeek-V3 and Qwen3, and a
gpt-oss in MXFP4 has its own.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overspill.compute.packed_matrix import PackedMatrix
from overspill.core.errors import CheckpointError, ConfigError
from overspill.core.experts import ExpertId
from overspill.core.json_text import parse_json
from overspill.core.packing import QUANTIZATIONS, Kind
from overspill.models.huggingface.checks import CONFIG, INDEX
from overspill.models.huggingface.conversion import renamer
from overspill.models.huggingface.packed.quantized import (
    check_plain,
    check_quantization,
    quantize_matrix,
    quantized_format,
)
from overspill.models.huggingface.packed.tensor import PackedTensor
from overspill.models.huggingface.recipes import Recipes
from overspill.tiers.safetensors_stream import StreamWriter, TensorSpec
from overspill.transfer.requests import run_all

_log = logging.getLogger("overspill")

_WRITERS = 4
"""Threads that pack matrices."""
_PIECE_BYTES = 256 << 20
_NAMES = {
    Kind.INTEGERS: {"codes": ".weight_packed", "scales": ".weight_scale", "size": ".weight_shape"},
    Kind.E2M1: {"codes": ".weight_packed", "scales": ".weight_scale"},
    Kind.E4M3: {"codes": ".weight", "scales": ".weight_scale_inv"},
    Kind.MXFP4_STACK: {"codes": "_blocks", "scales": "_scales"},
}
"""Ends of the names of stored tensors, by the fields of `Parts`."""
_PROJECTIONS = {0: ("gate_proj", "up_proj"), 1: ("down_proj",)}
"""Names of the matrices of an expert that is not in a stack, by the number of its tensor."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class _Matrix:
    """Matrix to pack: some rows of a stored tensor."""

    key: str
    begin: int
    """Position of the first element."""
    rows: int
    columns: int
    packing: PackedMatrix
    base: str
    """Start of the names of the packed tensors, before the ends of `_NAMES`."""
    number: int
    """Number of the matrix in the packed tensors, if they are stacks."""


class QuantizedFiles:
    """Files of a quantized checkpoint. All their tensors are known before one is written."""

    def __init__(self, recipes: Recipes, name: str, files: Mapping[str, Sequence[str]]) -> None:
        """`files` are the tensors of each file of the plain checkpoint. Raises if there is no
        layout for the experts that others read."""
        check_quantization(name)
        check_plain(recipes.folder, recipes.folder.specs, f"--quantize {name}")
        self._recipes, self._tensors, self._name = recipes, recipes.folder, name
        self._format = quantized_format(recipes, name)
        self._kind = next(p.matrix.scheme.kind for p in self._format.pieces if p.matrix is not None)
        self._check_layout()
        file_of = {key: file for file, keys in files.items() for key in keys}
        self._matrices: dict[str, list[_Matrix]] = {file: [] for file in files}
        experts: set[str] = set()
        for matrix in self._find():
            self._matrices[file_of[matrix.key]].append(matrix)
            experts.add(matrix.key)
        self._copied = {f: [k for k in keys if k not in experts] for f, keys in files.items()}
        self._ignored = self._dense_modules(experts)
        self.specs = {file: self._specs_of(file) for file in files}
        """Tensors of each file."""
        self._check_readable()

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for specs in self.specs.values() for spec in specs.values())

    def write(self, out: Path, progress: Progress) -> None:
        """Write all files, and change the config that is in the folder `out` already."""
        total, done = self.nbytes, 0
        for file, specs in self.specs.items():
            (out / file).parent.mkdir(parents=True, exist_ok=True)
            with StreamWriter(out / file, specs, {"format": "pt"}) as writer:

                def write(matrix: _Matrix, writer: StreamWriter = writer) -> None:
                    self._write_matrix(writer, matrix)

                run_all(write, self._matrices[file], _WRITERS)
                for key in self._copied[file]:
                    self._copy(writer, key)
            done += sum(spec.nbytes for spec in specs.values())
            progress("quantizing", done, total)
        self._write_index(out)
        config = parse_json((out / CONFIG).read_bytes())
        config["quantization_config"] = self._config()
        (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    # -- matrices to pack --------------------------------------------------------------------------

    def _check_layout(self) -> None:
        recipes, shape = self._recipes, self._recipes.layers[0].shape
        family = recipes.model.config.model_type
        if family == "gpt_oss" and self._kind is not Kind.MXFP4_STACK:
            raise ConfigError(
                f"--quantize {self._name}: other programs read gpt-oss in MXFP4 only; give "
                f"--quantize mxfp4, or load the checkpoint with quantize={self._name!r}"
            )
        if recipes.converted is not None or (shape.transposed and family != "gpt_oss"):
            raise self._no_layout(f"{family} has experts in a layout of its own")
        if self._kind is Kind.E4M3 and any(
            size % 128 for p in self._format.pieces if p.matrix for size in p.matrix.shape
        ):
            _log.warning(
                "matrices of experts are not multiples of 128x128: Overspill reads partial blocks, "
                "transformers and vLLM do not"
            )

    def _no_layout(self, reason: str) -> ConfigError:
        return ConfigError(
            f"--quantize {self._name}: {reason}, for which there is no quantized form that "
            "transformers reads; load the checkpoint with "
            f"quantize={self._name!r} (--quantize) instead"
        )

    def _find(self) -> Iterator[_Matrix]:
        """Return all matrices of experts."""
        for layer, experts in enumerate(self._recipes.layers):
            for index in range(experts.n_experts):
                pieces = [piece for piece in self._format.pieces if piece.matrix is not None]
                for tensor, key, number in self._recipes.stored(ExpertId(layer, index)):
                    if tensor > 1:  # a bias
                        continue
                    stack = len(self._tensors.specs[key].shape) > 2
                    own = [piece for piece in pieces if piece.tensor == tensor]
                    chosen = own if stack else own[:1]
                    if not stack:
                        pieces.remove(own[0])
                    yield from self._pieces_of(key, number, index, stack, chosen)

    def _pieces_of(
        self, key: str, number: int, index: int, stack: bool, pieces: Sequence[Any]
    ) -> Iterator[_Matrix]:
        """Return the matrices in one stored tensor, or in one expert of a stack."""
        shape = self._tensors.specs[key].shape[-2:]
        begin = number * shape[0] * shape[1]
        rows = shape[0] // len(pieces)
        for place, piece in enumerate(pieces):
            if not stack:
                base, number = key.removesuffix(".weight"), 0
            elif self._kind is Kind.MXFP4_STACK:
                base = key
            else:
                names = _PROJECTIONS[piece.tensor][-len(pieces) :]
                base, number = f"{key.rpartition('.')[0]}.{index}.{names[place]}", 0
            first = begin + place * rows * shape[1]
            yield _Matrix(key, first, rows, shape[1], piece.matrix, base, number)

    def _specs_of(self, file: str) -> dict[str, TensorSpec]:
        specs = {key: self._tensors.specs[key] for key in self._copied[file]}
        for matrix in self._matrices[file]:
            stack = self._tensors.specs[matrix.key].shape[:1]
            for name, spec in self._parts_of(matrix.packing).items():
                stacked = self._kind is Kind.MXFP4_STACK
                specs[matrix.base + name] = (
                    TensorSpec(spec.dtype, (*stack, *spec.shape)) if stacked else spec
                )
        return specs

    def _parts_of(self, packing: PackedMatrix) -> dict[str, TensorSpec]:
        """Return the stored tensors of a matrix, by the ends of their names."""
        piece = next(p for p in self._format.pieces if p.matrix == packing)
        parts = {f: TensorSpec(each.dtype, each.shape) for f, each in piece.stored.items()}
        parts["size"] = TensorSpec(torch.int64, (2,))
        return {end: parts[field] for field, end in _NAMES[self._kind].items()}

    def _check_readable(self) -> None:
        """Raise if the family has no rule for experts that are not in a stack."""
        packed = {m.base: m for each in self._matrices.values() for m in each}
        if self._kind is Kind.MXFP4_STACK or not any(
            len(self._tensors.specs[matrix.key].shape) > 2 for matrix in packed.values()
        ):
            return
        copied = [key for keys in self._copied.values() for key in keys]
        specs = {key: self._tensors.specs[key] for key in copied}
        specs |= {
            f"{base}.weight": TensorSpec(torch.float32, (m.rows, m.columns))
            for base, m in packed.items()
        }
        written = _Written(self._tensors.folder, specs)
        try:
            Recipes(self._recipes.model, self._recipes.layers, written)
        except CheckpointError as error:
            family = self._recipes.model.config.model_type
            raise self._no_layout(f"{family} has stacks of experts") from error

    # -- config -----------------------------------------------------------------------------------

    def _dense_modules(self, experts: set[str]) -> list[str]:
        """Return the modules with a matrix that stays plain, by their names in the checkpoint and
        in the model of transformers."""
        model, specs = self._recipes.model, self._tensors.specs
        rename, _ = renamer(model, set())
        modules = dict(model.named_modules())
        found: dict[str, None] = {"lm_head": None}
        for key in specs:
            if key in experts or not key.endswith(".weight") or len(specs[key].shape) != 2:
                continue
            names = [target.removesuffix(".weight") for target, _ in rename(key)]
            if not any(isinstance(modules.get(name), nn.Embedding) for name in names):
                found |= dict.fromkeys([key.removesuffix(".weight"), *names])
        return list(found)

    def _config(self) -> dict[str, Any]:
        """Return the `quantization_config`."""
        match self._kind:
            case Kind.MXFP4_STACK:
                return {"quant_method": "mxfp4", "modules_to_not_convert": self._ignored}
            case Kind.E4M3:
                return {
                    "quant_method": "fp8",
                    "fmt": "e4m3",
                    "activation_scheme": "dynamic",
                    "weight_block_size": list(QUANTIZATIONS[self._name].block),
                    "modules_to_not_convert": self._ignored,
                }
        integers = self._kind is Kind.INTEGERS
        layout = "pack-quantized" if integers else "mxfp4-pack-quantized"
        weights: dict[str, Any] = {
            "num_bits": 4,
            "type": "int" if integers else "float",
            "symmetric": True,
            "strategy": "group",
            "group_size": 32,
            "dynamic": False,
        }
        if not integers:
            weights["scale_dtype"] = "torch.uint8"
        group = {"targets": ["Linear"], "weights": weights, "format": layout}
        return {
            "quant_method": "compressed-tensors",
            "format": layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": self._ignored,
        }

    # -- writing ----------------------------------------------------------------------------------

    def _write_matrix(self, writer: StreamWriter, matrix: _Matrix) -> None:
        plain = torch.empty(matrix.rows, matrix.columns)
        self._tensors.read(matrix.key, matrix.begin, plain)
        parts = quantize_matrix(plain, matrix.packing, matrix.key)
        for field, end in _NAMES[self._kind].items():
            part = getattr(parts, field)
            writer.write_piece(matrix.base + end, matrix.number * part.numel(), part)

    def _copy(self, writer: StreamWriter, key: str) -> None:
        spec = self._tensors.specs[key]
        most = _PIECE_BYTES // spec.dtype.itemsize
        for begin in range(0, spec.numel, most):
            piece = torch.empty(min(most, spec.numel - begin), dtype=spec.dtype)
            self._tensors.read(key, begin, piece)
            writer.write_piece(key, begin, piece)

    def _write_index(self, out: Path) -> None:
        (out / INDEX).unlink(missing_ok=True)
        if len(self.specs) > 1:
            files = {name: file for file, specs in self.specs.items() for name in specs}
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": files}
            (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class _Written:
    """Tensors that a reader of the quantized checkpoint will find."""

    def __init__(self, folder: Path, specs: dict[str, TensorSpec]) -> None:
        self.folder, self.specs = folder, specs
        self.packed: dict[str, PackedTensor] = {}

    def read(self, name: str, offset: int, out: torch.Tensor) -> None:
        raise AssertionError("nothing is written yet")

"""Finds the packed weights among the tensors of a checkpoint, and checks that they are complete."""

from collections.abc import Mapping
from pathlib import Path

import torch

from overspill.compute.packed_matrix import PackedMatrix
from overspill.core.errors import CheckpointError
from overspill.core.packing import Kind, Scheme
from overspill.models.huggingface.packed.config import Packing
from overspill.models.huggingface.packed.tensor import PackedTensor
from overspill.tiers.safetensors_stream import TensorSpec

_BYTES = (torch.uint8, torch.int8)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_POWERS = (torch.uint8, torch.float8_e8m0fnu)
_PARTS = (
    "_blocks", "_scales", "_scale_inv", ".weight_scale", ".weight_scale_2", ".weight_packed",
    ".weight_global_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx", ".qweight",
    ".qzeros", ".g_idx", ".scales",
)  # fmt: skip
"""Ends of names of parts of packed weights."""
_ACTIVATIONS = (
    ".input_scale", ".activation_scale", ".input_global_scale", ".output_scale", ".q_scale",
    ".k_scale", ".v_scale",
)  # fmt: skip
_ROTATED = (".pre_quant_scale", ".channel_scale", ".smooth_scale")
_AGAIN = "download it again, or give the checkpoint in bf16"


def find_packed(
    folder: Path, specs: Mapping[str, TensorSpec], packing: Packing | None
) -> dict[str, PackedTensor]:
    """Return the packed weights by the names of the plain weights. Raises if the tensors do not
    agree with `packing`, which was read from config.json."""
    finder = _Finder(folder, specs, packing)
    found = {} if packing is None else finder.find(packing)
    finder.check_rest(found)
    if packing is not None and not found:
        raise CheckpointError(
            f"{folder}: config.json says that weights are quantized ({packing.method}), but none "
            "is; remove quantization_config from it, or download the checkpoint again"
        )
    return found


def is_for_activations(name: str, spec: TensorSpec) -> bool:
    """Return whether a tensor of a packed checkpoint is a scale for quantizing activations, keys or
    values."""
    return spec.numel == 1 and name.endswith(_ACTIVATIONS)


class _Mismatch(Exception):
    """Reason why a tensor is not packed in a certain way."""


class _Finder:
    """Finds the parts of each packed weight by their names, types and shapes."""

    def __init__(
        self, folder: Path, specs: Mapping[str, TensorSpec], packing: Packing | None
    ) -> None:
        self._folder, self._specs, self._packing = folder, specs, packing

    def find(self, packing: Packing) -> dict[str, PackedTensor]:
        found: dict[str, PackedTensor] = {}
        for name in self._specs:
            if name.endswith(_ROTATED):
                raise self._wrong(f"{name} changes the inputs of a layer, which is not supported")
            kind = self._kind(name)
            if kind is None:
                continue
            packed = self._match(name, kind, packing)
            if packed.name in found or (packed.name in self._specs and packed.name != name):
                raise self._wrong(f"there are two tensors for {packed.name}: {name} is one of them")
            found[packed.name] = packed
        return found

    def check_rest(self, found: Mapping[str, PackedTensor]) -> None:
        """Raise if a tensor is a part of a packed weight that was not found."""
        used = {part for packed in found.values() for part in packed.parts.values()}
        for name, dtype in ((n, spec.dtype) for n, spec in self._specs.items() if n not in used):
            if dtype.is_floating_point and dtype.itemsize == 1:
                method = "no quantization_config"
                if self._packing is not None:
                    method = f"the quantization method {self._packing.method}"
                raise self._wrong(
                    f"{name} is {_type(dtype)}, and config.json names {method} for it"
                )
            codes = name.endswith("weight") and dtype in (*_BYTES, torch.int32)
            if self._packing is not None and (codes or name.endswith(_PARTS)):
                raise self._wrong(f"{name} belongs to no packed weight")

    def _kind(self, name: str) -> Kind | None:
        """Return the kind of the codes in tensor `name`; None if it has no codes."""
        dtype = self._specs[name].dtype
        if name.endswith("_blocks") and dtype == torch.uint8:
            return Kind.MXFP4_STACK
        if name.endswith(".weight_packed"):
            return Kind.INTEGERS if dtype == torch.int32 else Kind.E2M1
        if name.endswith(".qweight"):
            gptq = any(scheme.kind is Kind.GPTQ for scheme in self._schemes())
            return Kind.GPTQ if gptq else Kind.AWQ
        if name.endswith(_PARTS) or self._scales_of(name) is None:
            return None
        if dtype == torch.float8_e4m3fn:
            return Kind.E4M3
        if dtype == torch.int8 and any(scheme.kind is Kind.INT8 for scheme in self._schemes()):
            return Kind.INT8
        return Kind.E2M1 if dtype in _BYTES else None

    def _schemes(self) -> tuple[Scheme, ...]:
        return () if self._packing is None else self._packing.schemes

    def _match(self, name: str, kind: Kind, packing: Packing) -> PackedTensor:
        """Return the packed weight with these codes, in the first scheme that fits."""
        reason = f"config.json names the quantization method {packing.method} without such weights"
        for scheme in packing.schemes:
            if scheme.kind is kind:
                try:
                    return self._assemble(name, scheme)
                except _Mismatch as error:
                    reason = str(error)
        raise self._wrong(f"{name} has {kind}, but {reason}")

    def _assemble(self, name: str, scheme: Scheme) -> PackedTensor:
        """Return the packed weight with these codes. Raises `_Mismatch` if parts are missing or
        have other shapes."""
        shape = self._specs[name].shape
        base = name.rpartition(".")[0]
        match scheme.kind:
            case Kind.MXFP4_STACK:
                if len(shape) != 4 or shape[3] != 16:
                    raise _Mismatch(f"its shape is {list(shape)}, not [experts, rows, groups, 16]")
                plain = name.removesuffix("_blocks")
                matrix = PackedMatrix(scheme, shape[1], 32 * shape[2])
                parts = {"codes": name, "scales": f"{plain}_scales"}
                packed = PackedTensor(plain, matrix, shape[:1], parts)
            case Kind.GPTQ | Kind.AWQ:
                packed = self._qweight(name, base, scheme)
            case Kind.INTEGERS:
                rows, words = self._matrix(name)
                plain = f"{base}.weight"
                parts = {"codes": name, "scales": f"{plain}_scale"} | self._present(
                    zeros=f"{plain}_zero_point", indices=f"{plain}_g_idx", size=f"{plain}_shape"
                )
                matrix = PackedMatrix(scheme, rows, words * 32 // scheme.bits)
                packed = PackedTensor(plain, matrix, (), parts)
            case _:
                packed = self._scaled(name, base, scheme)
        self._check(packed)
        return packed

    def _qweight(self, name: str, base: str, scheme: Scheme) -> PackedTensor:
        """Return a weight of GPTQ or AWQ, which have inputs as rows."""
        first, second = self._matrix(name)
        each = 32 // scheme.bits
        gptq = scheme.kind is Kind.GPTQ
        columns, rows = (first * each, second) if gptq else (first, second * each)
        zeros = f"{base}.qzeros"
        if zeros not in self._specs:
            raise _Mismatch(f"{zeros} is missing")
        parts = {"codes": name, "scales": f"{base}.scales", "zeros": zeros}
        parts |= self._present(indices=f"{base}.g_idx")
        return PackedTensor(f"{base}.weight", PackedMatrix(scheme, rows, columns), (), parts)

    def _scaled(self, name: str, base: str, scheme: Scheme) -> PackedTensor:
        """Return a weight with codes in rows and scales beside them; a byte has two codes of
        e2m1."""
        *stack, rows, columns = self._specs[name].shape if self._specs[name].shape else (0, 0)
        if len(stack) > 1 or rows == 0:
            raise _Mismatch(f"its shape is {list(self._specs[name].shape)}")
        plain = f"{base}.weight" if name.endswith(".weight_packed") else name
        scales = self._scales_of(name)
        if scales is None:
            raise _Mismatch(f"{plain}_scale is missing")
        multiplied = f"{plain}_scale_2" in self._specs
        factor = f"{plain}_scale_2" if multiplied else f"{plain}_global_scale"
        parts = {"codes": name, "scales": scales}
        parts |= self._present(factor=factor, zeros=f"{plain}_zero_point")
        columns *= 2 if scheme.kind is Kind.E2M1 else 1
        divides = "factor" in parts and not multiplied
        matrix = PackedMatrix(scheme, rows, columns, divides)
        return PackedTensor(plain, matrix, tuple(stack), parts)

    def _scales_of(self, name: str) -> str | None:
        """Return the name of the scales of codes that are named like the plain weight."""
        plain = name.removesuffix("_packed")
        module = plain.removesuffix(".weight")
        names = (f"{plain}_scale_inv", f"{plain}_scale", f"{module}.scale")
        return next((each for each in names if each in self._specs and each != name), None)

    def _check(self, packed: PackedTensor) -> None:
        """Raise `_Mismatch` if parts are missing, or have other types or shapes."""
        parts, matrix = packed.parts, packed.matrix
        if parts["scales"] not in self._specs:
            raise _Mismatch(f"{parts['scales']} is missing")
        row_block, group = matrix.scheme.block
        if group is not None and row_block == 1 and matrix.columns % group:
            raise _Mismatch(
                f"its {matrix.columns} columns cannot be divided into groups of {group}"
            )
        rows = -(-matrix.rows // (row_block or matrix.rows))
        groups = -(-matrix.columns // (group or matrix.columns))
        transposed = matrix.scheme.kind in (Kind.GPTQ, Kind.AWQ)
        self._check_shape(parts["scales"], packed, (groups, rows) if transposed else (rows, groups))
        dtype, has_factor = self._specs[parts["scales"]].dtype, "factor" in parts
        if dtype not in _scale_types(matrix.scheme.kind, has_factor):
            missing = dtype == torch.float8_e4m3fn and not has_factor
            raise _Mismatch(
                f"{parts['scales']} is {_type(dtype)}"
                + (f", and {packed.name}_scale_2 is missing" if missing else "")
            )
        if has_factor:
            self._check_shape(parts["factor"], packed, (1, 1))
        if "zeros" in parts:
            self._check_zeros(packed, parts["zeros"], rows, groups)
        for part, shape in (("indices", (matrix.columns,)), ("size", (2,))):
            if part in parts and self._specs[parts[part]].shape != shape:
                there = list(self._specs[parts[part]].shape)
                raise _Mismatch(f"{parts[part]} has the shape {there}")

    def _check_zeros(self, packed: PackedTensor, zeros: str, rows: int, groups: int) -> None:
        scheme, dtype = packed.matrix.scheme, self._specs[zeros].dtype
        each = 32 // scheme.bits
        if dtype != torch.int32:
            self._check_shape(zeros, packed, (rows, groups))
        elif scheme.kind is Kind.INTEGERS:
            self._check_shape(zeros, packed, (-(-rows // each), groups))
        else:
            self._check_shape(zeros, packed, (groups, -(-rows // each)))

    def _check_shape(self, name: str, packed: PackedTensor, matrix: tuple[int, int]) -> None:
        """Raise unless a tensor has this shape, with or without dimensions of one."""
        shape, expected = self._specs[name].shape, (*packed.stack, *matrix)
        stacked = shape[: len(packed.stack)] == packed.stack
        if not stacked or _squeezed(shape) != _squeezed(expected):
            raise _Mismatch(
                f"{name} has the shape {list(shape)}, config.json says {list(expected)}"
            )

    def _matrix(self, name: str) -> tuple[int, int]:
        spec = self._specs[name]
        if len(spec.shape) != 2 or spec.dtype != torch.int32 or spec.numel == 0:
            raise _Mismatch(f"it is {_type(spec.dtype)} of the shape {list(spec.shape)}")
        return spec.shape[0], spec.shape[1]

    def _present(self, **names: str) -> dict[str, str]:
        """Return the parts that the checkpoint has."""
        return {part: name for part, name in names.items() if name in self._specs}

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._folder}: {what}; {_AGAIN}")


def _scale_types(kind: Kind, has_factor: bool) -> tuple[torch.dtype, ...]:
    match kind:
        case Kind.E2M1 if has_factor:
            return (torch.float8_e4m3fn,)
        case Kind.E2M1 | Kind.MXFP4_STACK:
            return _POWERS
        case Kind.E4M3:
            return (*_FLOATS, *_POWERS)
    return _FLOATS


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Makes Triton's interpreter faster: it computes the same, and looks up less."""

import dataclasses
import functools
import inspect
from types import NoneType
from typing import Any

import numpy as np
import pytest
import torch
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def remember_lookups() -> None:
    """At every call of a function of a kernel the interpreter goes through all members of Triton's
    language and replaces them, and at every operation it builds tables of dtypes, types of blocks
    and their shapes, and blocks of constants: together five sixths of its time. Members are
    replaced once and for all; types, shapes and constants are made once."""
    names = ("_LangPatchScope", "_get_np_dtype", "_patch_builtin", "_patch_lang")
    parts = ("_unwrap_if_constexpr", "block_type", "constexpr", "tensor", "tuple")
    known = [(interpreter, name) for name in names] + [(tl.core, name) for name in parts]
    if not all(hasattr(module, name) for module, name in known):
        return  # another version of Triton
    find_dtype, replace = interpreter._get_np_dtype, interpreter._patch_lang
    known_dtype = functools.cache(find_dtype)
    replaced: set[int] = set()  # the modules of functions whose names were

    def replace_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module not in replaced:
            replaced.add(module)
            replace(function)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._get_np_dtype = lambda dtype: (
        known_dtype(dtype) if type(dtype) is tl.dtype else find_dtype(dtype)
    )
    interpreter._patch_builtin = _replace_builtins
    interpreter._patch_lang = replace_once
    _remember_types()
    _remember_constants()
    _check_types_fast()


def without_overflow_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of much more than kernels: the tests of each kernel check that no sum or product of
    integers exceeds its type, which takes a quarter of the time."""
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)


def with_nearest_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds float32 to bf16 as a GPU does: the interpreter cuts values off."""
    convert = interpreter._convert_float

    def convert_nearest(values: Any, kind: Any, to: Any, mode: Any) -> Any:
        if kind != tl.float32 or to != tl.bfloat16:
            return convert(values, kind, to, mode)
        rounded = torch.from_numpy(np.array(values, np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", convert_nearest)


@functools.cache
def _builtins(owner: Any) -> list[tuple[str, Any, Any]]:
    """Their names, and what they are replaced with."""
    members = inspect.getmembers(owner)
    return [(name, each, _interpreted(each)) for name, each in members if tl.core.is_builtin(each)]


def _interpreted(builtin: Any) -> Any:
    function = getattr(builtin, "__wrapped__", builtin)  # without a check that the next line meets

    def call(*args: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **options)

    return call


def _replace_builtins(owner: Any, builder: Any, scope: Any) -> None:
    for name, builtin, interpreted in _builtins(owner):
        if getattr(owner, name) is builtin:  # not replaced by the function that calls this one
            scope.set_attr(owner, name, interpreted)


def _remember_types() -> None:
    """The type of a block is made once for each dtype and shape, and the shape of tensors too."""
    core = tl.core
    new_block, new_tensor = core.block_type.__init__, core.tensor.__init__
    unwrap, types = core._unwrap_if_constexpr, (core.dtype, core.block_type, core.pointer_type)
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    plain = frozenset((int, float, bool, str, NoneType, core.tensor, *types))

    def unwrap_fast(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    def known_block(cls: Any, element_ty: Any, shape: Any) -> Any:
        blocks = element_ty.__dict__.setdefault("_blocks", {})
        sizes = tuple(map(unwrap_fast, shape))
        if sizes not in blocks:
            blocks[sizes] = object.__new__(cls)
        return blocks[sizes]

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        if not self.__dict__:
            new_block(self, element_ty, shape)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__
        if "_shape" not in known:
            sizes = tuple(type.shape) if type.is_block() else ()
            if sizes not in shapes:
                new_tensor(self, handle, type)
                shapes[sizes] = self.shape, self.numel
            known["_shape"] = shapes[sizes]
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known["_shape"]

    core._unwrap_if_constexpr = unwrap_fast
    core.block_type.__new__ = known_block
    core.block_type.__init__ = block
    core.block_type.to_ir = lambda self, builder: self
    core.tensor.__init__ = tensor


def _remember_constants() -> None:
    """Constants, also as blocks. Most other operations are on tensors of the same shape, which need
    no broadcast."""
    broadcast, make = TritonSemantic.broadcast_impl_value, TritonSemantic.scalar_constant
    constants: dict[tuple[Any, ...], Any] = {}

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        key = type(value), value, dtype
        if key not in constants:
            constants[key] = made = make(self, value, dtype)
            made.handle.data.flags.writeable = False
            made.blocks = {}
        return constants[key]

    def broadcast_if_needed(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        blocks = rhs.__dict__.get("blocks")
        if blocks is None or not lhs.shape:
            return broadcast(self, lhs, rhs)
        shape = lhs.type.shape
        if shape not in blocks:
            blocks[shape] = made = broadcast(self, lhs, rhs)[1]
            made.handle.data.flags.writeable = False
        return lhs, blocks[shape]

    TritonSemantic.scalar_constant = constant
    TritonSemantic.broadcast_impl_value = broadcast_if_needed


def _check_types_fast() -> None:
    """Most operations are on two tensors of the same dtype, on a tensor and a number that fits it,
    or on a pointer and an offset. They need no cast; the others are left to Triton."""
    check, tensor = TritonSemantic.binary_op_type_checking_impl, tl.core.tensor
    limits = {id(tl.int32): 2**31, id(tl.int64): 2**63}
    whole = frozenset(limits)
    same = whole | {id(tl.float32)}

    def fits(number: Any, dtype: Any) -> bool:
        if type(number) is int and id(dtype) in whole:
            return -limits[id(dtype)] <= number < limits[id(dtype)]
        return dtype is tl.float32 and type(number) in (int, float)

    def check_fast(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if arithmetic_check and type(lhs) is tensor:
            mine = lhs.dtype
            if type(rhs) is not tensor:
                if fits(rhs, mine):
                    return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, mine))
            elif (mine is rhs.dtype and id(mine) in same) or (
                allow_lhs_ptr and mine.is_ptr() and id(rhs.dtype) in whole
            ):
                return self.broadcast_impl_value(lhs, rhs)
        options = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        return check(self, lhs, rhs, *options)

    TritonSemantic.binary_op_type_checking_impl = check_fast

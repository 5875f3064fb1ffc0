"""Makes Triton's interpreter faster: it computes the same, and looks up less."""

import dataclasses
import functools
import inspect
from typing import Any

import pytest
from triton import language as tl
from triton.runtime import interpreter


def remember_lookups() -> None:
    """At every call of a function of a kernel the interpreter goes through all members of Triton's
    language and replaces them, and at every operation it builds a table of dtypes: together half
    of its time. Members are listed once, and replaced once in each run of a kernel."""
    names = ("GridExecutor", "_get_np_dtype", "_patch_attr", "_patch_builtin", "_patch_lang")
    if not all(hasattr(interpreter, name) for name in names):
        return  # another version of Triton
    find_dtype, replace = interpreter._get_np_dtype, interpreter._patch_lang
    execute = interpreter.GridExecutor.__call__
    known_dtype = functools.cache(find_dtype)
    replaced: set[int] = set()  # the modules of functions whose names were, in this run

    def run(*args: Any, **options: Any) -> None:
        replaced.clear()
        execute(*args, **options)

    def replace_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in replaced:
            return None
        replaced.add(module)
        return replace(function)

    interpreter._get_np_dtype = lambda dtype: (
        known_dtype(dtype) if type(dtype) is tl.dtype else find_dtype(dtype)
    )
    interpreter._patch_builtin = _replace_builtins
    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = run


def without_overflow_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of much more than kernels: the tests of each kernel check that no sum or product of
    integers exceeds its type, which takes a quarter of the time."""
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)


@functools.cache
def _builtins(owner: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member)]


def _replace_builtins(owner: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(owner):
        member = getattr(owner, name)
        if tl.core.is_builtin(member):  # not replaced by the function that calls this one
            interpreter._patch_attr(owner, name, member, builder, scope)

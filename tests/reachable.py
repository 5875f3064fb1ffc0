"""How much an object holds."""

import gc
import types
from collections import deque
from typing import Any

_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)


def items_held(root: Any) -> int:
    """Objects that the collector knows and that `root` reaches, and the items of all containers
    among them. Classes, modules and functions are left out: they are not its own."""
    gc.collect()
    seen: set[int] = set()
    left, count = [root], 0
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, _SHARED) or not gc.is_tracked(each):
            continue
        seen.add(id(each))
        count += 1
        if isinstance(each, dict | list | set | frozenset | tuple | deque):
            count += len(each)
        left.extend(gc.get_referents(each))
    return count

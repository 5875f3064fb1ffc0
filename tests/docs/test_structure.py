"""The modules of the package import each other in one direction only."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "src"


def modules() -> dict[str, Path]:
    names = {}
    for path in sorted((ROOT / "overspill").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imported(path: Path) -> Iterator[str]:
    """Names that a file imports, also inside of functions and for type checkers only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports(known: dict[str, Path]) -> dict[str, set[str]]:
    """The modules that each module imports. `overspill` itself only names what it offers."""
    return {
        name: {other for other in imported(path) if other in known} - {name, "overspill"}
        for name, path in known.items()
    }


def test_no_modules_import_each_other() -> None:
    graph = imports(modules())
    assert "overspill.moe.pooled_experts" in graph["overspill.moe.engine"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError("a circle of imports: " + " <- ".join(error.args[1])) from None

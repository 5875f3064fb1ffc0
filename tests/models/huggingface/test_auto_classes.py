"""Classes are registered when transformers' own modules are imported."""

import importlib
import logging
import sys
from pathlib import Path

import pytest

from overspill.models.huggingface import auto_classes


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Importable modules: `theirs_1` and `theirs_2`, followed by `ours_1` and `ours_2`. The first
    of each registers with a name that theirs has after its import; the second fails."""
    for number, ours in ((1, "import theirs_1\ntheirs_1.known.append(1)"), (2, "1 / 0")):
        (tmp_path / f"theirs_{number}.py").write_text("known = []")
        (tmp_path / f"ours_{number}.py").write_text(ours)
    monkeypatch.syspath_prepend(tmp_path)
    names = {f"theirs_{number}": f"ours_{number}" for number in (1, 2)}
    monkeypatch.setattr(auto_classes, "_REGISTERS", names)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    return [*names, *names.values()]


def test_a_class_is_registered_after_the_import_that_it_needs(
    modules: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    try:
        auto_classes.register_when_imported()
        assert not set(modules) & set(sys.modules)
        assert importlib.util.find_spec("theirs_1") is not None  # found, and not imported
        first = importlib.import_module("theirs_1")
        assert first.known == [1]
        assert "ours_2" not in sys.modules
        with caplog.at_level(logging.WARNING, "overspill"):
            assert importlib.import_module("theirs_2").known == []
        assert "cannot be loaded with this version of transformers" in caplog.text
        del sys.modules["ours_1"]
        auto_classes.register_when_imported()  # transformers is there already
        assert first.known == [1, 1]
    finally:
        for name in modules:
            sys.modules.pop(name, None)

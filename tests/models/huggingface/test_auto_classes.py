"""Classes are registered when transformers' own modules are imported."""

import importlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from overspill.models.huggingface import auto_classes


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """Importable modules; the second one registers with a name that the first one defines."""
    (tmp_path / "theirs.py").write_text("known = []")
    (tmp_path / "ours.py").write_text("import theirs\ntheirs.known.append(1)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(auto_classes, "_THEIRS", "theirs")
    monkeypatch.setattr(auto_classes, "_OURS", "ours")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield "theirs", "ours"
    for name in ("theirs", "ours"):
        sys.modules.pop(name, None)


def test_it_is_registered_after_the_import_that_it_needs(modules: tuple[str, str]) -> None:
    auto_classes.register_when_imported()
    assert not set(modules) & set(sys.modules)
    assert importlib.util.find_spec("theirs") is not None  # found, and not imported
    theirs = importlib.import_module("theirs")
    assert theirs.known == [1]
    del sys.modules["ours"]
    auto_classes.register_when_imported()  # transformers is there already
    assert theirs.known == [1, 1]


def test_a_failure_leaves_transformers_usable(
    modules: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auto_classes, "_OURS", "nowhere")
    auto_classes.register_when_imported()
    with caplog.at_level(logging.WARNING, "overspill"):
        assert importlib.import_module("theirs").known == []
    assert "cannot be loaded with this version of transformers (No module" in caplog.text


ORDERS = [
    "overspill; ",
    "transformers.models.auto.modeling_auto, overspill; ",
    # imports modeling_auto while what the model needs is half imported
    "overspill, transformers.models.switch_transformers.modeling_switch_transformers; ",
]


@pytest.mark.slow
@pytest.mark.parametrize("imports", ORDERS)
def test_transformers_knows_the_model_in_any_order_of_imports(imports: str) -> None:
    code = (
        f"import {imports}import sys; assert {'transformers' in imports} or 'torch' not in "
        "sys.modules; from transformers import AutoConfig, AutoModelForCausalLM as M; "
        "config = AutoConfig.for_model('overspill_gpt'); "
        "print(M._model_mapping[type(config)].__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("GPTMoEForCausalLM\n", "")

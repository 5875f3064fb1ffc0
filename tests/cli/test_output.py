import io
import sys

import pytest

from overspill.cli.output import show


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_gets_no_control_characters_of_a_model(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a\x1b]0;title\x07\tb\r\n\x9bc é\x7f"
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", out)
    show(text)
    safe = "a\ufffd]0;title\ufffd\tb\n\ufffdc é\ufffd"
    assert out.getvalue() == (safe if is_terminal else text)

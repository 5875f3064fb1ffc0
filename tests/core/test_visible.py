import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from overspill.core.visible import visible


def test_control_characters_are_symbols() -> None:
    assert visible("\x1b]0;title\x07\x00\r\x7f\x9b") == "␛]0;title␇␀␍␡\ufffd"


@given(st.text())
def test_everything_else_stays(text: str) -> None:
    shown = visible(text)
    assert len(shown) == len(text)
    for before, after in zip(text, shown, strict=True):
        if unicodedata.category(before) != "Cc" or before in "\n\t":
            assert after == before
        else:
            assert unicodedata.category(after) == "So"

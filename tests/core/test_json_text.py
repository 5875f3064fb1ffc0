import pytest

from overspill.core.json_text import parse_json


def test_a_byte_order_mark_is_skipped() -> None:
    text = '\ufeff{"a": "\ufeff"}'
    assert parse_json(text) == parse_json(text.encode()) == {"a": "\ufeff"}


@pytest.mark.parametrize("wrong", ["", "{", "9" * 5000, "[" * 100_000, '{"a":' * 100_000, b"\xff"])
def test_whatever_is_wrong_is_a_value_error(wrong: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"Expecting|digits|nested too deeply|'utf-8' codec"):
        parse_json(wrong)

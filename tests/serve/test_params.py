"""Sampling parameters: each invalid value has one clear error."""

from typing import Any

import pytest

from overspill import SamplingParams
from overspill.core.errors import ConfigError

INVALID: list[tuple[str, Any, str]] = [
    ("max_tokens", 0, "max_tokens=0 must be a whole number of at least 1"),
    ("max_tokens", -1, "max_tokens=-1 must be"),
    ("max_tokens", 1.5, "max_tokens=1.5 must be"),
    ("max_tokens", True, "max_tokens=True must be"),
    ("max_tokens", None, "max_tokens=None must be"),
    ("max_tokens", 2**63, "max_tokens=9223372036854775808 must be .* below 2\\*\\*63"),
    ("temperature", -0.1, "temperature=-0.1 must be a finite number of at least 0"),
    ("temperature", float("nan"), "temperature=nan must be"),
    ("temperature", float("inf"), "temperature=inf must be"),
    ("temperature", "1", "temperature='1' must be"),
    ("temperature", None, "temperature=None must be"),
    ("temperature", 10**400, "temperature=1000.* must be"),
    ("top_p", 0, "top_p=0 must be above 0 and at most 1"),
    ("top_p", 1.01, "top_p=1.01 must be"),
    ("top_p", float("nan"), "top_p=nan must be"),
    ("top_p", True, "top_p=True must be"),
    ("top_k", -1, "top_k=-1 must be a whole number of at least 0"),
    ("top_k", 0.5, "top_k=0.5 must be"),
    ("seed", "7", "seed='7' must be a whole number"),
    ("seed", 2**64, "seed=18446744073709551616 must be .* below 2\\*\\*63"),
    ("seed", -(2**63) - 1, "seed=-9223372036854775809 must be"),
    ("stop", "", "stop='' must be a string or several, none empty"),
    ("stop", ["a", ""], "stop=\\['a', ''\\] must be"),
    ("stop", ["a", 5], "stop=\\['a', 5\\] must be"),
    ("stop", 5, "stop=5 must be"),
    ("stop", b"end", "stop=b'end' must be"),
    ("stop", (text for text in "ab"), "stop=<generator.* must be"),
    ("logprobs", -1, "logprobs=-1 must be a whole number of at least 0"),
    ("logprobs", True, "logprobs=True must be"),
    ("ignore_eos", "no", "ignore_eos='no' must be True or False"),
    ("min_tokens", -1, "min_tokens=-1 must be a whole number of at least 0"),
    ("min_tokens", 65, "min_tokens=65 is more than max_tokens=64"),
    ("frequency_penalty", 2.1, "frequency_penalty=2.1 must be a number from -2 to 2"),
    ("frequency_penalty", None, "frequency_penalty=None must be"),
    ("presence_penalty", float("nan"), "presence_penalty=nan must be"),
    ("logit_bias", [1], "logit_bias=\\[1\\] must map token ids to numbers"),
    ("logit_bias", {"1": 2}, "a token id of logit_bias='1' must be a whole number"),
    ("logit_bias", {-1: 2}, "a token id of logit_bias=-1 must be"),
    ("logit_bias", {1: 101}, "logit_bias\\[1\\]=101 must be a number from -100 to 100"),
    ("logit_bias", {1: True}, "logit_bias\\[1\\]=True must be"),
    ("json_schema", "{", "json_schema is not JSON"),
    ("json_schema", "[]", "json_schema='\\[\\]' must be a JSON schema: a dictionary"),
    ("json_schema", 5, "json_schema=5 must be a JSON schema"),
    ("json_schema", {"enum": ["a" * 65_536]}, "json_schema has 65\\d+ characters; .* most 65536"),
    ("json_schema", {"a": {1}}, "json_schema is not JSON .*set is not JSON serializable"),
    ("json_schema", {"a": float("nan")}, "json_schema is not JSON .*not JSON compliant"),
]


@pytest.mark.parametrize(("name", "value", "message"), INVALID, ids=lambda value: repr(value)[:30])
def test_an_invalid_value_is_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        SamplingParams(**{name: value})


def test_limits_are_valid() -> None:
    lowest = SamplingParams(max_tokens=1, temperature=0, top_p=1, top_k=0, seed=-(2**63))
    assert lowest.seed == -(2**63)
    highest = SamplingParams(temperature=1e-300, top_p=1e-300, seed=2**63 - 1, stop=[], logprobs=0)
    assert highest.seed == 2**63 - 1


def test_stop_strings_are_one_or_several() -> None:
    assert SamplingParams().stops == ()
    assert SamplingParams(stop="ab").stops == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stops == SamplingParams(stop=("a", "b")).stops


def test_json_needs_no_least_number_of_tokens() -> None:
    with pytest.raises(ConfigError, match="min_tokens and json_schema exclude each other"):
        SamplingParams(min_tokens=1, json_schema={})

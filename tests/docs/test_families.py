"""docs/families.md lists the families that the tests cover and those that are refused.

After a change to the families: `make tables`, or `python -m tests.docs.test_families --write`.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch

from tests.models.huggingface.families import FAMILIES, LIKE, UNEVEN, Family, cases
from tests.models.huggingface.refused import REFUSED
from tests.models.huggingface.test_exactness import SUPPORTED, UNSUPPORTED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"

# Notes about the layout of expert tensors. These can be detected from a module.
LAYOUT = ("no gate", "own gate", "transposed", "biases", "gate and up interleaved")
MODULE_PER_EXPERT = "a module per expert"


def page(text: str) -> str:
    """`text` with new tables. They do not depend on the version of transformers."""
    text = _between("families", supported_table(SUPPORTED), text)
    return _between("refused", refused_table(), text)


def supported_table(families: Iterable[Family]) -> str:
    rows = [
        (
            f"`{family.name}`",
            family.since,
            family.auto.removeprefix("AutoModelFor"),
            ", ".join(_layout(family)) or "usual",
            ", ".join(note for note in _notes(family) if note not in _layout(family)),
        )
        for family in sorted(families, key=lambda family: family.name)
    ]
    head = ("model type", "transformers", "tested as", "experts", "other features")
    return f"{len(rows)} families.\n\n" + _table(head, rows)


def refused_table() -> str:
    named = [(family, f"outside the interface: {family.notes}") for family in REFUSED]
    named += [(family, "layers with experts of different shapes") for family in UNEVEN]
    named += [
        (family, "a norm after each expert") for family in FAMILIES if family.name in UNSUPPORTED
    ]
    rows = [
        (f"`{family.name}`", _versions(family), why)
        for family, why in sorted(named, key=lambda one: one[0].name)
    ]
    return _table(("model type", "transformers", "why"), rows)


def _notes(family: Family) -> list[str]:
    return family.notes.split(", ") if family.notes else []


def _layout(family: Family) -> list[str]:
    return [note for note in _notes(family) if note in (*LAYOUT, MODULE_PER_EXPERT)]


def _versions(family: Family) -> str:
    return family.since if family.until == "6" else f"before {family.until}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def _between(name: str, table: str, text: str) -> str:
    marks = re.compile(rf"(<!-- {name} start -->\n).*?(<!-- {name} end -->)", re.DOTALL)
    made, count = marks.subn(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", text)
    assert count == 1, f"{PAGE.name} needs <!-- {name} start --> and <!-- {name} end -->, once"
    return made


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "docs/families.md is out of date; run `make tables`"


def test_the_tables_name_every_family_of_the_tests_once() -> None:
    supported = re.findall(r"^\| `([^`]+)`", supported_table(SUPPORTED), re.MULTILINE)
    refused = re.findall(r"^\| `([^`]+)`", refused_table(), re.MULTILINE)
    assert len(supported) == len(set(supported)) >= 20
    assert {*supported, *refused} == {f.name for f in (*FAMILIES, *UNEVEN, *REFUSED)}
    # a family is in both only where versions differ
    both = {family.name for family in REFUSED if family.until != "6"}
    assert set(supported) & set(refused) == both


def test_families_that_are_tested_less_have_the_layout_of_another() -> None:
    layouts = {family.name: _layout(family) for family in SUPPORTED}
    assert not {*LIKE} & {*LIKE.values()}
    assert all(layouts[name] == layouts[like] for name, like in LIKE.items())


@pytest.mark.parametrize("family", cases(SUPPORTED))
def test_the_layout_is_that_of_the_experts(family: Family) -> None:
    import transformers
    from transformers.integrations import moe

    with torch.device("meta"):
        model = getattr(transformers, family.auto).from_config(family.build())
    experts = [module for module in model.modules() if hasattr(module, "is_concatenated")]
    assert bool(experts) == (MODULE_PER_EXPERT not in _layout(family))
    for module in experts:
        own_gate = module.has_gate and type(module)._apply_gate is not moe._default_apply_gate
        found = (
            not module.has_gate,
            own_gate,
            module.is_transposed,
            module.has_bias,
            not module.is_concatenated,
        )
        assert found == tuple(word in _layout(family) for word in LAYOUT)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.docs.test_families --write")
    PAGE.write_text(page(PAGE.read_text()))

"""Decoding steps of models with sparse attention, in Triton's interpreter."""

from pathlib import Path

import pytest

from overspill.serve import paged
from tests.serve.decode.decoding import INTERPRETED, decoding
from tests.serve.models import PROMPTS, plain_model
from tests.serve.test_sparse import SPARSE
from tests.slow import slow_names

pytestmark = INTERPRETED


@pytest.mark.parametrize("name", slow_names(SPARSE, *{*SPARSE} - {"glm_moe_dsa"}))
def test_logits_are_those_of_transformers(
    name: str, tmp_path: Path, module_steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence has fewer keys than are chosen for the other."""
    plain, _ = plain_model(name)
    monkeypatch.setattr(paged, "_SCORES", 0)  # one by one
    with decoding(plain, tmp_path, "host", slots=2, prompts=PROMPTS[1:3]) as made:
        made.step()
        made.two_steps()  # the second begins before the first one's tokens are known
    assert module_steps == [2] * 3

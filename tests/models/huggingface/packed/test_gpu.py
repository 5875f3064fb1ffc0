"""Packed experts on a GPU: what unpacked ones compute, wherever they are."""

from typing import Any

import pytest
import torch

import overspill
from tests.models.huggingface.families import make_batch
from tests.models.huggingface.packed.cases import CASES, Pair, Pairs
from tests.models.huggingface.test_load import outputs

pytestmark = pytest.mark.gpu


def load(pair: Pair, packed: bool) -> Any:
    given = {"device": "cuda", "dtype": "float32", "train": False, "quiet": True, "progress": False}
    return overspill.load(pair.packed, packed=packed, **given)


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_computed_as_with_unpacked_experts(name: str, pairs: Pairs) -> None:
    made = []
    for packed in (True, False):
        model = load(pairs[name], packed)
        engine, batch = model.overspill, make_batch(pairs[name].family, model)
        batch = {key: value.to("cuda") for key, value in batch.items()}
        layers, experts = engine.n_layers, engine.n_experts
        for homes in ([experts] * layers, [0] * layers, [1] * layers):
            engine.set_homes(homes)
            made.append(outputs(model, batch).cpu())
        engine.check_conserved()
        engine.close()
    for logits in made[1:]:
        torch.testing.assert_close(logits, made[0], rtol=1e-4, atol=1e-5)

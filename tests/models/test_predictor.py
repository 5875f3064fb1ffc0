"""The gates that a popularity predictor starts as, in families of transformers."""

import copy
from pathlib import Path

import pytest
import torch

from overspill.models.predictor import new_observer
from tests.models.huggingface.families import make_model
from tests.models.huggingface.oracle import offloaded
from tests.serve.models import family


@pytest.mark.parametrize(
    ("name", "gates", "bias", "starts"),
    [
        ("mixtral", "mlp.gate", False, {0}),
        ("gpt_oss", "mlp.router", True, {0}),
        ("switch_transformers", "router.classifier", False, {0, 1}),  # encoder and decoder
    ],
)
def test_it_starts_as_the_gates_of_the_model(
    name: str,
    gates: str,
    bias: bool,
    starts: set[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("overspill.models.predictor.cache_folder", lambda: tmp_path)
    with offloaded(copy.deepcopy(make_model(family(name))), "host", tmp_path / "experts") as model:
        observer = new_observer(model, distances=(1,))
        found = [module for path, module in model.named_modules() if path.endswith(gates)]
        predictor = observer.predictor
        assert len(found) == predictor.n_layers
        for weight, offset, gate in zip(
            predictor.weights[1], predictor.biases[1], found[1:], strict=True
        ):
            assert torch.equal(weight, gate.weight)
            assert torch.equal(offset, gate.bias if bias else torch.zeros_like(offset))
        # of a decoder none is predicted by the encoder
        allowed = [layer for layer in range(predictor.n_layers - 1) if layer + 1 not in starts]
        assert [later for at in range(4) for later, _ in observer.later_layers(at)] == [
            layer + 1 for layer in allowed
        ]


def test_a_gate_that_is_no_single_product_is_learned_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overspill.models.predictor.cache_folder", lambda: tmp_path)
    with offloaded(make_model(family("zaya")), "host", tmp_path / "experts") as model:
        assert not new_observer(model, distances=(1,)).predictor.weights[1].any()

"""The tiny models are what the other tests take them for, in the transformers at hand."""

import pytest
import torch
from torch import Tensor, nn

from tests.models.huggingface.families import (
    FAMILIES,
    UNEVEN,
    Family,
    cases,
    different_cases,
    make_batch,
    make_model,
)
from tests.models.huggingface.refused import REFUSED

MODULE_PER_EXPERT = {"SwitchTransformersExperts", "NllbMoeExperts"}
DECORATED = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


@pytest.mark.parametrize("family", different_cases(FAMILIES))
def test_a_family_trains(family: Family) -> None:
    model = make_model(family)
    output = model(**make_batch(family, model))
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert output.logits.std() > 0.5  # so that a wrong expert shows
    experts = experts_of(model)
    assert len(experts) >= 2
    for module in experts:
        for name, parameter in module.named_parameters():
            if family.name == "nllb-moe" and name.startswith(("expert_2", "expert_3")):
                continue  # transformers takes the mask of a token for its expert, which is 0 or 1
            assert parameter.grad is not None, name
            assert parameter.grad.any(), name
            assert len(set(parameter.shape)) == parameter.ndim, name  # so that a transpose shows


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v4", "nllb-moe"])
def test_the_seed_determines_a_model(name: str) -> None:
    (family,) = (family for family in FAMILIES if family.name == name)
    first, second, other = make_model(family), make_model(family), make_model(family, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weights(first), weights(other), strict=True))
    batch = make_batch(family, first)
    assert torch.equal(first(**batch).logits, second(**batch).logits)


@pytest.mark.parametrize("family", cases(UNEVEN))
def test_experts_of_an_uneven_family_differ_in_shape(family: Family) -> None:
    model = make_model(family)
    assert torch.isfinite(model(**make_batch(family, model)).loss)
    assert len({tuple(module.down_proj.shape) for module in experts_of(model)}) > 1


@pytest.mark.parametrize("family", cases(REFUSED))
def test_a_refused_family_has_no_experts_to_take_over(family: Family) -> None:
    assert not experts_of(make_model(family))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mixtral", (True, False, False, True)),
        ("nemotron_h", (False, False, False, True)),
        ("gpt_oss", (True, True, True, False)),
        ("openai_privacy_filter", (True, True, True, True)),
    ],
)
def test_the_families_cover_the_layouts(name: str, layout: tuple[bool, ...]) -> None:
    (family,) = (family for family in FAMILIES if family.name == name)
    for module in experts_of(make_model(family)):
        assert tuple(getattr(module, flag) for flag in DECORATED) == layout


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if type(module).__name__ in MODULE_PER_EXPERT
        or all(hasattr(module, name) for name in DECORATED)
    ]


def weights(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("bias"))]

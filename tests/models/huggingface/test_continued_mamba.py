"""Mamba over pieces of a prompt: the results are those of the whole prompt."""

import copy

import pytest
import torch

from overspill.models.huggingface.continued_mamba import limits_steps
from overspill.models.huggingface.recurrent import RecurrentStates, StateSpan, is_recurrent
from tests.models.huggingface.families import FAMILIES, make_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("lengths", [[20], [7, 13], [1, 2, 1, 16], [6, 3, 11]])
@pytest.mark.parametrize("name", ["jamba", "nemotron_h", "granitemoehybrid"])
def test_pieces_give_the_results_of_the_whole(name: str, lengths: list[int]) -> None:
    """Of modules that begin with an empty state, and of others that limit time steps."""
    (family,) = (each for each in FAMILIES if each.name == name)
    model = make_model(family).eval()
    mixer = next(module for module in model.modules() if is_recurrent(module))
    if name == "granitemoehybrid":
        mixer.time_step_limit = (0.5, 1.5)
    assert limits_steps(mixer) == (name != "jamba")
    plain = copy.deepcopy(mixer)
    states = RecurrentStates(model, n_slots=2)
    x = torch.randn(1, sum(lengths), 32, generator=torch.Generator().manual_seed(2))
    found = []
    with torch.no_grad(), states.replaced():
        for number, piece in enumerate(x.split(lengths, dim=1)):
            span = StateSpan(1, fresh=number == 0, in_prompt=True)
            states.begin([piece.shape[1]], [span], CPU)
            found.append(mixer(piece))
        torch.testing.assert_close(torch.cat(found, 1), plain(x), rtol=1e-4, atol=1e-5)
    assert not mixer.in_proj._forward_hooks
    assert not mixer.out_proj._forward_pre_hooks

"""Mamba over pieces of a sequence, which continue from the state after the piece before."""

import copy

import pytest
import torch

from overspill.models.huggingface.recurrent import RecurrentStates, StateSpan
from tests.models.huggingface.families import FAMILIES, make_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("lengths", [[20], [7, 13], [1, 2, 1, 16], [6, 3, 11]])
def test_pieces_give_the_results_of_the_whole(lengths: list[int]) -> None:
    (jamba,) = (family for family in FAMILIES if family.name == "jamba")
    model = make_model(jamba).eval()
    mixer = next(m for m in model.modules() if type(m).__name__ == "JambaMambaMixer")
    plain = copy.deepcopy(mixer)
    states = RecurrentStates(model, n_slots=2)
    x = torch.randn(1, sum(lengths), 32, generator=torch.Generator().manual_seed(2))
    found = []
    with torch.no_grad(), states.replaced():
        for number, piece in enumerate(x.split(lengths, dim=1)):
            states.begin([piece.shape[1]], [StateSpan(1, fresh=number == 0)], CPU)
            found.append(mixer(piece))
        torch.testing.assert_close(torch.cat(found, 1), plain(x), rtol=1e-4, atol=1e-5)
        assert not mixer.in_proj._forward_hooks
        assert not mixer.out_proj._forward_pre_hooks

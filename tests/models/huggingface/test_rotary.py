"""Rotary embeddings of Phi-3.5-MoE on the device alone are those of its modules."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from overspill.models.huggingface.rotary import FixedRotary
from tests.models.huggingface.families import FAMILIES, make_model
from tests.serve.test_exactness import _long_rope


class NoReads(TorchDispatchMode):
    """Fails if the host reads a value, as the capture of a CUDA graph would."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in ("is_nonzero", "_local_scalar_dense"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["default", "longrope"])
def test_embeddings_are_those_of_the_module(kind: str) -> None:
    """On both sides of the length from which another scale could be used."""
    (default,) = (family for family in FAMILIES if family.name == "phimoe")
    model = make_model(default if kind == "default" else _long_rope(1.2, 1.2))
    (module,) = (m for m in model.modules() if type(m).__name__ == "PhimoeRotaryEmbedding")
    assert module.rope_type == kind
    x, positions = torch.zeros(1, 3, 8), torch.tensor([[2, 15, 40]])
    for count in (2, 3):
        expected = module(x, positions[:, :count])
        if kind == "longrope":
            with pytest.raises(AssertionError), NoReads():
                module(x, positions[:, :count])
        with FixedRotary(model).replaced(), NoReads():
            found = module(x, positions[:, :count])
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)

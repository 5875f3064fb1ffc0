"""Saves and restores the random generators of a process."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch


def read_generators() -> dict[str, Any]:
    """The states of the generators of torch, Python and numpy, as JSON values."""
    version, internal, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=True)
    assert isinstance(numpy_state, tuple)
    kind, keys, place, has_gauss, cached = numpy_state
    rng: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "python": [version, list(internal), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), place, has_gauss, cached],
    }
    if torch.cuda.is_initialized():
        rng["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return rng


def set_generators(rng: Mapping[str, Any]) -> None:
    """Restores the states that `read_generators` returned."""
    version, internal, gauss = rng["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, place, has_gauss, cached = rng["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), place, has_gauss, cached))
    set_torch: list[tuple[str, Callable[[torch.Tensor], None]]] = [("torch", torch.set_rng_state)]
    if torch.cuda.is_initialized() and "cuda" in rng:
        set_torch.append(("cuda", torch.cuda.set_rng_state))
    for name, setter in set_torch:
        setter(torch.frombuffer(bytearray.fromhex(rng[name]), dtype=torch.uint8))

"""A run that goes on draws the numbers it would have drawn."""

import json
import random

import numpy as np
import torch

from overspill.train.generators import read_generators, set_generators


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_the_same_numbers_come_again_through_json() -> None:
    kept = json.dumps(read_generators())
    first, second = draw(), draw()
    assert first != second
    set_generators(json.loads(kept))
    assert [draw(), draw()] == [first, second]

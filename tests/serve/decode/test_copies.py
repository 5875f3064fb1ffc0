"""Decoding with copies of experts on the device."""

import copy
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.serve.decode.decoding import INTERPRETED, decoding, small
from tests.serve.models import PROMPTS, plain_gpt, plain_model

pytestmark = INTERPRETED


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        pytest.param("mixtral", 1, marks=pytest.mark.slow),
        ("mixtral", 3),
        pytest.param("gpt_oss", 3, marks=pytest.mark.slow),
    ],
)
def test_copies_of_experts_change_nothing(
    name: str, slots: int, tmp_path: Path, steps: list[int]
) -> None:
    with decoding(plain_model(name)[0], tmp_path, "host", [1, 0], PROMPTS[:1], None, slots) as made:
        for _ in range(2):
            made.two_steps()
        stats = made.runner.stats()
        assert stats["expert_slots"] == slots
        assert sum(stats["expert_hit_rate"]) > 0
    assert steps == [1] * 4


def test_copies_follow_weights_that_are_loaded(tmp_path: Path, steps: list[int]) -> None:
    """Of the last layer: keys and values of earlier tokens do not depend on them."""
    plain = copy.deepcopy(plain_model("mixtral")[0])
    with decoding(plain, tmp_path, "host", [0, 1], PROMPTS[:1], slots=8) as made:
        for _ in range(2):
            made.step()
        assert sum(made.runner.stats()["expert_hit_rate"]) > 0
        changed = {
            name: -1.5 * value
            for name, value in plain.state_dict().items()
            if "layers.1" in name and "experts" in name
        }
        assert changed
        for model in (plain, made.model):
            model.load_state_dict(changed, strict=False)
        made.step()
    assert steps == [1] * 3


def test_ctrl_c_loses_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with decoding(plain_gpt(), tmp_path, "host", prompts=small(PROMPTS[:1]), slots=3) as made:
        engine = made.model.overspill
        weights = engine.addresses.host_weights

        def interrupted(*asked: Any) -> Tensor | None:
            monkeypatch.setattr(engine.addresses, "host_weights", weights)
            signal.raise_signal(signal.SIGINT)
            return weights(*asked)

        monkeypatch.setattr(engine.addresses, "host_weights", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.step()
        for _ in range(2):
            made.step()
        assert sum(made.runner.stats()["expert_hit_rate"]) > 0


def test_a_step_after_a_failure_to_allocate_copies_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no copies now")

    with decoding(plain_gpt(), tmp_path, "host", prompts=small(PROMPTS[:1])) as made:
        with monkeypatch.context() as patch:
            patch.setattr(made.model.overspill.memory, "gpu_use", fail)
            with pytest.raises(RuntimeError, match="no copies"):
                made.step()
        made.step()

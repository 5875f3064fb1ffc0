"""The model of a runner: as before when it was served, and closed or given up."""

import copy
from pathlib import Path

import pytest
import torch

import overspill
from overspill.core.errors import OrderError, OverspillError
from tests.models.huggingface.oracle import offloaded
from tests.serve.decode.decoding import (
    BLOCKS,
    CPU,
    INTERPRETED,
    SIZE,
    Decoding,
    decoding,
    fused_runner,
    small,
)
from tests.serve.models import PROMPTS, plain_generate, plain_gpt, plain_model

pytestmark = INTERPRETED


def test_a_model_is_as_before_when_it_was_served(tmp_path: Path) -> None:
    """Queries, keys and values have become parts of one tensor."""
    plain, expected = plain_model("qwen2_moe")
    with offloaded(plain, "gpu", tmp_path) as model:
        Decoding(plain, model, PROMPTS[:1]).runner.close()
        assert plain_generate(model, PROMPTS[0]) == expected[0]
        for name, value in model.state_dict().items():
            assert torch.equal(value[...], plain.state_dict()[name]), name
        overspill.save(model, tmp_path / "saved")
        again = type(plain).from_pretrained(tmp_path / "saved").eval()
        assert plain_generate(again, PROMPTS[0]) == expected[0]
        changed = copy.deepcopy(plain)
        for each in (changed, model):
            with torch.no_grad():
                each.model.layers[0].self_attn.k_proj.weight.mul_(-1.5)
        made = Decoding(changed, model, PROMPTS[:1])
        made.step()
        with torch.no_grad():  # while it is served
            changed.model.layers[1].self_attn.q_proj.weight.mul_(-1.5)
            model.model.layers[1].self_attn.q_proj.weight.mul_(-1.5)
        made.step()
        made.runner.close()


def test_a_second_runner_of_a_model_is_refused_and_changes_nothing(
    tmp_path: Path, steps: list[int]
) -> None:
    plain, _ = plain_model("mixtral")
    with decoding(plain, tmp_path, prompts=PROMPTS[:1]) as made:
        weight = made.model.model.layers[0].self_attn.q_proj.weight
        address = weight.data_ptr()
        with pytest.raises(OrderError, match="this model is being served"):
            fused_runner(made.model, CPU, BLOCKS, SIZE, 64, 4)
        assert weight.data_ptr() == address
        made.step()
    assert steps == [1]


@pytest.mark.slow
def test_two_runners_may_serve_one_gpt_moe(tmp_path: Path, steps: list[int]) -> None:
    with decoding(plain_gpt(), tmp_path, "host", [2, 2, 2], small(PROMPTS[:1])) as made:
        other = Decoding(plain_gpt(), made.model, small(PROMPTS[1:2]))
        made.step()
        made.model.overspill.set_residents([1, 5, 0])
        made.step()
        other.step()
        made.model(torch.tensor([[1, 2, 3]]))  # and it may be used beside them
        made.step()
        other.runner.close()
    assert len(steps) == 5


def test_a_step_after_the_engine_was_closed_is_refused(tmp_path: Path) -> None:
    for mode, residents in (("gpu", None), ("host", [1, 1])):
        with decoding(plain_model("mixtral")[0], tmp_path, mode, residents, PROMPTS[:1]) as made:
            made.step()
            made.model.overspill.close()
            with pytest.raises(OverspillError, match="closed"):
                made.step()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads of Linux")
def test_a_runner_that_is_given_up_ends_its_threads(tmp_path: Path) -> None:
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    with offloaded(plain_gpt(), "host", tmp_path) as model:
        made = Decoding(plain_gpt(), model, small(PROMPTS[:1]))
        before = threads()
        made.step()
        assert threads() > before
        del made
        assert threads() == before

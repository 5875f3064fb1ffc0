"""load_state_dict with the names of checkpoints and with those of the model, in any portion."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import overspill
from tests.models.huggingface.families import HIDDEN, Family, different_cases, make_model, tiny
from tests.models.huggingface.oracle import budgets
from tests.models.huggingface.test_exactness import BY_NAME, SUPPORTED

# converters of these need all of their tensors in one state dict
TOGETHER = ("kimi_linear", "minimax_m3_vl_text")
APART = tuple(family for family in SUPPORTED if family.name not in TOGETHER)
WHOLE = (*TOGETHER, "mixtral", "gpt_oss", "nemotron_h", "qwen3_vl_moe", "switch_transformers")


def checkpoint(model: Any, folder: Path) -> dict[str, Tensor]:
    """The tensors as the family's checkpoints name them."""
    model.save_pretrained(folder)
    return {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def shuffled(tensors: dict[str, Tensor], pieces: int) -> Iterator[dict[str, Tensor]]:
    names = list(tensors)
    random.Random(3).shuffle(names)
    for number in range(pieces):
        yield {name: tensors[name] for name in names[number::pieces]}


def offloaded(model: Any, mode: str, folder: Path) -> Any:
    return overspill.offload(model, **budgets(mode, folder))


def assert_same_weights(model: Any, plain: Any) -> None:
    mine, theirs = model.state_dict(), plain.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name


@pytest.mark.parametrize("name", WHOLE)
def test_a_checkpoint_in_one_piece(name: str, tmp_path: Path) -> None:
    plain = make_model(BY_NAME[name], seed=1)
    model = offloaded(make_model(BY_NAME[name], seed=2), "host", tmp_path)
    try:
        result = model.load_state_dict(checkpoint(plain, tmp_path / "a"), strict=False)
        assert not result.unexpected_keys
        assert_same_weights(model, plain)
        model.overspill.check_conserved()
    finally:
        model.overspill.close()


# those named have other mixers, which are not converted
MIXERS = ("granitemoehybrid", "jamba", "lfm2_moe", "minimax", "mistral4", "qwen3_next", "zaya")


@pytest.mark.parametrize("family", different_cases(APART, *MIXERS))
def test_a_checkpoint_in_pieces_of_any_kind(family: Family, tmp_path: Path) -> None:
    plain = make_model(family, seed=1)
    model = offloaded(make_model(family, seed=2), "disk", tmp_path)
    try:
        for shard in shuffled(checkpoint(plain, tmp_path / "a"), 4):
            assert not model.load_state_dict(shard, strict=False).unexpected_keys
        assert_same_weights(model, plain)
    finally:
        model.overspill.close()


def many_experts() -> Family:
    return Family("mixtral", lambda: tiny("mixtral", num_local_experts=12, intermediate_size=24))


def test_twelve_experts_are_not_sorted_as_text(tmp_path: Path) -> None:
    plain = make_model(many_experts(), seed=1)
    model = offloaded(make_model(many_experts(), seed=2), "host", tmp_path)
    tensors = checkpoint(plain, tmp_path / "a")
    assert any(".experts.11.w1." in name for name in tensors)
    model.load_state_dict(dict(sorted(tensors.items())))  # strict: nothing is missing
    assert_same_weights(model, plain)
    model.overspill.close()


@pytest.fixture
def mixtral(tmp_path: Path) -> Iterator[tuple[Any, Any, dict[str, Tensor]]]:
    """An offloaded model, a plain one with other weights, and that one's checkpoint."""
    plain = make_model(BY_NAME["mixtral"], seed=1)
    model = offloaded(make_model(BY_NAME["mixtral"], seed=2), "host", tmp_path)
    yield model, plain, checkpoint(plain, tmp_path / "a")
    model.overspill.close()


Mixtral = tuple[Any, Any, dict[str, Tensor]]


def test_the_names_of_the_model_too(mixtral: Mixtral) -> None:
    model, plain, _ = mixtral
    model.load_state_dict(plain.state_dict())
    assert_same_weights(model, plain)


def test_what_did_not_come_stays(mixtral: Mixtral) -> None:
    model, _, tensors = mixtral
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (w3,) = (name for name in tensors if ".layers.1." in name and ".experts.2.w3." in name)
    result = model.load_state_dict({w3: tensors[w3]}, strict=False)
    stack = "model.layers.1.mlp.experts.gate_up_proj"
    assert stack in result.missing_keys  # as a whole, it is
    expected = before[stack].clone()
    expected[2, len(tensors[w3]) :] = tensors[w3]
    after = model.state_dict()
    assert torch.equal(after[stack], expected)
    assert all(torch.equal(after[name], before[name]) for name in before if name != stack)


def test_strict_names_what_is_missing_and_what_is_too_much(mixtral: Mixtral) -> None:
    model, _, tensors = mixtral
    (w2,) = (name for name in tensors if ".layers.0." in name and ".experts.3.w2." in name)
    less = {name: value for name, value in tensors.items() if name != w2}
    with pytest.raises(RuntimeError, match=r"Missing.*layers\.0\.mlp\.experts\.down_proj"):
        model.load_state_dict(less)
    more = {"another": torch.ones(1), w2.replace(".3.", ".9."): tensors[w2]}
    with pytest.raises(RuntimeError, match=r"Unexpected.*another"):
        model.load_state_dict(tensors | more)
    result = model.load_state_dict(tensors | more, strict=False)
    assert sorted(result.unexpected_keys) == sorted(more)
    assert not result.missing_keys


@pytest.mark.parametrize("kind", [".experts.1.w1.", ".experts.1.w2.", "self_attn.q_proj."])
def test_a_wrong_shape_is_told_as_by_torch_and_nothing_is_written(
    mixtral: Mixtral, kind: str
) -> None:
    model, _, tensors = mixtral
    before = {name: value.clone() for name, value in model.state_dict().items()}
    name = next(name for name in tensors if kind in name)
    with pytest.raises(RuntimeError, match=rf"(?s)Error.*Mixtral.*size mismatch for .*{kind}"):
        model.load_state_dict(tensors | {name: tensors[name][:-1]}, strict=False)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_stack_of_the_wrong_shape_is_refused_before_anything_is_written(
    mixtral: Mixtral,
) -> None:
    model, plain, _ = mixtral
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wrong = dict(plain.state_dict())
    name = "model.layers.1.mlp.experts.down_proj"
    wrong[name] = wrong[name][:, 1:]
    with pytest.raises(RuntimeError, match=f"size mismatch for {name}"):
        model.load_state_dict(wrong)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_what_a_converter_needs_together_must_come_together(tmp_path: Path) -> None:
    family = BY_NAME["kimi_linear"]
    tensors = checkpoint(make_model(family, seed=1), tmp_path / "a")
    model = offloaded(make_model(family, seed=2), "host", tmp_path)
    alone = next(name for name in tensors if "q_conv1d" in name)
    with pytest.raises(
        RuntimeError, match=r"conv1d.*must be in one state dict; 1 of them are given"
    ):
        model.load_state_dict({alone: tensors[alone]}, strict=False)
    model.overspill.close()


def test_a_square_tensor_that_may_lie_either_way_is_refused(tmp_path: Path) -> None:
    nested = BY_NAME["qwen3_vl_moe"]

    def build() -> Any:
        config = nested.build()
        config.text_config.moe_intermediate_size = HIDDEN // 2
        return config

    family = Family(nested.name, build, nested.auto)
    model = offloaded(make_model(family), "host", tmp_path)
    with pytest.raises(RuntimeError, match=r"gate_up_proj is square and transposed"):
        model.load_state_dict(checkpoint(make_model(family), tmp_path / "a"), strict=False)
    model.overspill.close()


def test_asking_for_names_reads_no_expert(mixtral: Mixtral, monkeypatch: Any) -> None:
    model, plain, _ = mixtral

    def fail(*args: Any) -> None:
        raise AssertionError("an expert was read")

    monkeypatch.setattr(model.overspill.records, "read_weights", fail)
    state = model.state_dict()
    theirs = plain.state_dict()
    assert state.keys() == theirs.keys()
    assert all(state[name].shape == value.shape for name, value in theirs.items())

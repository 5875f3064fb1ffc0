"""Pre-gates of transformers models in files, and beside adapters of peft."""

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import overspill
from overspill.core.errors import CheckpointError, ConfigError
from overspill.models.huggingface.pregate_file import FILE, gate_tensors
from overspill.models.pregate import pregate_level
from tests.models.huggingface.families import make_batch, make_model
from tests.models.huggingface.oracle import budgets
from tests.models.huggingface.test_pregates import (
    BY_NAME,
    DEEP_BY_NAME,
    MIXTRAL,
    assert_equal,
    closing,
    logits_of,
)
from tests.slow import slow_rows


@pytest.mark.parametrize(
    ("name", "level"),
    slow_rows(
        [
            ("qwen3_moe", 1), ("gpt_oss", 1), ("switch_transformers", 2), ("nllb-moe", 3),
            ("jamba", 1), ("afmoe", 1),
        ],
        1, 2, 5,
    ),
)  # fmt: skip
def test_both_models_are_loaded_again(name: str, level: int, tmp_path: Path) -> None:
    family = DEEP_BY_NAME.get(name) or BY_NAME[name]
    conventional = make_model(family)
    model = overspill.pregate(copy.deepcopy(conventional), level)
    train_gates(model)
    overspill.save(model, tmp_path / "out")
    with closing(overspill.load(tmp_path / "out", **budgets("disk", tmp_path))) as again:
        assert pregate_level(again) == level
        assert_equal(gate_tensors(again), gate_tensors(model))  # the same bits
        torch.testing.assert_close(logits_of(again, family), logits_of(model, family))
    given = budgets("gpu", tmp_path) | {"train": False, "pregate": False}
    with closing(overspill.load(tmp_path / "out", **given)) as again:
        assert pregate_level(again) == 0
        torch.testing.assert_close(logits_of(again, family), logits_of(conventional, family))
    loaded = getattr(transformers, family.auto).from_pretrained(tmp_path / "out")
    assert_equal(loaded.state_dict(), conventional.state_dict())


def train_gates(model: Any) -> None:
    """Changes the pre-gates."""
    changed = {name: tensor * 0.5 for name, tensor in gate_tensors(model).items()}
    model.load_state_dict(changed, strict=False)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of a Mixtral with pre-gates of level 1."""
    model = overspill.pregate(make_model(MIXTRAL))
    train_gates(model)
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_an_offloaded_model_is_saved_as_a_plain_one(saved: Path, tmp_path: Path) -> None:
    with closing(overspill.load(saved, **budgets("disk", tmp_path))) as model:
        model.save_pretrained(tmp_path / "again")
        assert_equal(load_file(tmp_path / "again" / FILE), load_file(saved / FILE))
        overspill.save(model, saved)  # over itself
    assert_equal(load_file(tmp_path / "again" / FILE), load_file(saved / FILE))
    one, other = (
        transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "again", saved)
    )
    assert_equal(one, other)
    assert_equal(one, make_model(MIXTRAL).state_dict())


def test_another_data_type(saved: Path, tmp_path: Path) -> None:
    given = budgets("host", tmp_path)
    with closing(overspill.load(saved, dtype=torch.bfloat16, **given)) as model:
        overspill.save(model, tmp_path / "bf16")
    theirs = load_file(saved / FILE)
    for dtype in (torch.bfloat16, torch.float32):
        with closing(overspill.load(tmp_path / "bf16", dtype=dtype, **given)) as model:
            for name, tensor in gate_tensors(model).items():
                assert tensor.dtype == dtype
                assert torch.equal(tensor.float(), theirs[f"pregate.{name}"].bfloat16().float())


@pytest.mark.parametrize("name", slow_rows(["switch_transformers", "nllb-moe"], 0))
def test_routers_that_are_trained_in_float32_are_loaded_with_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    """Routers of Switch and NLLB convert themselves in a model in bf16."""
    family = DEEP_BY_NAME[name]
    make_model(family).save_pretrained(tmp_path / "plain")
    given = budgets("host", tmp_path) | {"dtype": "bfloat16"}
    with closing(overspill.load(tmp_path / "plain", **given)) as model:
        overspill.pregate(model, 3)
        optimizer = overspill.AdamW(model, lr=1e-3)
        model(**make_batch(family, model)).loss.backward()
        optimizer.step()
        overspill.save(model, tmp_path / "out")
        trained = {name: tensor.clone() for name, tensor in gate_tensors(model).items()}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in trained.values())
    with closing(overspill.load(tmp_path / "out", **given)) as again:
        loaded = gate_tensors(again)
        assert all(torch.equal(loaded[name], value) for name, value in trained.items())
        assert {value.dtype for value in loaded.values()} == {torch.float32}
        logits_of(again, family)


def test_a_conventional_model_leaves_no_pre_gates_behind(saved: Path, tmp_path: Path) -> None:
    given = budgets("host", tmp_path)
    with closing(overspill.load(saved, pregate=False, **given)) as model:
        overspill.save(model, saved)
    assert not (saved / FILE).exists()


def test_models_that_are_not_offloaded_are_saved_over_each_other(tmp_path: Path) -> None:
    conventional = make_model(MIXTRAL)
    overspill.save(overspill.pregate(copy.deepcopy(conventional)), tmp_path)
    assert (tmp_path / FILE).is_file()
    overspill.save(conventional, tmp_path)
    assert not (tmp_path / FILE).exists()


def test_a_link_to_nothing_is_not_taken_for_a_conventional_model(
    saved: Path, tmp_path: Path
) -> None:
    os.rename(saved / FILE, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", saved / FILE)
    with closing(overspill.load(saved, **budgets("host", tmp_path))) as model:
        assert pregate_level(model) == 1
    os.remove(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="cannot be read"):
        overspill.load(saved, **budgets("host", tmp_path))
    os.remove(saved / FILE)
    os.mkdir(saved / FILE)
    with pytest.raises(CheckpointError, match="cannot be read"):
        overspill.load(saved, **budgets("host", tmp_path))


def test_a_state_dict_without_the_pre_gates_is_refused(tmp_path: Path) -> None:
    model = overspill.pregate(make_model(MIXTRAL))
    state = {name: tensor for name, tensor in model.state_dict().items() if "gate" not in name}
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.1\.mlp\.gate"):
        model.save_pretrained(tmp_path, state_dict=state)
    model.save_pretrained(tmp_path / "other", state_dict={}, is_main_process=False)
    assert not (tmp_path / "other" / FILE).exists()


def test_a_model_with_nan_is_loaded_again(tmp_path: Path) -> None:
    model = overspill.pregate(make_model(MIXTRAL))
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    overspill.save(model, tmp_path / "out")
    with closing(overspill.load(tmp_path / "out", **budgets("host", tmp_path))) as again:
        assert pregate_level(again) == 1


def test_pre_gates_of_another_training_of_the_same_base_are_refused(
    saved: Path, tmp_path: Path
) -> None:
    """The conventional gates, which are not trained, are the same."""
    model = make_model(MIXTRAL)
    with torch.no_grad():  # as training in bf16, which changes no weight near 1
        model.model.layers[1].self_attn.q_proj.weight.mul_(1.01)
    model.save_pretrained(tmp_path / "other")
    overspill.save(overspill.pregate(model, level=2), tmp_path / "two")
    shutil.copy(tmp_path / "two" / FILE, tmp_path / "fitting")
    for folder in (tmp_path / "other", tmp_path / "two"):
        shutil.copy(saved / FILE, folder)
        with pytest.raises(CheckpointError, match=r"q_proj\.weight than that of the checkpoint"):
            overspill.load(folder, **budgets("host", tmp_path))
    shutil.copy(tmp_path / "fitting", tmp_path / "two" / FILE)
    with closing(overspill.load(tmp_path / "two", **budgets("host", tmp_path))) as again:
        assert pregate_level(again) == 2


def test_a_file_of_the_first_format_is_read(saved: Path, tmp_path: Path) -> None:
    old = {n: t for n, t in load_file(saved / FILE).items() if not n.startswith("sample.")}
    assert len(old) < len(load_file(saved / FILE))
    facts = {"format": "overspill-pregates-1", "level": "1", "model_type": "mixtral"}
    save_file(old, saved / FILE, facts)
    with closing(overspill.load(saved, **budgets("host", tmp_path))) as model:
        assert pregate_level(model) == 1


def test_checkpoint_of_another_model_is_refused(saved: Path, tmp_path: Path) -> None:
    make_model(MIXTRAL, seed=1).save_pretrained(tmp_path / "other")
    shutil.copy(saved / FILE, tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"saved with another model\.layers\.1\.mlp\.gate"):
        overspill.load(tmp_path / "other", **budgets("host", tmp_path))
    with closing(overspill.load(tmp_path / "other", pregate=False, **budgets("host", tmp_path))):
        pass


def test_a_file_that_does_not_fit_is_refused(saved: Path, tmp_path: Path) -> None:
    tensors = load_file(saved / FILE)
    name = "pregate.model.layers.1.mlp.gate.weight"
    good = {"format": "overspill-pregates-1", "level": "1", "model_type": "mixtral"}

    def refused(match: str, changed: dict[str, Tensor] = tensors, **facts: str) -> None:
        save_file(changed, saved / FILE, good | facts)
        with pytest.raises(CheckpointError, match=match):
            overspill.load(saved, **budgets("host", tmp_path))

    refused("of a qwen3_moe, the checkpoint is a mixtral", model_type="qwen3_moe")
    refused("layers.1.mlp.gate.weight is only in the file", level="2")
    refused("level=4 needs at least 5 MoE blocks", level="4")
    refused("not a file of this format", level="x")
    refused("not a file of this format", format="other")
    refused("is only in the model", {n: t for n, t in tensors.items() if n != name})
    refused(r"shape \[2, 32\], the model \[4, 32\]", tensors | {name: tensors[name][:2].clone()})
    (saved / FILE).write_bytes((saved / FILE).read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        overspill.load(saved, **budgets("host", tmp_path))


def test_uploading_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="push_to_hub"):
        overspill.pregate(make_model(MIXTRAL)).save_pretrained(tmp_path, push_to_hub=True)


# -- peft ----------------------------------------------------------------------------------------


def test_adapters_are_added_after_pre_gates_and_saved_with_them_or_merged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    make_model(MIXTRAL).save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match="before they are added"):
        overspill.pregate(peft.get_peft_model(make_model(MIXTRAL), config))
    model = overspill.pregate(make_model(MIXTRAL))
    with torch.no_grad():
        for gate in gate_tensors(model).values():
            gate.neg_()
    expected = logits_of(model)
    adapted = peft.get_peft_model(model, config)
    torch.testing.assert_close(logits_of(adapted), expected)
    overspill.save(adapted, tmp_path / "adapter")
    given = budgets("host", tmp_path) | {"adapter": tmp_path / "adapter", "train": False}
    with closing(overspill.load(tmp_path / "base", **given)) as again:
        torch.testing.assert_close(logits_of(again), expected)
    overspill.save(adapted.merge_and_unload(), tmp_path / "out")
    with closing(overspill.load(tmp_path / "out", **budgets("host", tmp_path))) as again:
        torch.testing.assert_close(logits_of(again), expected)


def skip_without_linear_routers(name: str, model: Any) -> None:
    routers = [module for key, module in model.named_modules() if key.endswith(".router")]
    if name == "jamba" and not any(isinstance(router, torch.nn.Linear) for router in routers):
        pytest.skip("routers of Jamba are no linear layers in this version of transformers")


@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")  # peft, of experts
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mixtral", {"target_modules": "all-linear"}),
        ("mixtral", {"target_modules": ["q_proj"], "modules_to_save": ["gate"]}),
        ("mixtral", {"target_parameters": ["gate.weight"]}),
        ("jamba", {"target_modules": r".*layers\.2\..*router"}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(reversed(value)),
)
def test_adapters_of_gates_are_refused(name: str, options: dict[str, Any]) -> None:
    """They would be applied in the block of the experts, to another input than the gate's."""
    peft = pytest.importorskip("peft")
    family = DEEP_BY_NAME.get(name) or BY_NAME[name]
    model = overspill.pregate(make_model(family))
    skip_without_linear_routers(name, model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, **options))
    with pytest.raises(ConfigError, match=r"gate of .* was replaced by \w+ .*target_modules"):
        logits_of(adapted, family)


@pytest.mark.parametrize(
    ("name", "modules"),
    [("mixtral", ["q_proj", "o_proj"]), ("jamba", r".*layers\.0\..*router")],
    ids=["mixtral", "a gate that is no pre-gate"],
)
def test_adapters_elsewhere_are_those_of_the_merged_model(name: str, modules: Any) -> None:
    peft = pytest.importorskip("peft")
    family = DEEP_BY_NAME.get(name) or BY_NAME[name]
    model = overspill.pregate(make_model(family).eval())
    skip_without_linear_routers(name, model)
    before = logits_of(model, family)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=modules))
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3)
    expected = logits_of(adapted, family)
    assert not torch.allclose(expected, before)
    torch.testing.assert_close(logits_of(adapted.merge_and_unload(), family), expected)

"""Pre-gates of transformers models: exact, saved beside the conventional model, loaded again."""

import copy
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import overspill
from overspill.core.errors import CheckpointError, ConfigError, OrderError
from overspill.models.huggingface.pregates import FILE, gate_tensors
from overspill.models.pregate import pregate_level
from overspill.moe.dense_weights import DenseWeights
from tests.models.huggingface.families import (
    FAMILIES,
    UNEVEN,
    Family,
    different_cases,
    make_batch,
    make_model,
)
from tests.models.huggingface.oracle import (
    ADAM,
    MODES,
    assert_same_gradients,
    assert_same_weights,
    budgets,
    expert_gradients,
    offloaded,
)
from tests.models.huggingface.pregated import DEEP, call_by_hand
from tests.slow import slow_rows

DEEP_BY_NAME = {family.name: family for family in DEEP}
BY_NAME = {family.name: family for family in FAMILIES}
REFUSED = ("zaya", "nllb-moe")
SUPPORTED = tuple(
    DEEP_BY_NAME.get(family.name, family) if family.name == "switch_transformers" else family
    for family in (*FAMILIES, *UNEVEN)
    if family.name not in REFUSED
)
MIXTRAL = DEEP_BY_NAME["mixtral"]


def gradients_of(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor], atol: float = 0.0) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=atol, atol=atol, msg=name)


@torch.no_grad()
def logits_of(model: Any, family: Family = MIXTRAL) -> Tensor:
    batch = make_batch(family, model)
    return model.eval()(**batch).logits


@contextmanager
def closing(model: Any) -> Iterator[Any]:
    try:
        yield model
    finally:
        model.overspill.close()


# -- exactness -----------------------------------------------------------------------------------


LEVELS = {
    "mixtral": [1, 2, 3],
    "qwen3_moe": [1],
    "deepseek_v3": [3],
    "gpt_oss": [2],
    "switch_transformers": [2],
}
SLOW_LEVELS = [  # as others
    ("mixtral", 1), ("mixtral", 3), ("qwen3_moe", 1), ("gpt_oss", 2), ("switch_transformers", 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "level"),
    [
        pytest.param(
            family,
            level,
            id=f"{family.name}-{level}",
            marks=[pytest.mark.slow] if (family.name, level) in SLOW_LEVELS else [],
        )
        for family in DEEP
        for level in LEVELS[family.name]
    ],
)
def test_training_follows_gates_that_are_called_by_hand(
    family: Family, level: int, tmp_path: Path
) -> None:
    """Two steps with offloaded experts: each family in each mode, before and after offloading, with
    and without checkpoints."""
    number = DEEP.index(family) + level
    mode, first, recompute = list(MODES)[number % 3], number % 2 == 0, number % 4 < 2
    model = make_model(family).train()
    plain = call_by_hand(copy.deepcopy(model), level)
    batch = make_batch(family, plain)
    if first:
        overspill.pregate(model, level)
    with offloaded(model, mode, tmp_path) as twin:
        if not first:
            overspill.pregate(twin, level)
        if recompute:
            twin.gradient_checkpointing_enable()
        assert pregate_level(twin) == level
        theirs = torch.optim.AdamW(plain.parameters(), **ADAM)
        mine = overspill.AdamW(twin, max_grad_norm=1e9, **ADAM)
        for step in range(2):
            expected, got = plain(**batch), twin(**batch)
            # the optimizers round differently
            atol = (1e-5 + 2e-5 * step) * float(expected.logits.detach().abs().max())
            torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=atol)
            torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=1e-6)
            expected.loss.backward()
            got.loss.backward()
            for name, parameter in plain.named_parameters():
                if parameter.grad is None and ".experts." in name:
                    parameter.grad = torch.zeros_like(parameter)  # it decays too
            theirs.step()
            mine.step()
            if step == 0:
                assert_same_gradients(plain, twin, expert_gradients(twin, mine))
            assert_same_weights(plain, twin, atol=1e-5)
            theirs.zero_grad()
            mine.zero_grad()


# gates do not depend on mixers
MIXERS = ("kimi_linear", "lfm2_moe", "minimax", "mistral4", "qwen3_next")


@pytest.mark.parametrize("family", different_cases(SUPPORTED, *MIXERS))
def test_every_family_follows_gates_that_are_called_by_hand(family: Family) -> None:
    model = make_model(family).train()
    batch = make_batch(family, model)
    plain = call_by_hand(copy.deepcopy(model), 1)
    kind = str(type(model))
    overspill.pregate(model)
    assert str(type(model)) == kind  # by which transformers knows it
    expected = gradients_of(plain, batch)
    assert_equal(gradients_of(model, batch), expected)
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
        assert_equal(gradients_of(model, batch), expected, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_other_families_are_refused_unchanged(name: str) -> None:
    model = make_model(BY_NAME[name])
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match=r"cannot have (a pre-gate|pre-gates)"):
        overspill.pregate(model)
    assert [type(module) for module in model.modules()] == kinds


def test_a_stack_with_one_moe_block_is_refused_unchanged() -> None:
    model = make_model(BY_NAME["switch_transformers"])  # the decoder has two
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(
        ConfigError, match=r"level=1 needs at least 2 .* of encoder.block.1.*has 1: "
    ):
        overspill.pregate(model)
    assert [type(module) for module in model.modules()] == kinds


def test_jitter_changes_the_input_of_the_gate_alone() -> None:
    """Gates of Switch multiply their input in place, that of the experts with it."""
    model = make_model(DEEP_BY_NAME["switch_transformers"]).train()
    for module in model.modules():
        if hasattr(module, "jitter_noise"):
            module.jitter_noise = 0.5
    overspill.pregate(model)
    inputs: list[tuple[Tensor, Tensor]] = []
    block = model.encoder.block[1].layer[1].mlp
    block.register_forward_pre_hook(lambda _, args: inputs.append((args[0], args[0].clone())))
    model(**make_batch(DEEP_BY_NAME["switch_transformers"], model))
    for given, before in inputs:
        assert torch.equal(given, before)


def test_the_balance_loss_is_that_of_the_gates_in_use() -> None:
    model = make_model(MIXTRAL).train()
    batch = make_batch(MIXTRAL, model) | {"output_router_logits": True}
    plain = copy.deepcopy(model)
    before = plain(**batch).aux_loss  # installs the hooks that record logits
    call_by_hand(plain, 2)
    overspill.pregate(model, 2)
    expected, got = plain(**batch), model(**batch)
    assert got.aux_loss == expected.aux_loss != before
    for mine, theirs in zip(got.router_logits, expected.router_logits, strict=True):
        assert torch.equal(mine, theirs)
    assert_equal(gradients_of(model, batch), gradients_of(plain, batch))


def test_checkpoints_may_be_enabled_before() -> None:
    model = make_model(MIXTRAL).train()
    batch = make_batch(MIXTRAL, model)
    expected = gradients_of(call_by_hand(copy.deepcopy(model), 1), batch)
    model.gradient_checkpointing_enable()
    assert_equal(gradients_of(overspill.pregate(model), batch), expected)


def test_reentrant_checkpoints_are_refused() -> None:
    model = overspill.pregate(make_model(MIXTRAL).train())
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(OrderError, match="use_reentrant=False"):
        model(**make_batch(MIXTRAL, model))


@pytest.mark.parametrize("name", slow_rows(["mixtral", "switch_transformers"], 0))
def test_generation_with_a_cache(name: str, tmp_path: Path) -> None:
    family = DEEP_BY_NAME[name]
    model = make_model(family).eval()
    ids = make_batch(family, model)["input_ids"]
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    conventional = model.generate(ids, **options)
    overspill.pregate(model, 2)
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, **options), expected)
    assert not torch.equal(expected, conventional)
    with closing(overspill.offload(model, **budgets("host", tmp_path))) as twin:
        assert torch.equal(twin.generate(ids, **options), expected)


def test_a_pre_gate_copies_no_dense_weights_of_its_own_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense weights in host memory are copied block by block; this gate consists of modules."""
    family = BY_NAME["hunyuan_v1_moe"]
    copied: list[str] = []
    copy_block = DenseWeights._copy

    def counted(self: DenseWeights, block: Any) -> Any:
        copied.append(block.name)
        return copy_block(self, block)

    monkeypatch.setattr(DenseWeights, "_copy", counted)
    with offloaded(make_model(family).eval(), "disk", tmp_path) as model:
        logits_of(model, family)
        expected, copied = copied, []
        overspill.pregate(model)
        logits_of(model, family)
    assert sorted(copied) == sorted(expected)


def test_the_decoder_inside_may_be_called_by_itself() -> None:
    model = overspill.pregate(make_model(MIXTRAL))
    hidden = model.model(make_batch(MIXTRAL, model)["input_ids"]).last_hidden_state
    torch.testing.assert_close(model.lm_head(hidden), logits_of(model))


def test_an_llm_serves_the_pre_gated_model(tmp_path: Path) -> None:
    model = overspill.pregate(make_model(MIXTRAL).eval())
    prompt = make_batch(MIXTRAL, model)["input_ids"][:1]
    (expected,) = model.generate(prompt, max_new_tokens=5, do_sample=False)
    overspill.save(model, tmp_path / "out")
    with overspill.LLM(tmp_path / "out", device="cpu") as llm:
        params = overspill.SamplingParams(max_tokens=5, temperature=0.0)
        (result,) = llm.generate([prompt[0].tolist()], params)
    assert result.token_ids == expected[prompt.shape[1] :].tolist()


def test_a_served_model_gets_no_pre_gates(tmp_path: Path) -> None:
    """Its LLM has keys and values of the conventional model."""
    model = overspill.offload(make_model(MIXTRAL).eval(), **budgets("host", tmp_path))
    params = overspill.SamplingParams(max_tokens=3, temperature=0.0)
    with closing(model):
        with overspill.LLM(model, context=64) as llm:
            llm.generate([[1, 2, 3]], params)
            with pytest.raises(OrderError, match="being served; close its LLM"):
                overspill.pregate(model)
            assert pregate_level(model) == 0
        overspill.pregate(model)
        with overspill.LLM(model, context=64) as llm:
            llm.generate([[1, 2, 3]], params)


# -- saving and loading --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    slow_rows(["qwen3_moe", "gpt_oss", "switch_transformers", "jamba", "afmoe"], 1, 4),
)
def test_both_models_are_loaded_again(name: str, tmp_path: Path) -> None:
    family = DEEP_BY_NAME.get(name) or BY_NAME[name]
    conventional = make_model(family)
    model = overspill.pregate(copy.deepcopy(conventional))
    train_gates(model)
    overspill.save(model, tmp_path / "out")
    with closing(overspill.load(tmp_path / "out", **budgets("disk", tmp_path))) as again:
        assert pregate_level(again) == 1
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


def test_adapters_are_added_after_pre_gates_and_merged_before_saving(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    with pytest.raises(ConfigError, match="before they are added"):
        overspill.pregate(peft.get_peft_model(make_model(MIXTRAL), config))
    model = overspill.pregate(make_model(MIXTRAL))
    expected = logits_of(model)
    adapted = peft.get_peft_model(model, config)
    torch.testing.assert_close(logits_of(adapted), expected)
    with pytest.raises(ConfigError, match="merge_and_unload"):
        overspill.save(adapted, tmp_path / "out")
    overspill.save(adapted.merge_and_unload(), tmp_path / "out")
    with closing(overspill.load(tmp_path / "out", **budgets("host", tmp_path))) as again:
        torch.testing.assert_close(logits_of(again), expected)


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
    before = logits_of(model, family)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=modules))
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3)
    expected = logits_of(adapted, family)
    assert not torch.allclose(expected, before)
    torch.testing.assert_close(logits_of(adapted.merge_and_unload(), family), expected)

"""Adapters of experts that are merged, loaded and served, against those of peft."""

import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import overspill
from overspill import LLM
from overspill.core.errors import CheckpointError, ConfigError
from tests.models.huggingface.adapters import Adapted, make_adapter, merged_by_peft
from tests.models.huggingface.families import make_model
from tests.models.huggingface.oracle import budgets
from tests.models.huggingface.test_exactness import BY_NAME
from tests.models.huggingface.test_merge import edit, loaded
from tests.serve.models import PROMPTS, plain_generate, tokens_of
from tests.slow import slow_rows

EXPERTS = {"target_parameters": [f"experts.{n}_proj" for n in ("gate_up", "down", "up")]}
ATTENTION = ["q_proj", "o_proj"]
BOTH: dict[str, Any] = {"target_modules": ATTENTION, **EXPERTS}
WEIGHTS = "adapter_model.safetensors"
SERVED: dict[str, Any] = {"device": "cpu", "context": 64, "max_batch": 3, "slots": 2}
pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")


def make(name: str, folder: Path, **options: Any) -> Adapted:
    return make_adapter(BY_NAME[name], folder, **(BOTH | options))


def assert_near(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def check(made: Adapted, auto: str, folder: Path) -> None:
    """Merged, and loaded with every expert or in few slots, the weights are those of peft."""
    base = loaded(made.base, auto)
    done = overspill.merge(made.folder, folder / "out")
    expected = merged_by_peft(made)
    changed = [name for name in base if not torch.equal(base[name], expected[name])]
    assert done.tensors == len(changed)
    assert sum("experts" in name for name in changed) > 3
    assert_near(loaded(folder / "out", auto), expected)
    given = budgets("disk", folder) | {"train": False}
    model = overspill.load(made.base, adapter=made.folder, **given)
    with closing(model.overspill):
        assert_near(model.state_dict(), expected)


@pytest.mark.parametrize(
    "name",
    [
        "mixtral",
        "gpt_oss",
        "qwen3_vl_moe",
        pytest.param("nemotron_h", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        pytest.param("olmoe", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
        pytest.param("glm4_moe", marks=pytest.mark.slow),
        pytest.param("granitemoe", marks=pytest.mark.slow),
    ],
)
def test_weights_are_those_that_peft_merges(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {}
    if name == "mixtral":
        options = {"rank_pattern": {"experts.down_proj": 5}, "use_rslora": True}
    check(make(name, tmp_path, **options), BY_NAME[name].auto, tmp_path)


@pytest.mark.parametrize("name", slow_rows(["switch_transformers", "nllb-moe"], 1))
def test_experts_that_are_modules(name: str, tmp_path: Path) -> None:
    targets = ["wi", "wo"] if "switch" in name else ["fc1", "fc2"]
    made = make_adapter(BY_NAME[name], tmp_path, target_modules=targets)
    check(made, BY_NAME[name].auto, tmp_path)


def test_all_linear_includes_routers(tmp_path: Path) -> None:
    made = make("mixtral", tmp_path, target_modules="all-linear", target_parameters=None)
    assert any("mlp.gate.lora_A" in key for key in load_file(made.folder / WEIGHTS))
    check(made, "AutoModelForCausalLM", tmp_path)


def test_adapters_of_earlier_transformers(tmp_path: Path) -> None:
    """Each expert had modules of its own: peft converts them to stacks of twice the rank."""
    peft: Any = pytest.importorskip("peft")
    made = make("mixtral", tmp_path)
    tensors = {k: v for k, v in load_file(made.folder / WEIGHTS).items() if "experts" not in k}
    for layer in range(2):
        for expert in range(4):
            for name, (rows, columns) in {"w1": (24, 32), "w2": (32, 24), "w3": (24, 32)}.items():
                at = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}"
                tensors[f"{at}.{name}.lora_A.weight"] = 0.3 * torch.randn(3, columns)
                tensors[f"{at}.{name}.lora_B.weight"] = 0.3 * torch.randn(rows, 3)
    save_file(tensors, made.folder / WEIGHTS)
    edit(made.folder, target_modules=[*ATTENTION, "w1", "w2", "w3"], target_parameters=None)
    plain = make_model(BY_NAME["mixtral"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(plain, made.folder).eval()
    expected = [plain_generate(model, prompt) for prompt in PROMPTS]
    with LLM(made.folder, **SERVED) as llm:
        assert llm.model.overspill.layout.ranks == (6, 3)
        assert tokens_of(llm, PROMPTS) == expected
    check(made._replace(model=model), "AutoModelForCausalLM", tmp_path)
    check_one_rank(made, tensors)
    del tensors["base_model.model.model.layers.1.block_sparse_moe.experts.2.w1.lora_A.weight"]
    del tensors["base_model.model.model.layers.1.block_sparse_moe.experts.2.w1.lora_B.weight"]
    save_file(tensors, made.folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"nothing for some of the experts of model.layers.1"):
        overspill.merge(made.folder, tmp_path / "other")


def check_one_rank(made: Adapted, tensors: dict[str, torch.Tensor]) -> None:
    """Other ranks for one expert can be merged, but not be served."""
    at = "base_model.model.model.layers.1.block_sparse_moe.experts.2.w2"
    more = {f"{at}.lora_A.weight": torch.randn(4, 24), f"{at}.lora_B.weight": torch.randn(32, 4)}
    save_file(tensors | more, made.folder / WEIGHTS)
    with pytest.raises(ConfigError, match=r"ranks 3 and 4 for experts of model.layers.1.*merge"):
        LLM(made.folder, **SERVED)
    save_file(tensors, made.folder / WEIGHTS)


@pytest.mark.parametrize("name", slow_rows(["gpt_oss", "qwen3_moe"], 1))
@pytest.mark.parametrize("mode", ["host", "disk"])
def test_served_tokens_are_those_of_peft(name: str, mode: str, tmp_path: Path) -> None:
    """Adapters of experts are in their records."""
    made = make(name, tmp_path)
    expected = [plain_generate(made.model, prompt) for prompt in PROMPTS]
    with made.model.disable_adapter():
        assert [plain_generate(made.model, prompt) for prompt in PROMPTS] != expected
    places: dict[str, Any] = {}
    if mode == "disk":
        places = {"disk": tmp_path, "host_memory": 40_000, "host_slots": 5}
    with LLM(made.folder, **SERVED, **places) as llm:
        engine = llm.model.overspill
        assert engine.layout.ranks == (3, 3)
        assert (engine.bytes_by_tier()["disk"] > 0) is (mode == "disk")
        assert tokens_of(llm, PROMPTS) == expected
        assert_near(llm.model.state_dict(), merged_by_peft(made))
        with pytest.raises(ConfigError, match="adapter beside their weights, and cannot be chan"):
            llm.model.load_state_dict(llm.model.state_dict())


def test_sums_are_rounded_once(tmp_path: Path) -> None:
    made = make("mixtral", tmp_path)
    given = budgets("host", tmp_path) | {"train": False, "dtype": torch.bfloat16}
    model = overspill.load(made.base, adapter=made.folder, **given)
    wide = overspill.load(made.base, adapter=made.folder, **given | {"dtype": torch.float32})
    with closing(model.overspill), closing(wide.overspill):
        for name, value in wide.state_dict().items():
            assert torch.equal(model.state_dict()[name], value.bfloat16()), name


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"target_parameters": ["experts.down_proj"]}, "", "which its target_parameters do not name"),
    ({"target_parameters": "experts"}, "", "target_parameters is not a list"),
    ({"r": 4}, "", r"lora_[AB].weight has the shape"),
    ({}, "layers.0.mlp.experts.lora_A.weight", "without the other matrix"),
    ({}, "layers.1.mlp.experts", "nothing for model.layers.1.mlp.experts.* which its target_param"),
    (
        {"target_parameters": [*EXPERTS["target_parameters"], "experts.down_proj_bias"]},
        "",
        "down_proj_bias, the biases of experts",
    ),
]


@pytest.mark.parametrize(("changes", "missing", "message"), REFUSED)
def test_other_adapters_of_experts_are_refused(
    changes: dict[str, Any], missing: str, message: str, tmp_path: Path
) -> None:
    made = make("gpt_oss", tmp_path)
    tensors = load_file(made.folder / WEIGHTS)
    if missing:
        tensors = {key: value for key, value in tensors.items() if missing not in key}
        save_file(tensors, made.folder / WEIGHTS)
    edit(made.folder, **changes)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        overspill.merge(made.folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises((ConfigError, CheckpointError), match=message):
        LLM(made.folder, **SERVED)

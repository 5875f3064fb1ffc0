"""Merged checkpoints against those of peft."""

import copy
import errno
import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import overspill
from overspill.core.errors import CheckpointError, ConfigError, DiskError
from overspill.models.huggingface import merge as merging
from overspill.models.huggingface.pregate_file import FILE as PREGATES
from overspill.models.pregate import pregate_level
from tests.models.huggingface.adapters import Adapted, make_adapter, merged_by_peft
from tests.models.huggingface.families import FAMILIES, Family, different_cases, make_model
from tests.models.huggingface.oracle import budgets
from tests.models.huggingface.test_pregates import closing
from tests.serve.models import family
from tests.train.finetune.tiny import make_tokenizer

USUAL = {"mixtral", "gpt_oss", "granitemoe", "switch_transformers"}


def loaded(folder: Path, auto: str = "AutoModelForCausalLM", **given: Any) -> Any:
    return getattr(transformers, auto).from_pretrained(folder, **given).state_dict()


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


@pytest.mark.parametrize("family", different_cases(FAMILIES, *({f.name for f in FAMILIES} - USUAL)))
def test_it_equals_what_peft_merges(family: Family, tmp_path: Path) -> None:
    adapted = make_adapter(family, tmp_path)
    done = overspill.merge(adapted.folder, tmp_path / "out")
    assert done.tensors == len(adapted.model.targeted_module_names)
    base, out = loaded(adapted.base, family.auto), loaded(tmp_path / "out", family.auto)
    assert_same(out, merged_by_peft(adapted))
    changed = [name for name in base if not torch.equal(base[name], out[name])]
    assert len(changed) >= done.tensors  # tied ones are counted by each of their names


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "ranks": {
        "rank_pattern": {"layers.0.self_attn.q_proj": 5, r"layers\.\d+\.self_attn\.o_proj": 2}
    },
    "alphas": {
        "rank_pattern": {"v_proj": 6},
        "alpha_pattern": {"^model.layers.1.self_attn.v_proj": 11, "k_proj": 4},
    },
    "rank-stabilized": {"use_rslora": True, "rank_pattern": {"v_proj": 6}},
    "fan in, fan out": {"fan_in_fan_out": True},
    "embeddings": {"target_modules": [*ATTENTION, "embed_tokens", "lm_head"]},
    "saved modules": {"modules_to_save": ["lm_head", "model.norm"]},
    "saved embeddings": {"modules_to_save": ["embed_tokens"]},
    "one layer": {"layers_to_transform": [1], "layers_pattern": "layers"},
}
BIASES: dict[str, dict[str, Any]] = {
    "biases of targets": {"bias": "lora_only"},
    "bias of the adapter": {"lora_bias": True},
}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("name", [*KINDS, *BIASES])
def test_each_kind_of_lora_is_merged_as_by_peft(name: str, tmp_path: Path) -> None:
    options = {"target_modules": ATTENTION, **(KINDS | BIASES)[name]}
    made = make_adapter(family("mixtral" if name in KINDS else "gpt_oss"), tmp_path, **options)
    if name == "fan in, fan out":  # peft corrects it for linear layers
        edit(made.folder, fan_in_fan_out=True)
    overspill.merge(made.folder, tmp_path / "out")
    found, expected = loaded(tmp_path / "out"), merged_by_peft(made)
    assert_same(found, expected)
    base = loaded(made.base)
    assert any(not torch.equal(base[key], found[key]) for key in base)


def test_sums_are_rounded_once(tmp_path: Path) -> None:
    made = make_adapter(family("mixtral"), tmp_path, torch.bfloat16, target_modules=["q_proj"])
    overspill.merge(made.folder, tmp_path / "out")
    found, base = loaded(tmp_path / "out"), loaded(made.base)
    adapter = load_file(made.folder / "adapter_model.safetensors")
    for name in (f"model.layers.{n}.self_attn.q_proj" for n in (0, 1)):
        a, b = (adapter[f"base_model.model.{name}.lora_{x}.weight"].float() for x in "AB")
        exact = base[f"{name}.weight"].float() + (b @ a) * (7 / 3)
        assert found[f"{name}.weight"].dtype == torch.bfloat16
        assert torch.equal(found[f"{name}.weight"], exact.bfloat16())


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = tmp_path_factory.mktemp("original")
    return make_adapter(family("mixtral"), folder, target_modules=["q_proj", "o_proj"])


@pytest.fixture
def adapted(original: Adapted, tmp_path: Path) -> Adapted:
    for folder in (original.base, original.folder):
        shutil.copytree(folder, tmp_path / folder.name)
    edit(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "base"))
    return Adapted(tmp_path / "base", tmp_path / "adapter", copy.deepcopy(original.model))


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_other_files_and_shards_are_those_of_the_base(adapted: Adapted, tmp_path: Path) -> None:
    model: Any = make_model(family("mixtral"))
    model.save_pretrained(adapted.base, max_shard_size="20KB")
    (adapted.base / "model.safetensors").unlink()
    make_tokenizer("of the base").save_pretrained(adapted.base)
    (adapted.base / "training_args.bin").touch()
    before = {file.name: file.read_bytes() for file in adapted.base.iterdir()}
    done = overspill.merge(adapted.folder, tmp_path / "out")
    names = set(before) - {"training_args.bin"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    assert len([name for name in names if name.endswith(".safetensors")]) > 5
    assert done.bytes == sum(len(before[n]) for n in names if n.endswith(".safetensors"))
    for name in names:
        if not name.endswith(".safetensors"):
            assert (tmp_path / "out" / name).read_bytes() == before[name]
    assert_same(loaded(tmp_path / "out"), merged_by_peft(adapted))
    assert {file.name: file.read_bytes() for file in adapted.base.iterdir()} == before


def test_the_tokenizer_is_the_adapters(adapted: Adapted, tmp_path: Path) -> None:
    make_tokenizer("of the base").save_pretrained(adapted.base)
    make_tokenizer().save_pretrained(adapted.folder)
    overspill.merge(adapted.folder, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template is None


def test_only_one_tensor_is_in_memory(
    adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sum(f.stat().st_size for f in adapted.base.glob("*.safetensors"))
    read: list[int] = []
    plain = merging.CheckpointFolder.read

    def counting(self: Any, name: str, offset: int, out: torch.Tensor) -> None:
        read.append(out.nbytes)
        plain(self, name, offset, out)

    monkeypatch.setattr(merging.CheckpointFolder, "read", counting)
    overspill.merge(adapted.folder, tmp_path / "out")
    assert len(read) == 4
    assert max(read) * 10 < whole


def test_a_moved_base_is_given(
    adapted: Adapted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A base of another name may have other weights: it is named."""
    adapted.base.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"base model of the adapter .* is missing: .*--base"):
        overspill.merge(adapted.folder, tmp_path / "out")
    overspill.merge(adapted.folder, tmp_path / "out", base=tmp_path / "moved")
    (line,) = [r.message for r in caplog.records if "was trained on" in r.message]
    assert f"{adapted.base}, and is added to the weights of {tmp_path / 'moved'}" in line
    assert_same(loaded(tmp_path / "out"), merged_by_peft(adapted))


def test_an_adapter_and_its_base_are_downloaded(
    adapted: Adapted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    there = {"org/lora": adapted.folder, "org/base": adapted.base}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(there[name]))
    edit(adapted.folder, base_model_name_or_path="org/base", revision="main")
    done = overspill.merge("org/lora", tmp_path / "out")
    assert not any("was trained on" in record.message for record in caplog.records)
    assert (done.adapter, done.base) == (str(adapted.folder), str(adapted.base))
    assert_same(loaded(tmp_path / "out"), merged_by_peft(adapted))


def test_a_run_stands_for_its_final_adapter(adapted: Adapted, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    adapted.folder.rename(tmp_path / "run" / "best")
    assert overspill.merge(tmp_path / "run", tmp_path / "one").adapter.endswith("best")
    (tmp_path / "run" / "best").rename(tmp_path / "run" / "final")
    (tmp_path / "run" / "best").symlink_to("final")
    assert overspill.merge(tmp_path / "run", tmp_path / "two").adapter.endswith("final")


def test_a_folder_that_is_there_is_not_overwritten(adapted: Adapted, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="already exists"):
        overspill.merge(adapted.folder, adapted.base)
    with pytest.raises(ConfigError, match=r"has no adapter_config.json"):
        overspill.merge(adapted.base, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"holds a LoRA adapter, not a whole model"):
        overspill.merge(adapted.folder, tmp_path / "out", base=adapted.folder)
    assert not (tmp_path / "out").exists()


def test_an_interrupt_leaves_nothing(adapted: Adapted, tmp_path: Path) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    before = set(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        overspill.merge(adapted.folder, tmp_path / "out", progress=interrupted)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", ["copy", "change", "room"])
def test_a_full_disk_leaves_nothing(
    kind: str, adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if kind == "room":
        monkeypatch.setattr("overspill.tiers.aside.disk_free", lambda folder: 1000)
    else:
        where = merging.shutil if kind == "copy" else merging
        monkeypatch.setattr(where, "copyfile" if kind == "copy" else "replace_tensors", full)
    before = set(tmp_path.iterdir())
    with pytest.raises(DiskError, match=r"OUT .*(No space left|has 1000 B free).*another folder"):
        overspill.merge(adapted.folder, tmp_path / "out")
    assert set(tmp_path.iterdir()) == before


def test_pre_gates_of_the_base_stay(adapted: Adapted, tmp_path: Path) -> None:
    model = overspill.pregate(make_model(family("mixtral")))
    model.save_pretrained(adapted.base)
    overspill.merge(adapted.folder, tmp_path / "out")
    given = budgets("gpu", tmp_path) | {"train": False}
    with closing(overspill.load(tmp_path / "out", **given)) as again:
        assert pregate_level(again) == 1
    assert_same(loaded(tmp_path / "out"), merged_by_peft(adapted))
    # beside other weights they are still refused
    shutil.copy(adapted.base / PREGATES, tmp_path / "out")
    with pytest.raises(CheckpointError, match="was saved with another"):
        overspill.load(tmp_path / "out", **given)


# -- refused -------------------------------------------------------------------------------------


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type is IA3; only LORA"),
    ({"use_dora": True}, r"use_dora \(DoRA\)"),
    (
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        r"nothing for .*mlp.experts.gate_up_proj",
    ),
    ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is not supported"),
    ({"layer_replication": [[0, 1], [0, 2]]}, "layer_replication is not supported"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices is not supported"),
    ({"a_later_invention": 3}, "a_later_invention is not supported"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is pissa_niter_4, which changes"),
    ({"init_lora_weights": "olora"}, "init_lora_weights is olora"),
    ({"r": 4}, r"lora_A.weight has the shape \[3, 32\].*\[4, 32\]"),
    ({"r": 0}, "the rank r is 0"),
    ({"r": None}, "the rank r is None"),
    ({"r": True}, "the rank r is True"),
    ({"lora_alpha": float("nan")}, "the alpha lora_alpha is nan"),
    ({"lora_alpha": "16"}, "the alpha lora_alpha is '16'"),
    ({"rank_pattern": {"(": 2}}, "no regular expression"),
    ({"rank_pattern": [2]}, "rank_pattern is not a JSON object"),
    ({"target_modules": ["q_proj", "o_proj", "k_proj"]}, "nothing for .*k_proj, which its target"),
    (
        {"auto_mapping": {"parent_library": "transformers.models.gpt_oss.modeling_gpt_oss"}},
        "its base model is of gpt_oss, and this one of mixtral",
    ),
    ({"base_model_name_or_path": None}, "names no base model.*--base"),
    ({"base_model_name_or_path": 5}, "base_model_name_or_path is not a string"),
    ({"base_model_name_or_path": "a/b", "revision": "v2"}, "revision v2 of a/b; download"),
]


@pytest.mark.parametrize(("changes", "message"), SETTINGS)
def test_settings_that_are_not_supported_are_refused_by_name(
    changes: dict[str, Any], message: str, adapted: Adapted, tmp_path: Path
) -> None:
    edit(adapted.folder, **changes)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        overspill.merge(adapted.folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_adapter_of_another_family_is_refused(tmp_path: Path) -> None:
    """Also if the shapes of all its tensors fit."""
    mixtral = make_adapter(family("mixtral"), tmp_path, target_modules=["q_proj", "gate"])
    make_model(family("gpt_oss")).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="its base model is of mixtral, and this one of gpt_"):
        overspill.merge(mixtral.folder, tmp_path / "out", base=tmp_path / "other")
    with pytest.raises(CheckpointError, match="its base model is of mixtral, and this one of gpt_"):
        overspill.load(
            tmp_path / "other", adapter=mixtral.folder, train=False, **budgets("host", tmp_path)
        )
    edit(mixtral.folder, auto_mapping=None)  # as peft writes it for a task
    with pytest.raises(CheckpointError, match="its base model is of mixtral, and this one of gpt_"):
        overspill.merge(mixtral.folder, tmp_path / "out", base=tmp_path / "other")
    # peft ignores usual names that the base model lacks, and those of earlier transformers
    edit(mixtral.folder, target_modules=["q_proj", "gate_proj", "w1", "block_sparse_moe.gate"])
    assert overspill.merge(mixtral.folder, tmp_path / "out").tensors > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(
    value: float, adapted: Adapted, tmp_path: Path
) -> None:
    path = adapted.folder / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[f"{Q}.lora_B.weight"][1, 2] = value
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"q_proj.lora_B.weight has values that are NaN or"):
        overspill.merge(adapted.folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


OLD = "base_model.model.model.layers.0.block_sparse_moe.experts"
Q = "base_model.model.model.layers.0.self_attn.q_proj"
KEYS: list[tuple[str, str, str]] = [
    (f"{Q}.lora_magnitude_vector", "", "DoRA is not supported"),
    (f"{Q}.lora_A.weight", "-", "without the other matrix"),
    ("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", "", "mixtral has no model."),
    ("base_model.model.model.layers.0.mlp.experts.lora_A.weight", "", "parameters do not name"),
    (f"{OLD}.1.w1.lora_A.weight", "", "without the other matrix"),
    (f"{OLD}.9.w1.lora_A.weight", "", "each layer has 4 experts"),
    ("base_model.model.model.layers.0.mlp.experts.down_proj", "", "replaces the experts"),
    (f"{Q}.lora_B.bias", "", "a layer without a bias"),
    ("base_model.model.model.norm.weight", "", r"norm.weight has the shape \[2, 2\].*\[32\]"),
]


@pytest.mark.parametrize(("key", "how", "message"), KEYS)
def test_tensors_of_other_kinds_and_models_are_refused(
    key: str, how: str, message: str, adapted: Adapted, tmp_path: Path
) -> None:
    path = adapted.folder / "adapter_model.safetensors"
    tensors = load_file(path)
    if how == "-":
        del tensors[key]
    else:
        tensors[key] = torch.ones(2, 2)
    save_file(tensors, path)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        overspill.merge(adapted.folder, tmp_path / "out")


def test_the_adapter_of_a_wider_model_is_refused(adapted: Adapted, tmp_path: Path) -> None:
    wider = family("mixtral").build()
    wider.num_attention_heads = 8
    transformers.MixtralForCausalLM(wider).save_pretrained(tmp_path / "wider")
    with pytest.raises(CheckpointError, match=r"lora_A.weight has the shape \[3, 32\].*\[3, 64\]"):
        overspill.merge(adapted.folder, tmp_path / "out", base=tmp_path / "wider")


def test_tied_weights_are_refused(tmp_path: Path) -> None:
    tied = Family("mixtral", functools.partial(tied_mixtral))
    made = make_adapter(tied, tmp_path, target_modules=["lm_head"])
    with pytest.raises(ConfigError, match=r"lm_head.weight, which is also model.embed_tokens"):
        overspill.merge(made.folder, tmp_path / "out")


def tied_mixtral() -> Any:
    config = family("mixtral").build()
    config.tie_word_embeddings = True
    return config


def test_gates_below_pre_gates_are_refused(adapted: Adapted, tmp_path: Path) -> None:
    overspill.pregate(make_model(family("mixtral"))).save_pretrained(adapted.base)
    path = adapted.folder / "adapter_model.safetensors"
    gate = "base_model.model.model.layers.1.block_sparse_moe.gate"  # as in earlier transformers
    added = {f"{gate}.lora_A.weight": torch.ones(3, 32), f"{gate}.lora_B.weight": torch.ones(4, 3)}
    save_file(load_file(path) | added, path)
    with pytest.raises(
        ConfigError, match=r"layers.1.mlp.gate.weight, and .* has a pre-gate in its"
    ):
        overspill.merge(adapted.folder, tmp_path / "out")
    (adapted.base / PREGATES).unlink()
    assert overspill.merge(adapted.folder, tmp_path / "out").tensors == 5


def test_damaged_files_are_named(adapted: Adapted, tmp_path: Path) -> None:
    weights, config = (
        adapted.folder / name for name in ("adapter_model.safetensors", "adapter_config.json")
    )
    content = weights.read_bytes()
    weights.write_bytes(content[:-8])
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors is corrupt: .*truncated"):
        overspill.merge(adapted.folder, tmp_path / "out")
    weights.rename(weights.with_suffix(".bin").with_name("adapter_model.bin"))
    with pytest.raises(CheckpointError, match=r"adapter_model.bin is pickled"):
        overspill.merge(adapted.folder, tmp_path / "out")
    weights.write_bytes(content)
    for text in ("{", "[]", "[" * 100_000):
        config.write_text(text)
        with pytest.raises(CheckpointError, match=r"adapter_config.json.*again"):
            overspill.merge(adapted.folder, tmp_path / "out")

"""Bad checkpoints: one clear line, before any memory is taken."""

import json
import mmap
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import overspill
from overspill.core.errors import CheckpointError, ConfigError
from overspill.models.huggingface.folder import CheckpointFolder
from tests.models.huggingface.families import make_model
from tests.models.huggingface.oracle import budgets
from tests.models.huggingface.test_exactness import BY_NAME


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "mixtral"
    make_model(BY_NAME["mixtral"]).save_pretrained(folder, max_shard_size="40KB")
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "mixtral"
    shutil.copytree(original, copy)
    return copy


def load(folder: Path, **more: Any) -> Any:
    return overspill.load(folder, **budgets("host", folder), **more)


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere does not exist; give the folder") as error:
        load(tmp_path / "nowhere")
    one_line(error)


def test_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json") as error:
        load(folder)
    one_line(error)


def test_config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be used") as error:
        load(folder)
    one_line(error)


def test_unknown_model_type(folder: Path) -> None:
    edit_config(folder, model_type="no_such_model", architectures=["NoSuchModel"])
    with pytest.raises(CheckpointError, match=r"no_such_model") as error:
        load(folder)
    one_line(error)


def test_dense_model(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "dense")
    with pytest.raises(ConfigError, match=r"is a dense model \(llama\)") as error:
        load(folder / "dense")
    one_line(error)


def test_quantized_checkpoint(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "hqq"})
    with pytest.raises(ConfigError, match=r"is quantized \(hqq\)") as error:
        load(folder)
    one_line(error)


def test_pickles_are_refused_with_the_command_that_converts_them(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        CheckpointError,
        match=r"safetensors only.*import .*MixtralForCausalLM as M.*save_pretrained",
    ):
        load(folder)


@pytest.mark.parametrize(
    "value",
    [None, 7, [], {"a": 1}, "", "/etc/passwd", "../x.safetensors", "a/../../x", "a\nb", "\ud800"],
)
def test_a_weight_map_with_a_value_that_is_no_file_of_the_folder(
    folder: Path, value: object
) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = value
    file.write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=rf"index\.json: weight_map .*{name}.*download it"
    ) as error:
        load(folder)
    one_line(error)


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[" * 100_000,
        "[]",
        "7",
        "{}",
        '{"weight_map": null}',
        '{"weight_map": []}',
        '{"weight_map": {}}',
    ],
)
def test_an_index_without_a_usable_weight_map(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json.*weight_map.*download it") as error:
        load(folder)
    one_line(error)


def test_a_shard_that_the_weight_map_names_and_that_is_missing(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name} is missing; download it") as error:
        load(folder)
    one_line(error)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "no_such_function"}, "KeyError: 'no_such_function'"),
        ({"architectures": ["BertModel"]}, "AttributeError: .*type_vocab_size"),
        ({"num_local_experts": -1}, "RuntimeError: .*negative dimension"),
    ],
)
def test_a_config_that_transformers_cannot_build(
    folder: Path, change: dict[str, Any], reason: str
) -> None:
    edit_config(folder, **change)
    with pytest.raises(
        CheckpointError, match=rf"mixtral cannot be .*{reason}.*config\.json"
    ) as error:
        load(folder)
    one_line(error)


def test_no_experts_in_the_config(folder: Path) -> None:
    edit_config(folder, num_local_experts=0)
    with pytest.raises(ConfigError, match="num_local_experts") as error:
        load(folder)
    one_line(error)


def test_shards_share_one_buffer_per_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, numel = 12, 1 << 18  # tensors of 1 MiB are read directly
    index = {f"tensor{i}": f"{i}.safetensors" for i in range(shards)}
    for i, (name, file) in enumerate(index.items()):
        save_file({name: torch.full((numel,), float(i))}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    allocated: list[int] = []
    allocate = mmap.mmap

    def counted(number: int, size: int) -> mmap.mmap:
        allocated.append(size)
        return allocate(number, size)

    monkeypatch.setattr(mmap, "mmap", counted)
    threads = 2
    with CheckpointFolder(tmp_path) as checkpoint, ThreadPoolExecutor(threads) as pool:

        def read(i: int) -> bool:
            out = torch.empty(numel)
            checkpoint.read(f"tensor{i}", 0, out)
            return bool(out.eq(i).all())

        assert all(pool.map(read, [*range(shards)] * 2))
    assert len(allocated) <= threads + 1  # the thread that opens the files may have one


def test_no_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        load(folder)


def test_missing_shard(folder: Path) -> None:
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.unlink()
    with pytest.raises(CheckpointError, match=rf"{last.name} is missing; download"):
        load(folder)


def test_truncated_shard(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=rf"{file.name} is corrupt: it is truncated"):
        load(folder)


def change_tensor(folder: Path, ending: str, value: torch.Tensor | None) -> str:
    """Replaces (or removes) the first tensor whose name ends so."""
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = next(name for name in sorted(content["weight_map"]) if name.endswith(ending))
    file = folder / content["weight_map"][name]
    tensors = load_file(file)
    if value is None:
        del tensors[name], content["weight_map"][name]
        index.write_text(json.dumps(content))
    else:
        tensors[name] = value
    save_file(tensors, file, {"format": "pt"})
    return name


@pytest.mark.parametrize("ending", ["experts.1.w1.weight", "experts.0.w2.weight"])
def test_expert_that_is_missing(folder: Path, ending: str) -> None:
    change_tensor(folder, ending, None)
    with pytest.raises(CheckpointError, match=r"contains 3 of the 4 experts"):
        load(folder)


def test_all_experts_but_one_missing(folder: Path) -> None:
    for number in (1, 2, 3):
        change_tensor(folder, f"layers.1.block_sparse_moe.experts.{number}.w2.weight", None)
    with pytest.raises(CheckpointError, match=r"contains 1 of the 4 experts"):
        load(folder)


def test_layer_without_experts(folder: Path) -> None:
    edit_config(
        folder,
        num_hidden_layers=json.loads((folder / "config.json").read_text())["num_hidden_layers"] + 1,
    )
    with pytest.raises(CheckpointError, match=r"nothing for model\.layers\.\d"):
        load(folder)


@pytest.mark.parametrize("ending", ["experts.1.w1.weight", "experts.0.w2.weight"])
def test_expert_of_another_shape(folder: Path, ending: str) -> None:
    change_tensor(folder, ending, torch.zeros(3, 5))
    with pytest.raises(CheckpointError, match=r"config\.json says .*not of the same model"):
        load(folder)


def test_dense_tensor_of_another_shape(folder: Path) -> None:
    name = change_tensor(folder, "q_proj.weight", torch.zeros(3, 5))
    with pytest.raises(CheckpointError, match=rf"gives {name} the shape \[3, 5\]"):
        load(folder)


def test_dense_tensor_that_is_missing(folder: Path) -> None:
    change_tensor(folder, "q_proj.weight", None)
    with pytest.raises(CheckpointError, match=r"nothing for .*q_proj\.weight"):
        load(folder)


def test_index_that_names_what_is_not_there(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost"] = sorted(content["weight_map"].values())[0]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"names ghost, which .* does not contain"):
        load(folder)


def test_config_fields_can_be_replaced(folder: Path) -> None:
    model = load(folder, router_aux_loss_coef=0.5)
    assert model.config.router_aux_loss_coef == 0.5
    model.overspill.close()
    with pytest.raises(ConfigError, match=r"no_such=1 is not a field of MixtralConfig"):
        load(folder, no_such=1)


def test_dtypes_are_those_of_torch(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"dtype='bf16' is not .* give 'bfloat16'"):
        load(folder, dtype="bf16")


def test_budget_too_small(folder: Path) -> None:
    with pytest.raises(overspill.OverspillError, match=r"--gpu-memory .* is too small"):
        overspill.load(folder, gpu_memory="10KB", device="cpu", quiet=True)

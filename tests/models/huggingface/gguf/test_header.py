"""Bad GGUF files are refused by name, with what to do."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from overspill.core.errors import CheckpointError, ConfigError
from overspill.models.huggingface.checks import check_checkpoint, find_folder, find_gguf
from overspill.models.huggingface.folder import CheckpointFolder
from overspill.models.huggingface.gguf import header, weights
from overspill.models.huggingface.gguf.header import TYPES, read_header
from tests.models.huggingface.gguf.cases import CASES, make_case


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    make_case(CASES["mixtral"], path)
    return path.read_bytes()


def small(path: Path, architecture: str = "llama", experts: int = 4, **values: Any) -> Path:
    """A file without tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint32(f"{architecture}.expert_count", experts)
    for name, value in values.items():
        writer.add_string(f"{architecture}.{name}".replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_types_are_those_of_the_package() -> None:
    for number, known in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == known


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "is corrupt or truncated: its header"),
        (lambda data: b"PK" + data[2:], "is not a GGUF file: it does not begin with GGUF"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "is big-endian; versions 2"),
        (lambda data: data[:4] + struct.pack("<I", 9) + data[8:], "has version 9 of GGUF"),
        (lambda data: data[:200], "is corrupt or truncated: its header"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "is corrupt or truncated: its header"),
        (lambda data: data[:-100], r"is truncated: \d+ bytes instead of \d+"),
        (lambda data: data.replace(b"blk.0.attn_norm", b"blk.1.attn_norm"), "a tensor twice"),
    ],
)
def test_damaged_files(
    change: Callable[[bytes], bytes], message: str, model: bytes, tmp_path: Path
) -> None:
    (tmp_path / "bad.gguf").write_bytes(change(model))
    with pytest.raises(CheckpointError, match=rf"bad\.gguf .*{message}.*download it again$"):
        check_checkpoint(tmp_path / "bad.gguf")


def test_a_type_that_is_not_known(model: bytes, tmp_path: Path) -> None:
    """The type follows the two dimensions of the tensor."""
    at = model.index(b"output.weight") + len(b"output.weight") + 4 + 16
    (tmp_path / "new.gguf").write_bytes(model[:at] + struct.pack("<I", 77) + model[at + 4 :])
    with pytest.raises(CheckpointError, match=r"output\.weight has type 77, .* such as Q4_K_M"):
        check_checkpoint(tmp_path / "new.gguf")


def test_rarer_types_need_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_case(CASES["deepseek-v2"], tmp_path / "model.gguf")  # has Q5_1
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "gguf", None)
        message = r"ffn_down_exps\.weight has type Q5_1, .* install it: pip install gguf$"
        with pytest.raises(ConfigError, match=message):
            CheckpointFolder(tmp_path / "model.gguf")
    stored = read_header(tmp_path / "model.gguf").tensors["output.weight"]
    monkeypatch.setitem(TYPES, 99, ("IQ9", 32, 8))
    with pytest.raises(ConfigError, match=r"IQ9, .*newer version: pip install --upgrade gguf$"):
        weights.check_types([header.StoredTensor("a", "IQ9", (1, 32), stored.file, 0, 8)])


def test_missing_and_renamed_files(tmp_path: Path) -> None:
    make_case(CASES["mixtral"], tmp_path / "model.gguf", split_max_tensors=9)
    first, second, *_ = sorted(tmp_path.glob("*.gguf"))
    count = len(list(tmp_path.glob("*.gguf")))
    content = second.read_bytes()
    second.unlink()
    message = rf"model-00002-of-0000{count}\.gguf is missing, one of the {count} files"
    for path in (first, tmp_path):
        with pytest.raises(CheckpointError, match=message):
            check_checkpoint(path)
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=r"00002-of.* is part 1 of .*original names"):
        check_checkpoint(first)
    second.write_bytes(content)
    alone = first.rename(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match=r"alone\.gguf is part 1 of .*original names"):
        check_checkpoint(alone)


def test_a_missing_file_of_a_folder_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: bytes
) -> None:
    folder = tmp_path / "models" / "mine"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    missing = ("models/wrong.gguf", "models/mine/wrong.gguf", folder / "wrong.gguf")
    for name in missing:
        with pytest.raises(ConfigError, match=r"wrong\.gguf does not exist; give the folder of"):
            check_checkpoint(name)
    (folder / "Right.GGUF").write_bytes(model)
    for name in missing[1:]:
        with pytest.raises(ConfigError, match=r"does not exist; .*mine has Right\.GGUF$"):
            find_folder(name)
    assert find_gguf(folder) == folder / "Right.GGUF"


def test_models_that_are_not_read(tmp_path: Path, model: bytes) -> None:
    dense = small(tmp_path / "dense.gguf", "qwen3", experts=0)
    with pytest.raises(ConfigError, match=r"dense\.gguf is a dense model \(qwen3\)"):
        check_checkpoint(dense)
    with pytest.raises(ConfigError, match=r"is a model of dbrx; Overspill reads .*qwen3moe, "):
        check_checkpoint(small(tmp_path / "dbrx.gguf", "dbrx"))
    with pytest.raises(CheckpointError, match=r"no hidden_size, .* metadata; put the config\.json"):
        check_checkpoint(small(tmp_path / "empty.gguf"))
    long = small(tmp_path / "long.gguf", rope__scaling__type="longrope")
    with pytest.raises(ConfigError, match=r"scales rotary positions in another way \(longrope\)"):
        check_checkpoint(long)
    with pytest.raises(ConfigError, match=r"has 4 GGUF models \(dbrx\.gguf, .*give the file of"):
        check_checkpoint(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.gguf").write_bytes(model)
    (other / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 4}))
    with pytest.raises(ConfigError, match=r"is a model of llama, and the config\.json .*qwen3_moe"):
        check_checkpoint(other / "model.gguf")


def test_tensors_that_are_not_known(tmp_path: Path, model: bytes) -> None:
    changed = model.replace(b"blk.0.attn_norm", b"blk.0.attn_cook")
    (tmp_path / "model.gguf").write_bytes(changed)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_cook\.weight .*is not a tensor of"):
        CheckpointFolder(find_folder(tmp_path / "model.gguf"))

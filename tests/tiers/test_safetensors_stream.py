import os
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from overspill.core.errors import CheckpointError, DiskError
from overspill.tiers.safetensors_stream import (
    StreamReader,
    StreamWriter,
    TensorSpec,
    replace_tensors,
)


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tensor.dtype, tuple(tensor.shape))


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        "layer.w_in": torch.randn(4, 6, 5).bfloat16(),
        "layer.low": torch.randint(-9, 9, (4, 30), dtype=torch.int16),
        "norm": torch.randn(7),
        "step": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "flag": torch.tensor([True, False, True]),
    }


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with StreamWriter(path, {name: _spec(t) for name, t in tensors.items()}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def test_the_safetensors_library_reads_files_written_in_pieces(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    path = tmp_path / "a.safetensors"
    specs = {name: _spec(tensor) for name, tensor in tensors.items()}
    pieces = [
        (name, start, tensor.view(-1)[start : start + 7])
        for name, tensor in tensors.items()
        for start in range(0, tensor.numel(), 7)
    ]
    random.shuffle(pieces)
    with StreamWriter(path, specs, {"format": "pt"}) as writer:
        for name, offset, piece in pieces:
            writer.write_piece(name, offset, piece)
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_files_of_the_safetensors_library_are_read_in_slices(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    path = tmp_path / "a.safetensors"
    save_file(tensors, path, {"by": "someone"})
    with StreamReader(path) as reader:
        assert reader.metadata == {"by": "someone"}
        for name, tensor in tensors.items():
            assert torch.equal(reader.read(name), tensor)
        part = torch.empty(8, dtype=torch.int16)
        reader.read_piece("layer.low", 11, part)
    assert torch.equal(part, tensors["layer.low"].view(-1)[11:19])


def test_a_piece_of_wrong_dtype_or_offset_is_an_error(tmp_path: Path) -> None:
    specs = {"a": TensorSpec(torch.float32, (4,))}
    with (
        pytest.raises(ValueError, match="does not fit at 2"),
        StreamWriter(tmp_path / "a", specs) as writer,
    ):
        writer.write_piece("a", 2, torch.zeros(3))
    with (
        pytest.raises(ValueError, match="bfloat16 does not fit"),
        StreamWriter(tmp_path / "a", specs) as writer,
    ):
        writer.write_piece("a", 0, torch.zeros(4, dtype=torch.bfloat16))


def test_closing_with_an_unwritten_tensor_is_an_error(tmp_path: Path) -> None:
    specs = {"a": TensorSpec(torch.float32, (4,)), "b": TensorSpec(torch.float32, (2,))}
    with (
        pytest.raises(ValueError, match="b is not completely written"),
        StreamWriter(tmp_path / "a", specs) as writer,
    ):
        writer.write("a", torch.zeros(4))


def test_every_truncation_is_detected(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "a.safetensors"
    _write(path, tensors)
    whole = path.read_bytes()
    for length in range(0, len(whole), 13):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"a\.safetensors is corrupt.*resume"):
            StreamReader(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(CheckpointError, match="has extra bytes"):
        StreamReader(path)


@pytest.mark.parametrize(
    "header",
    [
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1]}}',
        b'{"a": 3}',
        b"[1, 2]",
        b'{"a": ',
        b'{"a": ' + b"[" * 100_000,
    ],
)
def test_a_broken_header_is_a_clear_error(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match="is corrupt"):
        StreamReader(path)


def test_a_full_disk_is_detected_before_the_first_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match=r"failed \(No space left on device\); free some space"):
        StreamWriter(tmp_path / "a", {"a": TensorSpec(torch.float32, (4,))})


def test_an_interrupt_before_the_first_tensor_closes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        StreamWriter(tmp_path / "x.safetensors", {"x": TensorSpec(torch.float32, (3,))})
    opened = {os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()}
    assert str(tmp_path / "x.safetensors") not in opened


def test_a_replaced_tensor_leaves_the_others_and_the_header(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    path = tmp_path / "a.safetensors"
    save_file(tensors, path, {"format": "pt"})
    size = path.stat().st_size
    new = {"layer.w_in": torch.randn(6, 4, 5).bfloat16().transpose(0, 1), "step": torch.tensor(4.0)}
    replace_tensors(path, new.items())
    found = load_file(path)
    assert all(torch.equal(found[name], (tensors | new)[name]) for name in tensors)
    assert path.stat().st_size == size
    for wrong in (torch.zeros(8), torch.zeros(7).bfloat16()):
        with pytest.raises(ValueError, match="norm is"):
            replace_tensors(path, [("norm", wrong)])

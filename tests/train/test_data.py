import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from overspill.core.errors import ConfigError, DiskError
from overspill.train.data import TokenFile, Windows, find_files, split, tokenize
from overspill.train.tokenizer import ByteTokenizer


def test_a_folder_gives_its_text_files_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.py", "deep/c.md", "image.png", ".git/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    names = [str(file.relative_to(tmp_path)) for file in find_files(str(tmp_path))]
    assert names == ["a.py", "b.txt", "deep/c.md"]


def test_missing_and_empty_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data /no/such does not exist"):
        find_files("/no/such")
    with pytest.raises(ConfigError, match="has no text file"):
        find_files(str(tmp_path))


def test_the_standard_library_is_text_on_every_machine() -> None:
    files = find_files("stdlib")
    size = sum(file.stat().st_size for file in files)
    assert 2**20 < size <= 32 * 2**20
    assert files == find_files("stdlib")
    assert not any({"test", "tests", "site-packages"} & set(file.parts) for file in files)


def test_tokens_are_the_documents_with_a_separator_after_each(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab\nc")
    with gzip.open(tmp_path / "b.txt.gz", "wt") as out:
        out.write("é")
    found = tokenize(find_files(str(tmp_path)), ByteTokenizer(), tmp_path / "cache")
    assert found.tokens.tolist() == [97, 98, 10, 99, 256, 0xC3, 0xA9, 256]


def test_blocks_of_lines_do_not_change_the_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n" * 10)
    files = find_files(str(tmp_path / "a.txt"))
    whole = tokenize(files, ByteTokenizer(), tmp_path / "1")
    blocks = tokenize(files, ByteTokenizer(), tmp_path / "2", block_chars=5)
    assert blocks.tokens.tolist() == whole.tokens.tolist()
    assert blocks.digest == whole.digest


def test_the_cache_is_used_until_a_file_changes(tmp_path: Path) -> None:
    source, said = tmp_path / "a.txt", list[str]()
    source.write_text("first")
    cache = tmp_path / "cache"
    before = tokenize([source], ByteTokenizer(), cache, said.append)
    again = tokenize([source], ByteTokenizer(), cache, said.append)
    assert len(said) == 1
    assert again.digest == before.digest
    source.write_text("other")
    os.utime(source, ns=(1, 1))
    changed = tokenize([source], ByteTokenizer(), cache, said.append)
    assert len(said) == 2
    assert changed.digest != before.digest
    assert bytes(changed.tokens[:5].tolist()) == b"other"


@pytest.mark.parametrize(("suffix", "size"), [("npy", 130), ("npy", 0), ("json", 3)])
def test_a_truncated_cache_is_named_with_the_fix(tmp_path: Path, suffix: str, size: int) -> None:
    source, cache = tmp_path / "a.txt", tmp_path / "cache"
    source.write_text("some text")
    tokenize([source], ByteTokenizer(), cache)
    (file,) = cache.glob(f"*.{suffix}")
    os.truncate(file, size)
    message = r"--cache: \S+\.npy is truncated or corrupt; remove it and \S+\.json"
    with pytest.raises(DiskError, match=message):
        tokenize([source], ByteTokenizer(), cache)


def test_the_cache_is_not_written_through_a_link(tmp_path: Path) -> None:
    """Others may write to a shared cache and guess the name of a process's temporary file."""
    source, cache, precious = tmp_path / "a.txt", tmp_path / "cache", tmp_path / "precious"
    source.write_text("some text")
    precious.write_text("keep")
    expected = tokenize([source], ByteTokenizer(), cache).tokens.tolist()
    for file in list(cache.iterdir()):
        (cache / f"{file.stem}.{os.getpid()}.tmp").unlink(missing_ok=True)
        (cache / f"{file.stem}.{os.getpid()}.tmp").symlink_to(precious)
        file.unlink()
    assert tokenize([source], ByteTokenizer(), cache).tokens.tolist() == expected
    assert precious.read_text() == "keep"


def test_a_broken_gzip_file_is_named_and_leaves_no_cache(tmp_path: Path) -> None:
    source = tmp_path / "a.gz"
    source.write_bytes(gzip.compress(b"text" * 1000)[:-20])
    with pytest.raises(ConfigError, match=r"a\.gz cannot be read"):
        tokenize([source], ByteTokenizer(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_targets_are_the_inputs_one_token_later() -> None:
    windows = Windows(np.arange(11, dtype=np.uint16), seq_len=3)
    inputs, targets = windows.batch([2, 0])
    assert len(windows) == 3
    assert inputs.tolist() == [[6, 7, 8], [0, 1, 2]]
    assert targets.tolist() == [[7, 8, 9], [1, 2, 3]]


def test_the_split_keeps_at_least_one_sequence_apart() -> None:
    tokens = TokenFile(np.arange(100, dtype=np.uint16), "digest")
    found = split(tokens, seq_len=9, seed=0, source="x")
    assert len(found.eval) == 1
    seen = {int(t) for window in range(len(found.train)) for t in found.train.batch([window])[1][0]}
    held_out = {int(t) for t in found.eval.batch([0])[1][0]}
    assert not seen & held_out
    assert len(list(found.eval_batches(count=4, size=8))) == 1


def test_too_little_text_is_named() -> None:
    tokens = TokenFile(np.arange(30, dtype=np.uint16), "digest")
    with pytest.raises(ConfigError, match=r"--data x has 30 tokens.*--seq-len 16 need 34"):
        split(tokens, seq_len=16, seed=0, source="x")

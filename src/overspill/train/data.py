"""The training data: files, their cached tokens, and the windows that a run reads."""

import gzip
import hashlib
import json
import os
import sysconfig
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import torch

from overspill.core.errors import ConfigError, DiskError
from overspill.core.json_text import parse_json
from overspill.train.batch_order import BatchOrder
from overspill.train.tokenizer import Tokenizer

STDLIB = "stdlib"
_STDLIB_BYTES = 32 * 2**20
_STDLIB_SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_SUFFIXES = {
    ".txt", ".md", ".rst", ".tex", ".html", ".csv", ".json", ".jsonl", ".gz",
    ".py", ".pyi", ".c", ".h", ".cpp", ".hpp", ".cc", ".cu", ".rs", ".go", ".java", ".js", ".ts",
    ".sh", ".toml", ".yaml", ".yml",
}  # fmt: skip
PLAIN_TEXT = _SUFFIXES - {".csv", ".json", ".jsonl", ".gz"}
"""Endings of files that are text as a whole."""
_BLOCK_CHARS = 2**24
_EVAL_SHARE = 0.02


def find_files(source: str) -> list[Path]:
    """The text files of `source` (a file, a folder or "stdlib"), in a fixed order."""
    if source == STDLIB:
        return _stdlib_files()
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(
            f"--data {source} does not exist; give a text file, a folder, or omit the flag to "
            "train on the sources of Python's standard library"
        )
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file()
        and file.suffix.lower() in _SUFFIXES
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        kinds = " ".join(sorted(_SUFFIXES))
        raise ConfigError(f"--data {source} has no text file; supported endings are {kinds}")
    return files


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - _STDLIB_SKIP  # most of the files are there
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    files, size = [], 0
    for file in sorted(found):
        size += file.stat().st_size
        if size > _STDLIB_BYTES:
            break
        files.append(file)
    if not files:
        raise ConfigError(f"found no Python source in {root}; give text with --data")
    return files


def read_blocks(
    file: Path, characters: int, flag: str = "--data", errors: str = "replace"
) -> Iterator[str]:
    """The text of `file` in blocks of whole lines: a file may be larger than memory. `errors` is
    the treatment of bytes that are not UTF-8, as for `open`."""
    opener: Callable[..., IO[str]] = gzip.open if file.suffix.lower() == ".gz" else open
    try:
        with opener(file, "rt", encoding="utf-8-sig", errors=errors) as handle:
            while lines := handle.readlines(characters):
                yield "".join(lines)
    except (OSError, EOFError, UnicodeError, zlib.error) as error:
        raise ConfigError(f"{flag}: {file} cannot be read ({error}); repair or remove it") from None


@dataclass(frozen=True)
class TokenFile:
    """All tokens of a source, memory-mapped, and their digest."""

    tokens: npt.NDArray[np.generic]
    digest: str


def tokenize(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    cache: Path,
    progress: Callable[[str], None] = lambda line: None,
    block_chars: int = _BLOCK_CHARS,
) -> TokenFile:
    """The tokens of `files`, from the cache if neither files nor tokenizer have changed."""
    key = _cache_key(files, tokenizer)
    array_path, facts_path = cache / f"{key}.npy", cache / f"{key}.json"
    if not facts_path.exists():
        progress(f"tokenizing {len(files)} files ({tokenizer.name})")
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _write_tokens(files, tokenizer, array_path, facts_path, block_chars)
        except OSError as error:
            raise DiskError(
                f"--cache {cache}: the tokens cannot be written ({error.strerror}); give a folder "
                "with enough space"
            ) from error
    try:
        facts = parse_json(facts_path.read_text())
        tokens = np.load(array_path, mmap_mode="r", allow_pickle=False)
        return TokenFile(tokens=tokens, digest=str(facts["digest"]))
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise DiskError(
            f"--cache: {array_path} is truncated or corrupt; remove it and {facts_path.name}"
        ) from error


def _cache_key(files: Sequence[Path], tokenizer: Tokenizer) -> str:
    key = hashlib.blake2b(tokenizer.fingerprint.encode(), digest_size=16)
    for file in files:
        stat = file.stat()
        key.update(f"{file.absolute()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return key.hexdigest()


def _write_tokens(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    array_path: Path,
    facts_path: Path,
    block_chars: int,
) -> None:
    """Streams the tokens into `array_path`; `facts_path` is written last and marks it complete."""
    dtype = np.dtype(np.uint16 if tokenizer.ids <= 2**16 else np.uint32)
    separator = [] if tokenizer.separator is None else [tokenizer.separator]
    digest, count = hashlib.blake2b(digest_size=16), 0
    # no other process, nor another user of a shared cache, has these names
    aside, facts_aside = (
        p.with_suffix(f".{uuid.uuid4().hex}.tmp") for p in (array_path, facts_path)
    )
    try:
        with open(aside, "xb") as out:
            _write_npy_header(out, dtype, 0)
            for file in files:
                for block in read_blocks(file, block_chars):
                    ids = tokenizer.encode(block).astype(dtype, copy=False).tobytes()
                    digest.update(ids)
                    count += len(ids) // dtype.itemsize
                    out.write(ids)
                end = np.asarray(separator, dtype=dtype).tobytes()
                digest.update(end)
                count += len(separator)
                out.write(end)
            # numpy pads its header: the length can be filled in afterwards.
            out.seek(0)
            _write_npy_header(out, dtype, count)
        os.replace(aside, array_path)
        facts_aside.write_text(json.dumps({"digest": digest.hexdigest(), "tokens": count}))
        os.replace(facts_aside, facts_path)
    finally:
        aside.unlink(missing_ok=True)
        facts_aside.unlink(missing_ok=True)


def _write_npy_header(out: IO[bytes], dtype: "np.dtype[np.generic]", count: int) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    np.lib.format.write_array_header_1_0(out, {**header, "shape": (count,)})


class Windows:
    """Sequences of `seq_len` tokens, and their targets one token later."""

    def __init__(self, tokens: npt.NDArray[np.generic], seq_len: int) -> None:
        self._tokens = tokens
        self.seq_len = seq_len

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self.seq_len)

    def batch(self, windows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the windows with these numbers, int64 [len(windows), seq_len]
        each."""
        length = self.seq_len + 1
        starts = [window * self.seq_len for window in windows]
        rows = np.stack([self._tokens[start : start + length] for start in starts])
        both = torch.from_numpy(rows.astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


@dataclass(frozen=True)
class TokenData:
    """A source, split into training and evaluation windows."""

    train: Windows
    eval: Windows
    order: BatchOrder
    digest: str
    n_tokens: int

    def train_batch(self, position: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `size` sequences after the first `position` ones of the run."""
        return self.train.batch(self.order.take_across(position, size))

    def eval_batches(self, count: int, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The first `count` batches of the evaluation text."""
        for first in range(0, min(count * size, len(self.eval)), size):
            yield self.eval.batch(range(first, min(first + size, len(self.eval))))


def split(token_file: TokenFile, seq_len: int, seed: int, source: str) -> TokenData:
    """Training and evaluation windows: the last 2% (at least one sequence) are for evaluation."""
    tokens = token_file.tokens
    n_eval = max(int(len(tokens) * _EVAL_SHARE), seq_len + 1)
    n_train = len(tokens) - n_eval
    if n_train < seq_len + 1:
        raise ConfigError(
            f"--data {source} has {len(tokens)} tokens; one sequence to train and one to evaluate "
            f"with --seq-len {seq_len} need {2 * (seq_len + 1)}; give more text or a lower "
            "--seq-len"
        )
    train = Windows(tokens[:n_train], seq_len)
    return TokenData(
        train=train,
        eval=Windows(tokens[n_train:], seq_len),
        order=BatchOrder(len(train), seed),
        digest=token_file.digest,
        n_tokens=len(tokens),
    )

"""A C++ file becomes a library once, and what stops it is said once, by name."""

import ctypes
import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from overspill.hardware import native
from tests import compile_ahead

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    _forget()
    yield
    _forget()


def _forget() -> None:
    native.load_library.cache_clear()
    native.cache_folder.cache_clear()


def _has_compiler() -> bool:
    try:
        native.find_compiler()
    except native._BuildError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="no C++ compiler")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def _answer(library: ctypes.CDLL | None) -> int:
    assert library is not None
    return int(library.answer())


def _libraries(tmp_path: Path) -> list[Path]:
    files = sorted((tmp_path / "cache" / "overspill").iterdir())
    return [file for file in files if file.suffix != ".lock"]


@needs_compiler
def test_compiles_and_leaves_one_file(tmp_path: Path, source: Path) -> None:
    assert _answer(native.load_library(source, "answer")) == 42
    (library,) = _libraries(tmp_path)  # nothing written aside is left
    assert library.suffix == ".so"


@needs_compiler
def test_a_long_compilation_is_told(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_PATIENCE", 0.0)
    native.load_library(source, "answer")
    assert "compiling answer.cpp for this machine, once" in caplog.text
    caplog.clear()
    _forget()
    native.load_library(source, "answer")  # it is there already
    assert not caplog.text


@needs_compiler
def test_second_process_does_not_compile(tmp_path: Path, source: Path) -> None:
    native.load_library(source, "answer")
    (before,) = _libraries(tmp_path)
    inode = before.stat().st_ino
    _forget()
    assert _answer(native.load_library(source, "answer")) == 42
    assert before.stat().st_ino == inode


@needs_compiler
def test_changed_source_or_flags_is_another_library(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.load_library(source, "answer")
    _forget()
    source.write_text(SOURCE.replace("42", "43"))
    assert _answer(native.load_library(source, "answer")) == 43
    _forget()
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-DCHANGED"))
    assert _answer(native.load_library(source, "answer")) == 43
    assert len(_libraries(tmp_path)) == 3


@needs_compiler
def test_a_truncated_library_is_compiled_again(tmp_path: Path, source: Path) -> None:
    """Loading it would end the process with a bus error."""
    native.load_library(source, "answer")
    (library,) = _libraries(tmp_path)
    complete = library.read_bytes()
    for length in (0, 31, 5000, len(complete) - 1):
        _forget()
        library.unlink()  # the loaded one stays mapped
        library.write_bytes(complete[:length])
        assert _answer(native.load_library(source, "answer")) == 42
        assert library.read_bytes() == complete


@needs_compiler
def test_one_of_several_processes_compiles(tmp_path: Path, source: Path) -> None:
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    script = (
        "import sys; from pathlib import Path; from overspill.hardware.native import load_library\n"
        f"sys.exit(load_library(Path({str(source)!r}), 'answer').answer() != 42)"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "CXX": str(compiler)}
    racers = [subprocess.Popen([sys.executable, "-c", script], env=environment) for _ in range(3)]
    assert [racer.wait(timeout=200) for racer in racers] == [0, 0, 0]
    assert len(_libraries(tmp_path)) == 1
    assert sum("-shared" in line for line in log.read_text().splitlines()) == 1


@needs_compiler
def test_libraries_are_compiled_where_nothing_can_be_locked(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert _answer(native.load_library(source, "answer")) == 42


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, when the user's cache cannot be written."""
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


@needs_compiler
def test_without_a_cache_a_second_process_does_not_compile(no_cache: Path, source: Path) -> None:
    assert _answer(native.load_library(source, "answer")) == 42
    assert [folder.name for folder in no_cache.iterdir()] == [f"overspill-cache-{os.getuid()}"]
    (library,) = no_cache.glob("*/*.so")
    inode = library.stat().st_ino
    _forget()
    assert _answer(native.load_library(source, "answer")) == 42
    assert library.stat().st_ino == inode


def test_without_a_home_folder_there_is_a_cache(
    no_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert native.cache_folder().parent == no_cache


@pytest.mark.parametrize("kind", ["others may write", "a link", "a file"])
def test_a_folder_that_others_may_have_filled_is_not_used(kind: str, no_cache: Path) -> None:
    name = no_cache / f"overspill-cache-{os.getuid()}"
    if kind == "a link":
        (no_cache / "elsewhere").mkdir()
        name.symlink_to(no_cache / "elsewhere")
    elif kind == "a file":
        name.touch()
    else:
        name.mkdir()
        name.chmod(0o777)
    assert native.cache_folder().name.startswith("overspill-tmp-")


def test_a_temporary_folder_is_removed_at_exit(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / f"overspill-cache-{os.getuid()}").touch()
    script = "from overspill.hardware.native import cache_folder; print(cache_folder())"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    changes = {
        "PYTHONPATH": path,
        "XDG_CACHE_HOME": str(tmp_path / "file"),
        "TMPDIR": str(tmp_path),
    }
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **changes},
        capture_output=True,
        text=True,
    )
    folder = Path(result.stdout.strip())
    assert folder.parent == tmp_path
    assert not folder.exists()


@needs_compiler
def test_without_any_folder_a_process_compiles_once_and_leaves_nothing(
    tmp_path: Path, source: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "file").touch()
    (temporary / f"overspill-cache-{os.getuid()}").touch()  # neither the cache nor this is a folder
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    script = (
        "from pathlib import Path; from overspill.hardware.native import load_library\n"
        f"for _ in range(3): assert load_library(Path({str(source)!r}), 'answer').answer() == 42"
    )
    changes = {
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "XDG_CACHE_HOME": str(tmp_path / "file"),
        "TMPDIR": str(temporary),
        "CXX": str(compiler),
    }
    subprocess.run([sys.executable, "-c", script], env={**os.environ, **changes}, check=True)
    assert sum("-shared" in line for line in log.read_text().splitlines()) == 1
    assert [path.name for path in temporary.iterdir()] == [f"overspill-cache-{os.getuid()}"]


@needs_compiler
def test_a_cache_that_is_removed_while_in_use_is_made_again(tmp_path: Path, source: Path) -> None:
    native.load_library(source, "answer")
    shutil.rmtree(tmp_path / "cache")
    assert _answer(native.load_library(source, "another")) == 42
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").touch()
    assert native.load_library(source, "third") is None  # with a warning


@needs_compiler
def test_compile_error_is_said_once_with_the_compilers_line(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source.write_text("int answer() { return missing; }\n")
    with caplog.at_level(logging.WARNING, logger="overspill"):
        assert native.load_library(source, "answer") is None
        assert native.load_library(source, "answer") is None
    (record,) = caplog.records
    assert record.name == "overspill"
    assert "'answer'" in record.message
    assert "missing" in record.message


def test_no_compiler_is_said_once(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda _: None)
    with caplog.at_level(logging.WARNING, logger="overspill"):
        assert native.load_library(source, "answer") is None
        assert native.load_library(source, "answer") is None
    (record,) = caplog.records
    assert "no C++ compiler" in record.message


def test_wrong_cxx_is_named(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with caplog.at_level(logging.WARNING, logger="overspill"):
        assert native.load_library(source, "answer") is None
    assert "CXX='no-such-compiler -m64'" in caplog.records[0].message


@needs_compiler
def test_a_changed_header_is_another_library(tmp_path: Path) -> None:
    header, source = tmp_path / "number.h", tmp_path / "number.cpp"
    source.write_text('#include "number.h"\nextern "C" int answer() { return NUMBER; }\n')
    header.write_text("constexpr int NUMBER = 1;\n")
    assert _answer(native.load_library(source, "answer")) == 1
    header.write_text('#include "other.h"\n')
    for number in (2, 3):
        _forget()
        (tmp_path / "other.h").write_text(f"constexpr int NUMBER = {number};\n")
        assert _answer(native.load_library(source, "answer")) == number


def test_every_source_is_part_of_the_package() -> None:
    """Installed from a wheel, a source that is missing would only be slow."""
    root = Path(native.__file__).parents[3]
    if not (root / "pyproject.toml").is_file():
        pytest.skip("not run from a checkout")
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["overspill"]
    package = root / "src" / "overspill"
    sources = {*package.rglob("*.cpp"), *package.rglob("*.h")}
    assert sources == {file for pattern in patterns for file in package.glob(pattern)} & sources


def test_each_kernel_is_compiled_ahead_under_its_name() -> None:
    """Else `make test` would compile it again, beside the tests."""
    call = re.compile(r'load_library\(Path\(__file__\)\.with_name\("(.+)"\), "(.+)"\)')
    files = (compile_ahead.SOURCE / "overspill").rglob("*.py")
    assert {
        f"{file.parent.name}/{source}": name
        for file in files
        for source, name in call.findall(file.read_text())
    } == compile_ahead.KERNELS

"""Compile a C++ file on first use, and keep the library for the next run.

A kernel here is one plain C-ABI file without dependencies, so a compiler call of some seconds, once
on a machine, is all it needs: no build system, no torch headers. It is called through ctypes, which
drops the GIL for the call, so a kernel runs beside Python.
"""

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

log = logging.getLogger("overspill")

# No -march: kernels choose their instruction set at run time, so a cache in a home folder that
# several machines share is right on each. math-errno would keep sqrt from being vectorised.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno")

# Two threads that want the same kernel must not compile it twice; other processes are kept apart
# by os.replace instead.
_lock = threading.Lock()


class _BuildError(Exception):
    """Why there is no library, in words for the one warning."""


def load_library(source: Path, name: str) -> ctypes.CDLL | None:
    """The library compiled from `source`, or None, with one warning that names `name` and why.

    The answer is kept for the life of the process.
    """
    with _lock:
        return _load_library(source, name)


@functools.cache
def _load_library(source: Path, name: str) -> ctypes.CDLL | None:
    try:
        return _build_and_open(source, name)
    except _BuildError as error:
        log.warning("native kernel %r is not available: %s", name, error)
        return None


def _build_and_open(source: Path, name: str) -> ctypes.CDLL:
    compiler = find_compiler()
    library = cache_folder() / f"{name}-{_key(source, compiler)}.so"
    if library.exists():
        try:
            return ctypes.CDLL(str(library))
        except OSError:
            library.unlink(missing_ok=True)  # damaged; the compiler is here, so make it again
    _compile(compiler, source, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise _BuildError(f"{library} was compiled but cannot be loaded: {error}") from error


def find_compiler() -> list[str]:
    """The compiler command: CXX if it is set (as for make, then nothing else), or a usual name."""
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        command = shlex.split(chosen)
        if shutil.which(command[0]) is None:
            raise _BuildError(f"the compiler CXX={chosen!r} is not there; correct or unset CXX")
        return command
    for usual in ("c++", "g++", "clang++"):
        if shutil.which(usual) is not None:
            return [usual]
    raise _BuildError("no C++ compiler (looked for c++, g++, clang++); install g++ or set CXX")


def _key(source: Path, compiler: list[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    parts = (*_texts(source), *FLAGS, *compiler, version.stdout, platform.platform())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _texts(source: Path) -> list[str]:
    """The source and the headers of ours that it includes, and those that they include."""
    files, texts = [source], []
    for file in files:  # which grow
        texts.append(file.read_text())
        names = re.findall(r'^#include "(.+)"$', texts[-1], re.MULTILINE)
        headers = dict.fromkeys(file.parent / name for name in names)
        files += [header for header in headers if header not in files]
    return texts


@functools.cache
def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "overspill"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder  # only an attempt tells: access rights say nothing of a full disk
    except OSError as error:
        instead = Path(tempfile.mkdtemp(prefix="overspill-"))
        log.info("%s is not writable (%s); compiled kernels go to %s", folder, error, instead)
        return instead


def _compile(compiler: list[str], source: Path, library: Path) -> None:
    """Written aside and renamed, so another process sees a whole library or none."""
    handle, aside = tempfile.mkstemp(dir=library.parent, prefix=library.stem, suffix=".tmp")
    os.close(handle)
    try:
        command = [*compiler, *FLAGS, str(source), "-o", aside]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise _BuildError(f"{shlex.join(compiler)} failed: {_first_error(result.stderr)}")
        os.replace(aside, library)
    except OSError as error:
        raise _BuildError(f"{shlex.join(compiler)} could not run: {error}") from error
    finally:
        Path(aside).unlink(missing_ok=True)


@functools.cache
def has_triton(what: str) -> bool:
    """Whether Triton is there to compile GPU kernels; says once for each `what` if it is not."""
    if importlib.util.find_spec("triton") is not None:
        return True
    log.warning("%s: triton is not installed, torch operations take over (slower)", what)
    return False


def _first_error(stderr: str) -> str:
    """The line that says what is wrong; collect2's only says that the linker said so before."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = (line for line in lines if " error: " in line and not line.startswith("collect2:"))
    return next(errors, lines[0] if lines else "no message")

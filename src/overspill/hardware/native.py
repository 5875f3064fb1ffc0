"""Compiles a C++ file on first use, and caches the library.

A kernel is one C-ABI file without dependencies: it needs no build system and no torch headers. It
is called through ctypes, which releases the GIL during the call.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("overspill")

# No -march: kernels choose their instruction set at run time, because several machines may share
# the cache in a home folder. math-errno would prevent the vectorization of sqrt.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno")

_PATIENCE = 3.0
"""Seconds after which the user is told that a kernel is being compiled."""

_HASH_BYTES = hashlib.sha256().digest_size


class _BuildError(Exception):
    """Failure of a compilation; its text is the reason for the warning."""


@functools.cache
def load_library(source: Path, name: str) -> ctypes.CDLL | None:
    """The library compiled from `source`; None, with one warning, if that fails."""
    try:
        return _build_and_open(source, name)
    except _BuildError as error:
        log.warning("native kernel %r is not available: %s", name, error)
        return None


def _build_and_open(source: Path, name: str) -> ctypes.CDLL:
    compiler = find_compiler()
    library = cache_folder() / f"{name}-{_key(source, compiler)}.so"
    if not _is_complete(library):
        with _locked(library.parent / f"{name}.lock"):
            if not _is_complete(library):
                _compile(compiler, source, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise _BuildError(f"{library} was compiled but cannot be loaded: {error}") from error


def find_compiler() -> list[str]:
    """The compiler command: CXX if set (as in make), or a usual name."""
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        command = shlex.split(chosen)
        if shutil.which(command[0]) is None:
            raise _BuildError(f"the compiler CXX={chosen!r} was not found; correct or unset CXX")
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
    """The source, and all headers that it includes with quotes, directly or indirectly."""
    files, texts = [source], []
    for file in files:  # grows in the loop
        texts.append(file.read_text())
        names = re.findall(r'^#include "(.+)"$', texts[-1], re.MULTILINE)
        headers = dict.fromkeys(file.parent / name for name in names)
        files += [header for header in headers if header not in files]
    return texts


@functools.cache
def cache_folder() -> Path:
    """The user's cache, or a folder of this user among the temporary files if it is not writable.
    The last resort is a temporary folder that is removed at exit."""
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(root) / "overspill"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # access rights do not reveal a full disk
            return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        fallback = _own_temporary_folder()
        log.info("no writable cache folder (%s); compiled kernels go to %s", error, fallback)
        return fallback


def _own_temporary_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"overspill-cache-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        # libraries of a folder that another user can write must not be loaded
        private = status.st_uid == os.getuid() and not status.st_mode & 0o077
        if stat.S_ISDIR(status.st_mode) and private:
            return folder
    except OSError as error:
        log.info("%s cannot be used: %s", folder, error)
    temporary = Path(tempfile.mkdtemp(prefix="overspill-tmp-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let no other thread or process, such as the ranks of a mesh, compile the same kernel
    meanwhile, which takes up to half a minute. Some network file systems have no locks: libraries
    are complete without them."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # the cache may have been removed
        file = path.open("a")
    except OSError as error:
        raise _BuildError(f"{path.parent} cannot be written: {error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            log.info("%s cannot be locked: %s", path, error)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile has the file too


def _compile(compiler: list[str], source: Path, library: Path) -> None:
    """Compiles to a temporary file, appends its hash, and renames it when it is on disk: other
    processes, also after a power failure, find a complete library or none."""
    try:
        handle, temporary = tempfile.mkstemp(dir=library.parent, prefix=library.stem, suffix=".tmp")
        os.close(handle)
    except OSError as error:
        raise _BuildError(f"{library.parent} cannot be written: {error}") from error
    try:
        command = [*compiler, *FLAGS, str(source), "-o", temporary]
        with _told_if_slow(source):
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise _BuildError(f"{shlex.join(compiler)} failed: {_first_error(result.stderr)}")
        digest = hashlib.sha256(Path(temporary).read_bytes()).digest()
        with open(temporary, "ab") as file:
            file.write(digest)  # ELF loaders ignore what follows the last section
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, library)
    except OSError as error:
        raise _BuildError(f"{shlex.join(compiler)} could not run: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


@contextlib.contextmanager
def _told_if_slow(source: Path) -> Iterator[None]:
    """Log a line if the block takes long: the kernels of experts take a core about a minute."""
    told = "compiling %s for this machine, once; it can take a minute or more"
    timer = threading.Timer(_PATIENCE, log.warning, (told, source.name))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_complete(library: Path) -> bool:
    """Whether the cached library matches its hash: loading a truncated one kills the process."""
    try:
        data = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-_HASH_BYTES]).digest() == data[-_HASH_BYTES:]


@functools.cache
def has_triton(what: str) -> bool:
    """Whether Triton is installed; logs once for each `what` if not."""
    if importlib.util.find_spec("triton") is not None:
        return True
    log.warning("%s: triton is not installed; using torch operations (slower)", what)
    return False


def _first_error(stderr: str) -> str:
    """The line with the error; that of collect2 only refers to the linker's."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = (line for line in lines if " error: " in line and not line.startswith("collect2:"))
    return next(errors, lines[0] if lines else "no message")

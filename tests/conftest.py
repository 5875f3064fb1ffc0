"""What every test gets: fixed seeds, few threads, and no GPU test without a GPU."""

import contextlib
import functools
import gc
import importlib
import logging
import os
import random
import threading
from collections.abc import Generator
from pathlib import Path

# Before torch loads OpenMP: threads that spin while they wait take the cores from other workers.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy
import pytest
import torch

# Without a GPU, Triton kernels run in its interpreter, which it chooses when it is imported: by
# the conftest.py of another folder, it may be, before pytest is configured.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.fork_server import fork_server
from tests.workers import (  # noqa: F401
    number_of_workers,
    pytest_addhooks,
    pytest_addoption,
    pytest_runtestloop,
)

# Imported late by tests of most packages, and by the processes that they fork.
_IMPORTS = ("torch._dynamo", "transformers.models.mixtral.modeling_mixtral")
_COMPILING = pytest.StashKey[list[threading.Thread]]()


@pytest.hookimpl(tryfirst=True)  # an option may name another profile of Hypothesis
def pytest_configure(config: pytest.Config) -> None:
    # Tests kill processes, not machines: what a process has written outlives it.
    os.fsync = lambda descriptor: None

    # Tiny tensors gain nothing from threads: on busy cores two took five times as long as one.
    torch.set_num_threads(1)

    if not torch.cuda.is_available():
        _seed_no_gpus()
        with contextlib.suppress(ModuleNotFoundError):
            from tests.triton_interpreter import remember_lookups

            remember_lookups()

    if number_of_workers(config):
        config.stash[_COMPILING] = _compile_kernels()

    # GPU machines may have pytest alone; property tests are then skipped by their own imports.
    with contextlib.suppress(ModuleNotFoundError):
        from hypothesis import HealthCheck, settings

        # No deadline, and no check of the time it takes to draw: the first call into torch takes as
        # long as a hundred others, and the machine may be busy. Derandomized: the same tree gives
        # the same verdict twice.
        settings.register_profile(
            "overspill",
            deadline=None,
            derandomize=True,
            max_examples=30,
            suppress_health_check=[HealthCheck.too_slow],
        )
        settings.load_profile("overspill")


def _seed_no_gpus() -> None:
    """`torch.manual_seed` notes the stack for devices that may be used later: 3 ms of each test."""
    for devices in (torch.cuda, torch.xpu):
        devices.manual_seed_all = lambda seed: None


def _compile_kernels() -> list[threading.Thread]:
    """On a new machine it takes half a minute, in which the tests are collected."""
    from overspill.compute.cpu_kernel import cpu_library
    from overspill.optim.kernel import native_library
    from overspill.transfer.upload_thread import upload_library

    functions = (cpu_library, native_library, upload_library)
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    return threads


def _compile_patterns() -> None:
    """A thousand ones, when transformers converts the first checkpoint of a process."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("mixtral")


def _propagate_logs() -> None:
    """pytest adds a handler to each logger that does not propagate, six times in each test: torch
    has fifty."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_collection_finish(session: pytest.Session) -> None:
    """Excludes all that was imported from garbage collection: with transformers loaded, each
    `gc.collect()` of a test would take a fifth of a second. Workers, and the processes that they
    fork, inherit what all tests together need."""
    for thread in session.config.stash.get(_COMPILING, []):
        thread.join()
    if number_of_workers(session.config):
        for name in _IMPORTS:
            importlib.import_module(name)
        _compile_patterns()
        _propagate_logs()
    gc.collect()
    gc.freeze()
    if (
        session.items
        and not session.config.option.collectonly
        and not number_of_workers(session.config)
    ):
        session.config.add_cleanup(fork_server().close)


def pytest_worker_start() -> None:
    fork_server()  # before a test has computed


def pytest_worker_end() -> None:
    fork_server().close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """And what was imported by the tests of a file, such as the models of transformers."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none here")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture
def measured_roughly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of a test's own shapes are not worth seconds, nor a place in the machine's profile.
    Rough figures, so the CPU gets whatever share."""
    from overspill.probe import known
    from overspill.probe.experts import measure_expert
    from tests.probe.little import LITTLE

    measure = functools.partial(measure_expert, effort=LITTLE, tokens=(1, 4, 16))
    monkeypatch.setattr(known, "measure_expert", measure)
    monkeypatch.setattr(known, "profile_file", lambda machine: tmp_path / "profile.json")


@functools.cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def seed() -> int:
    """Every test starts from the same random state; ask for `seed` to derive more from it."""
    value = 1234
    random.seed(value)
    numpy.random.seed(value)
    if _has_gpu():
        torch.manual_seed(value)
    else:
        torch.default_generator.manual_seed(value)
    return value

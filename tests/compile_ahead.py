"""Compiles what the tests need while pip installs the rest, on a core that is idle then: the
kernels, and the bytecode of torch, which pytest would compile for 8 s.

`PYTHONPATH=src python tests/compile_ahead.py`: torch must be installed, numpy need not be.
"""

import compileall
import re
import sysconfig
from pathlib import Path

from overspill.hardware.native import load_library

SOURCE = Path(__file__).resolve().parents[1] / "src"
PACKAGES = ("torch", "sympy", "mpmath")  # the last two are imported by torch
UNUSED = re.compile("/torch/testing/")  # some files are of newer versions of Python
KERNELS = {
    "compute/cpu_kernel.cpp": "cpu-experts",
    "optim/kernel.cpp": "adamw",
    "transfer/host_link.cpp": "host-link",
    "transfer/upload_thread.cpp": "upload-thread",
}


def compile_kernels() -> None:
    for file, name in KERNELS.items():
        load_library(SOURCE / "overspill" / file, name)


def compile_bytecode() -> None:
    installed = Path(sysconfig.get_paths()["purelib"])
    for folder in (SOURCE, *(installed / name for name in PACKAGES)):
        compileall.compile_dir(folder, quiet=2, rx=UNUSED)


if __name__ == "__main__":
    compile_bytecode()
    compile_kernels()

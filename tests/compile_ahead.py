"""Compiles what the tests need while pip installs, on a core that is idle then.

`PYTHONPATH=src python tests/compile_ahead.py kernels` needs only the standard library. `bytecode`
of this project and of what is installed already is compiled with the Python of .venv.
"""

import compileall
import contextlib
import importlib
import sys
from pathlib import Path

from overspill.hardware.native import load_library

SOURCE = Path(__file__).resolve().parents[1] / "src"
IMPORTED = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "matplotlib.pyplot",
    "networkx",
    "hypothesis",
    "pytest",
)
"""Half of the files of torch are never imported: compiling all takes twice as long."""
KERNELS = {
    "compute/cpu_kernel.cpp": "cpu-experts",
    "compute/quantize.cpp": "quantize",
    "compute/gguf_blocks.cpp": "gguf-blocks",
    "optim/kernel.cpp": "adamw",
    "optim/factored.cpp": "factored-adamw",
    "transfer/upload_thread.cpp": "upload-thread",
}


def compile_kernels() -> None:
    for file, name in KERNELS.items():
        load_library(SOURCE / "overspill" / file, name)


def compile_bytecode() -> None:
    compileall.compile_dir(SOURCE, quiet=2)
    for name in IMPORTED:
        with contextlib.suppress(Exception):  # then the tests compile it
            importlib.import_module(name)


if __name__ == "__main__":
    {"kernels": compile_kernels, "bytecode": compile_bytecode}[sys.argv[1]]()

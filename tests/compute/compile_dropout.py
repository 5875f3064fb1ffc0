"""Compiles the kernel of dropout without a GPU: capabilities.

PYTHONPATH=src python3 tests/compute/compile_dropout.py 86 90
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from overspill.compute import dropout_triton

CONSTANTS = {"N": 3072, "SITE": 1, "BLOCK": 256}
ARGUMENTS = {"assignment_ptr": "*i64", "seed": "i64", "threshold": "i32", "scale": "fp32"}


def main(capabilities: list[str]) -> None:
    for capability in capabilities:
        kernel = dropout_triton._drop
        signature = {
            name: "constexpr" if name in CONSTANTS else ARGUMENTS.get(name, "*bf16")
            for name in kernel.arg_names
        }
        source = ASTSource(kernel, signature, CONSTANTS)
        triton.compile(source, target=GPUTarget("cuda", int(capability), 32))


if __name__ == "__main__":
    main(sys.argv[1:])

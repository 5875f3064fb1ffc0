"""Compiles the kernels of the activations without a GPU: capabilities.

PYTHONPATH=src python3 tests/compute/compile_activation.py 86 90
"""

import itertools
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from overspill.compute import activation_triton

FORMS = [(0, False), (1, True), (2, False), (2, True), (4, False), (4, True)]
WIDE = {"row_weight_ptr", "drow_weight_ptr"}


def main(capabilities: list[str]) -> None:
    kernels = activation_triton._forward, activation_triton._backward
    for capability, kernel, form in itertools.product(capabilities, kernels, FORMS):
        function, gated = form
        constants = {"N_HIDDEN": 3072, "FUNCTION": function, "GATED": gated, "BLOCK": 1024}
        signature = {
            name: "constexpr" if name in constants else "*fp32" if name in WIDE else "*bf16"
            for name in kernel.arg_names
        }
        source = ASTSource(kernel, signature, constants)
        triton.compile(source, target=GPUTarget("cuda", int(capability), 32))


if __name__ == "__main__":
    main(sys.argv[1:])

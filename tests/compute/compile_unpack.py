"""Compiles the kernel that unpacks experts without a GPU: capabilities.

PYTHONPATH=src python3 tests/compute/compile_unpack.py 80 89 90 120
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from overspill.compute import unpack_triton
from overspill.compute.codes_triton import matrix_of
from overspill.core.experts import ExpertShape
from tests.compute.packed import make_experts

TYPES = {"torch.uint8": "*u8", "torch.int8": "*i8", "torch.float16": "*fp16"}
TYPES |= {"torch.bfloat16": "*bf16", "torch.float32": "*fp32", "torch.float8_e4m3fn": "*u8"}
FORMS = ["nvfp4-divided", "int4-zeros", "mxfp4-stack", "fp8-block"]


def main(capabilities: list[str]) -> None:
    for number, name in enumerate(FORMS):
        stack = name == "mxfp4-stack"
        shape = ExpertShape(64, 32, gated=True, bias=stack, transposed=stack)
        piece = make_experts(name, shape, 1, split=not stack).format.pieces[0]
        constants = {
            "MATRIX": matrix_of(piece), "START": 0, "TRANSPOSED": stack, "ROWS": 32, "BLOCK": 128,
        }  # fmt: skip
        fields = {"codes": "codes", "scales": "scales", "zeros": "zeros", "factors": "factor"}
        signature = {}
        for arg in unpack_triton._unpack_kernel.arg_names:
            stored = piece.stored.get(fields.get(arg, ""))
            plain = {"out": "*bf16", "ends": "*i32"}.get(arg, "i64" if "_step" in arg else "*u8")
            plane = plain if stored is None else TYPES.get(str(stored.dtype), "*u8")
            signature[arg] = "constexpr" if arg in constants else plane
        signature["codes"] = "*u8"
        aligned = {(n,): [["tt.divisibility", 16]] for n in range(11)}
        source = ASTSource(unpack_triton._unpack_kernel, signature, constants, aligned)
        for capability in capabilities[number % len(capabilities) :][:1]:
            triton.compile(source, target=GPUTarget("cuda", int(capability), 32))


if __name__ == "__main__":
    main(sys.argv[1:])

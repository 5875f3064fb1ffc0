"""Compiles the grouped Triton kernels without a GPU: capability, bytes of shared memory.

PYTHONPATH=src python3 tests/compute/compile_grouped.py 86 101376 [all]

Takes the largest bf16 blocks, or with `all` every kernel that aligned sizes can need.
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from overspill.compute import grouped_triton
from overspill.compute.grouped_triton import PRODUCT_BLOCKS, WEIGHT_GRAD_BLOCKS, Blocks

POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}


def shared_memory(
    name: str, contiguous: set[str], blocks: Blocks, dtype: torch.dtype, capability: int
) -> int:
    """Bytes of shared memory of a kernel for sizes and strides that are multiples of 16."""
    kernel = getattr(grouped_triton, name)
    constants = {
        "BLOCK_M": blocks.m,
        "BLOCK_N": blocks.n,
        "BLOCK_K": blocks.k,
        "EVEN_K": True,
        "L2_TILES": 8,
        "SEARCH": 128,
        "PRECISION": "ieee",
        "WIDEN": False,
        **dict.fromkeys(contiguous, 1),
    }
    constants = {arg: value for arg, value in constants.items() if arg in kernel.arg_names}
    signature, aligned = {}, {}
    for position, arg in enumerate(kernel.arg_names):
        if arg in constants:
            signature[arg] = "constexpr"
            continue
        pointer = "*i32" if arg == "ends_ptr" else POINTERS[dtype]
        signature[arg] = pointer if arg.endswith("_ptr") else "i32"
        if arg != "n_groups":
            aligned[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    target = GPUTarget("cuda", capability, 32)
    return int(triton.compile(source, target=target, options=options).metadata.shared)


def main(arguments: list[str]) -> None:
    capability, limit = int(arguments[0]), int(arguments[1])
    every = "all" in arguments
    for dtype in POINTERS if every else [torch.bfloat16]:
        kernels = [
            *(("_product", {"stride_ak", "stride_wk"}, b) for b in PRODUCT_BLOCKS[dtype]),
            *(("_product", {"stride_ak", "stride_wn"}, b) for b in PRODUCT_BLOCKS[dtype]),
            *(("_weight_grad", {"stride_am", "stride_bn"}, b) for b in WEIGHT_GRAD_BLOCKS[dtype]),
        ]
        for name, contiguous, blocks in kernels:
            if every or blocks in (PRODUCT_BLOCKS[dtype][-1], WEIGHT_GRAD_BLOCKS[dtype][-1]):
                size = shared_memory(name, contiguous, blocks, dtype, capability)
                print(name, dtype, blocks, f"{size} bytes of shared memory")
                assert size <= limit, f"{name} {blocks} needs {size} bytes of {limit}"


if __name__ == "__main__":
    main(sys.argv[1:])

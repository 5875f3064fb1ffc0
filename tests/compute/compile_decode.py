"""Compiles the decoding kernels without a GPU: capabilities.

PYTHONPATH=src python3 tests/compute/compile_decode.py 86 90
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from overspill.compute.activation_form import Form, Function
from overspill.compute.decode import (
    attention,
    constants,
    cpu,
    delta,
    expert_groups,
    experts,
    linear,
    low_rank,
    migrate,
    norm,
    packed_experts,
    routing,
)
from overspill.compute.decode.low_rank import LowRankMatrices
from overspill.compute.decode.packing import packed_records
from overspill.core.experts import ExpertShape
from tests.compute.packed import make_experts

KERNELS = {
    name: kernel
    for module in (
        attention,
        delta,
        expert_groups,
        experts,
        cpu,
        linear,
        low_rank,
        migrate,
        norm,
        packed_experts,
        routing,
    )
    for name, kernel in vars(module).items()
    if name.endswith("_kernel")
}

NUMBERS = {"eps": "fp32", "scale": "fp32", "shift": "fp32", "softcap": "fp32"}
WIDE = {"positions", "blocks", "offsets", "table", "staged", "link", "is_real", "pinned", "slots"}
FLOAT = {"sums", "stats", "weights", "shrunk"}
LINEAR = {
    "NORM": 0, "BIAS": True, "FUNCTION": -1, "GATE": -1, "ADD": False, "ROWS": 8, "BLOCK": 512,
}  # fmt: skip
NORM = {"N_PARTS": 2, "HOST": 1, "BIAS": False, "ON_GPU": True, "BLOCK": 2048}
ROTATE = {
    "HEADS": 32, "KV_HEADS": 4, "BLOCK_SIZE": 16, "HALF": 64, "TURNED": 64, "LANES": 64,
    "NORMS": True, "GATED": False,
}  # fmt: skip
COMBINE = {"SINKS": True, "GATED": False, "PARTS": 64, "WIDTH": 128, "LANES": 128}
PLACES = delta.Place(0, 128), delta.Place(2048, 128), delta.Place(4096, 256), delta.Place(8192, 256)
PLACES = *PLACES, delta.Place(12288, 2), delta.Place(12320, 2)
SHAPE = delta.DeltaShape(16, 32, 128, 128, *PLACES)
CONVOLVE = {"SHAPE": SHAPE, "COLUMNS": 8192, "TAPS": 4, "PLACES": 4, "LANES": 128}
DELTA = {"SHAPE": SHAPE, "COLUMNS": 8192, "KEYS": 128, "LANES": 128}
STATES = dict.fromkeys(("qkv", "states", "rates"), "*fp32")
ATTEND = {
    "PACKED": False, "ALONE": False, "GATED": False, "BIAS": False,
    "SOFTCAP": True, "GROUP": 8, "KV_HEADS": 4, "BLOCK_SIZE": 16, "WIDTH": 128,
    "LANES": 128, "OUT_WIDTH": 128, "OUT_LANES": 128, "PART": 64, "TILE": 64, "ROWS": 16,
    "WIDEN": False,
}  # fmt: skip
T5 = {
    "PACKED": True, "ALONE": True, "BIAS": True, "SOFTCAP": False, "GROUP": 1, "KV_HEADS": 12,
    "WIDTH": 64, "LANES": 64, "OUT_WIDTH": 64, "OUT_LANES": 64, "PART": 512,
}  # fmt: skip
FLAGS = dict.fromkeys(("ready", "done", "missed"), "*i32")
HOST = FLAGS | dict.fromkeys(("ids", "host_experts", "host_count", "host_rows"), "*i32")
HOST |= {"host": "*fp32", "host_weights": "*fp32"}
ROUTE = {
    "TOP_K": 8, "KS": 8, "BLOCK": 128, "WIDTH": 2048, "SOFTMAX_FIRST": True, "NORMALIZE": True,
    "MISSES": True, "GIVEN": False,
}  # fmt: skip
LOOK_UP = {
    "TOP_K": 8, "KS": 8, "WIDTH": 2048, "ROWS": 8, "BLOCK": 128, "SHARE": 0, "STAGED": False,
    "MISSES": True,
}  # fmt: skip
IN = {
    "FUNCTION": 1, "GATED": True, "BIAS": False, "TRANSPOSED": False, "ALIGN": 16, "LOW": None,
    "ROWS": 8, "BLOCK": 256, "REQUEST": 4, "ON_GPU": True,
}  # fmt: skip
OUT = {
    "HIDDEN": 768, "TOP_K": 8, "BIAS": False, "TRANSPOSED": False, "ALIGN": 16, "LOW": None,
    "ROWS": 1, "BLOCK": 256,
}  # fmt: skip
HINT = dict.fromkeys(("ids", "ahead", "ahead_count"), "*i32") | {"count": "i32", "first": "i32"}
CHOOSE = {"ids": "*i32", "chosen": "*i32", "first": "i64", "words": "i32", "n_slots": "i32"}
CASES = [
    ("_add_norm_kernel", NORM, HOST),
    ("_add_norm_kernel", NORM | {"HOST": 2, "BIAS": True}, HOST | {"bias": "*bf16"}),
    ("_wait_kernel", {"ROWS": 64, "ON_GPU": True}, FLAGS),
    ("_hint_kernel", {"TOP_K": 8, "SIZE": 64, "REAL": True}, HINT),
    ("_gate_kernel", {"FUNCTION": 1, "BLOCK": 512}, {}),
    ("_linear_kernel", LINEAR, {}),
    ("_linear_kernel", LINEAR | {"GATE": 1}, {}),
    ("_linear_kernel", LINEAR | {"NORM": 1, "FUNCTION": 2, "ROWS": 2, "BLOCK": 1024}, {}),
    ("_linear_kernel", LINEAR | {"NORM": 2, "ADD": True, "ROWS": 2, "BLOCK": 1024}, {}),
    ("_rotate_kernel", ROTATE, {}),
    ("_rotate_kernel", ROTATE | {"TURNED": 32, "GATED": True}, {}),
    ("_convolve_kernel", CONVOLVE, {"out": "*fp32"}),
    ("_delta_kernel", DELTA, STATES),
    ("_attend_kernel", ATTEND, {}),
    ("_attend_kernel", ATTEND | {"BIAS": True}, {"bias": "*fp32"}),
    ("_attend_kernel", ATTEND | {"ALONE": True, "GATED": True}, {"sums": "*bf16"}),
    ("_attend_kernel", ATTEND | T5, {"bias": "*bf16", "sums": "*bf16", "stats": "*bf16"}),
    ("_combine_kernel", COMBINE, {}),
    ("_combine_kernel", COMBINE | {"SINKS": False, "GATED": True}, {}),
    ("_route_kernel", ROUTE, HOST),
    ("_route_kernel", ROUTE | {"SOFTMAX_FIRST": False}, HOST),
    ("_look_up_kernel", LOOK_UP, HOST),
    ("_look_up_kernel", LOOK_UP | {"SHARE": 5, "STAGED": True}, HOST),
    ("_choose_kernel", {"TOP_K": 8, "ROWS": 4, "BLOCK": 128, "SLOTS": 32}, CHOOSE),
    ("_migrate_kernel", {"IN_WORD": 2, "BLOCK": 2048}, CHOOSE | {"to": "*i32", "base": "*i32"}),
    ("_expert_in_kernel", IN, FLAGS),
    ("_expert_in_kernel", IN | {"FUNCTION": 0, "GATED": False}, FLAGS),
    ("_expert_in_kernel", IN | {"FUNCTION": 2, "GATED": False, "BIAS": True}, FLAGS),
    ("_expert_in_kernel", IN | {"FUNCTION": 3, "BIAS": True, "TRANSPOSED": True}, FLAGS),
    ("_expert_out_kernel", OUT, {"out": "*fp32"}),
    ("_expert_out_kernel", OUT | {"BIAS": True, "TRANSPOSED": True}, {"out": "*fp32"}),
]
GROUP = {
    "ALIGN": 16, "PACKING": None, "LOW": None, "TOKENS": 16, "ROWS": 64, "BLOCK": 64, "BIAS": False,
    "TRANSPOSED": False, "WIDEN": False,
}  # fmt: skip
GROUP_IN = GROUP | {"FUNCTION": 1, "GATED": True}
GROUPS = {"groups": "*i32"}
LOW = {"LOW": LowRankMatrices(4096, 8192, 4, 8, 4, False)}
SHRINK = LOW | {"MATRIX": None, "SCALED": False, "BLOCK": 2048, "REQUEST": 4, "ON_GPU": True}
TURNED = {"BIAS": True, "TRANSPOSED": True}
CASES += [
    ("_group_in_kernel", GROUP_IN, GROUPS),
    ("_group_in_kernel", GROUP_IN | TURNED | {"FUNCTION": 3}, GROUPS),
    ("_group_out_kernel", GROUP, GROUPS | {"parts": "*fp32"}),
    ("_group_out_kernel", GROUP | TURNED, GROUPS | {"parts": "*fp32"}),
    ("_shrink_kernel", SHRINK, FLAGS | {"out": "*fp32"}),
    ("_expert_in_kernel", IN | LOW, FLAGS),
    ("_expert_out_kernel", OUT | LOW, {"out": "*fp32"}),
    ("_group_in_kernel", GROUP_IN | LOW, GROUPS),
    ("_group_out_kernel", GROUP | LOW, GROUPS | {"parts": "*fp32"}),
]
PLANES = ("codes", "scales", "zeros", "factors", "biases")
TYPES = {torch.uint8: "*u8", torch.int8: "*i8", torch.int32: "*i32", torch.float16: "*fp16"}
TYPES |= {torch.bfloat16: "*bf16", torch.float32: "*fp32"}


def tile(used: constants.Tile) -> dict[str, int]:
    return {"ROWS": used.rows, "BLOCK": used.block, "num_warps": used.warps}


WIDE_INPUTS = {"inputs": "*fp32", "out": "*fp32"}
ARRANGE = {"BLOCK": 512, "REQUEST": 4, "ON_GPU": True}
for form in ("mxfp4-stack", "int4-zeros", "mxfp8", "IQ4_NL", "Q5_K"):
    stack = form == "mxfp4-stack"
    shape = ExpertShape(512, 256, gated=True, bias=stack, transposed=stack)
    packed = packed_records(
        make_experts(form, shape, 1, split=not stack).format,
        Form(Function.CLAMPED if stack else Function.SILU, True),
        torch.empty(64, dtype=torch.uint8),
    )
    own = {"PACKING": packed.packing, "BIAS": stack}
    own |= {"LOW": LowRankMatrices(4096, 8192, 4, 8, 4, True)}
    into = own | {"FUNCTION": {"mxfp4-stack": 3, "mxfp8": 5}.get(form, 1)}
    types = [
        {plane: TYPES[view.dtype] for plane, view in zip(PLANES, views, strict=True)} | FLAGS
        for views in ((*packed.w_in, packed.biases), (*packed.w_out, packed.biases))
    ]
    w_in, w_out = ({"base": "*u8"} | each | GROUPS for each in types)
    CASES += [
        (
            "_packed_in_kernel",
            into | tile(constants.PACKED_IN_TILE) | {"GATED": True},
            w_in | WIDE_INPUTS,
        ),
        (
            "_packed_out_kernel",
            own | tile(constants.PACKED_OUT_TILE) | {"TOP_K": 8},
            w_out | WIDE_INPUTS,
        ),
    ]
    scaled = SHRINK | {"MATRIX": packed.packing.out, "SCALED": True}
    CASES.append(("_shrink_kernel", scaled, FLAGS | {"out": "*fp32", "x": "*fp32"}))
    matrix = {"MATRIX": packed.packing.gate}
    CASES.append(("_arrange_kernel", ARRANGE | matrix, FLAGS | {"out": "*fp32"}))
    if form != "mxfp8":
        CASES += [
            ("_group_in_kernel", GROUP_IN | into | {"BLOCK": 16}, w_in),
            ("_group_out_kernel", GROUP | own | {"BLOCK": 16}, w_out | {"parts": "*fp32"}),
        ]
DIVIDE = {"PAIRS": 64, "TOKENS": 16, "REQUEST": 4, "ON_GPU": True}
CASES.append(("_divide_kernel", DIVIDE, FLAGS | GROUPS))
ROWS = {"y": "*fp32", "host": "*fp32"}
CASES.append(("_add_rows_kernel", {"HOST": 1, "BLOCK": 2048, "ON_GPU": True}, FLAGS | ROWS))
CASES.append(("_sum_kernel", {"BLOCK": 1024}, {"parts": "*fp32", "out": "*fp32"}))
SIZES = {
    "width", "n", "n_rows", "n_blocks", "parts", "part", "window", "n_experts", "hidden", "n_in",
    "top_k", "n_slots", "n_pairs", "words", "reach", "bias_stride", "row_width", "q_stride",
    "x_stride",
}  # fmt: skip


def compile_kernel(name: str, given: dict[str, object], types: dict[str, str], to: int) -> None:
    kernel = KERNELS[name]
    options = {"num_warps": given.get("num_warps", 4)}
    fixed = {arg: value for arg, value in given.items() if arg not in options}
    if "EARLY" in kernel.arg_names:
        fixed["EARLY"] = to >= 90
    signature, aligned = {}, {}
    for position, arg in enumerate(kernel.arg_names):
        if arg in fixed:
            signature[arg] = "constexpr"
        elif arg in types:
            signature[arg] = types[arg]
        elif arg in SIZES:
            signature[arg] = "i32"
        elif arg in NUMBERS:
            signature[arg] = NUMBERS[arg]
        else:
            signature[arg] = "*i64" if arg in WIDE else "*fp32" if arg in FLOAT else "*bf16"
        if arg in SIZES or signature[arg].startswith("*"):
            aligned[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, fixed, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", to, 32), options=options)
    # weights are read 16 bytes at a time
    ptx = compiled.asm["ptx"]
    if "_packed" in name:
        assert f"ld.global.v{fixed['PACKING'].gate.unit}.b32" in ptx, name
    if "linear" in name or ("expert_in" in name and not fixed["TRANSPOSED"]):
        assert "ld.global.v4.b32" in ptx, name


def main(capabilities: list[str]) -> None:
    assert {name for name, _, _ in CASES} == set(KERNELS), "each kernel has a case"
    for name in KERNELS:
        cases = [case for case in CASES if case[0] == name]
        # each kernel for two capabilities at least, its cases for all of them in turn
        for number in range(max(len(cases), min(2, len(capabilities)))):
            capability = capabilities[number % len(capabilities)]
            _, given, types = cases[number % len(cases)]
            print(capability, name, given)
            compile_kernel(name, given, types, int(capability))


if __name__ == "__main__":
    main(sys.argv[1:])

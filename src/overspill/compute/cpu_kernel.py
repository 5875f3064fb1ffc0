"""The C++ kernel that computes experts on the CPU, `cpu_kernel.cpp`, called with tensors.

One call computes a group: some experts of a layer, each with its token rows. Rows and results are
host tensors, and weights are read where they are stored. Results are rounded at the same places as
on the GPU: after each product and after the activation. Gradients of weights are formed in the
memory that the caller gives for each expert.

Shapes: R token rows sorted by expert, D model.
"""

import ctypes
import enum
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from overspill.compute.activation import Activation, form_of
from overspill.compute.activation_form import Form, Function
from overspill.core.experts import ExpertShape
from overspill.core.sizes import round_up
from overspill.hardware.native import load_library
from overspill.tiers.layout import LowRankPlanes

ISA_NAMES = ("generic", "avx2", "avx512", "avx512bf16", "amx")  # in the order of cpu_isa.h
_BEST_ISA = -1
_CALLBACK = ctypes.CFUNCTYPE(None)

# Token rows of an expert up to which the kernel pays: (forward, backward). Measured against torch
# with the same instruction set, on one core, for 1024×4096 and gated 2048×768: here both are equal,
# below it the kernel is faster. With bf16 and neither AVX-512 nor AMX it is 3 to 40 times faster at
# any number of rows; there the scratch memory sets the limit. Constants, because results must not
# depend on timing.
_MAX_ROWS = {  # in the order of ISA_NAMES
    torch.bfloat16: ((512, 512), (512, 512), (64, 32), (64, 32), (256, 512)),
    torch.float32: ((16, 16), (8, 8), (16, 16), (16, 16), (16, 16)),
}


class PackedFormat(Protocol):
    """The layout of records of packed weights."""

    @property
    def nbytes(self) -> int: ...

    @property
    def native(self) -> ctypes.Structure | None:
        """The layout as arguments of the C++ library; None if its kernels cannot read it."""


LowRank = tuple[LowRankPlanes | None, LowRankPlanes | None]
"""Low-rank parts of w_in and w_out."""


class ExpertRows(NamedTuple):
    """One expert of a group: its flat record in host memory, bytes if it is packed, and its token
    rows [start, stop)."""

    record: Tensor
    start: int
    stop: int


class BackwardRows(NamedTuple):
    """The tensors of a group in backward: inputs, routing weights (float32), and results."""

    x_RD: Tensor
    dy_RD: Tensor
    row_weight_R: Tensor
    dx_RD: Tensor
    drow_weight_R: Tensor


class GradientKind(enum.IntEnum):
    """Content of the memory of a gradient after a backward; as in cpu_group.h."""

    FORMED = 0
    ADDED = 1  # added to the content of the memory, with torch's rounding
    FACTORED = 2  # one row of factors for each token row, from which an optimizer forms it


class WeightGradient(NamedTuple):
    """Memory in which the gradient of an expert's weights is formed."""

    memory: Tensor
    """The gradient, flat and in the order of the expert's record; for factors, the first free
    row."""
    square: Tensor
    """One float32, which receives the sum of squares of the memory's content, unless that is
    factors."""
    kind: GradientKind = GradientKind.FORMED


def factor_row_bytes(shape: ExpertShape, dtype: torch.dtype) -> int:
    """Return the bytes of the factors of one token row; as in cpu_factors.h."""
    numbers = (2 * shape.d_model + shape.in_rows + shape.d_hidden) * dtype.itemsize
    return round_up(round_up(numbers, 4) + 4, 64)


def cpu_isa() -> str | None:
    """Return the best instruction set of ISA_NAMES that this CPU has; None without a compiler."""
    library = cpu_library()
    return None if library is None else str(library.overspill_cpu_isa().decode())


def why_unsupported(
    dtype: torch.dtype,
    shape: ExpertShape,
    activation: Activation | None,
    formats: Sequence[PackedFormat] = (),
) -> str | None:
    """Return why the kernel does not compute such experts; None if it does. `formats` are the
    layouts of packed records, which `MissRunner` reads in a decoding step."""
    if cpu_library() is None:
        return "no C++ compiler"
    form = form_of(activation, shape.gated)
    reasons = [] if dtype in _MAX_ROWS else [str(dtype)]
    if any(format.native is None for format in formats):
        reasons.append("records that are packed in a way that it does not read")
    if form is None:
        assert activation is not None
        reasons.append(
            f"the activation {activation.name}, which is not GELU, SiLU, ReLU, its square, or that "
            "of GPT-OSS or Hy-V4"
        )
    return ", ".join(reasons) or None


def max_kernel_rows(dtype: torch.dtype, backward: bool) -> int:
    """Return the number of token rows of one expert up to which the kernel is not slower than
    torch; 0 without a kernel."""
    isa = cpu_isa()
    return 0 if isa is None else _MAX_ROWS[dtype][ISA_NAMES.index(isa)][backward]


def kernel_forward(
    x_RD: Tensor,
    y_RD: Tensor,
    experts: Sequence[ExpertRows],
    shape: ExpertShape,
    threads: int,
    isa: str | None = None,
    form: Form | None = None,
    format: PackedFormat | None = None,
    low_rank: LowRank = (None, None),
) -> None:
    """Writes the outputs of the experts' token rows into `y_RD`, without routing weights.

    Computes in the calling thread and its thread pool. `isa` selects one of ISA_NAMES instead of
    the best; `form`, `format` and `low_rank` are as in `group_args`."""
    args = group_args(
        x_RD, y_RD, experts, shape, threads, isa, form=form, format=format, low_rank=low_rank
    )
    loaded_library().overspill_compute(args)


def kernel_backward(
    rows: BackwardRows,
    experts: Sequence[ExpertRows],
    shape: ExpertShape,
    threads: int,
    isa: str | None = None,
    form: Form | None = None,
    gradients: Sequence[WeightGradient] = (),
) -> None:
    """Writes the gradients of sum(row_weight * y * dy) into `dx_RD` and `drow_weight_R`, and the
    gradients of the experts' weights into `gradients`, one for each expert, if given. The gradient
    of an expert without token rows is left as it is."""
    args = group_args(rows.x_RD, rows.dx_RD, experts, shape, threads, isa, rows, form, gradients)
    loaded_library().overspill_compute(args)


def read_bandwidth(tensor: Tensor, threads: int) -> float:
    """Return the bytes per second at which `threads` threads read `tensor`, the best of three
    passes.

    The result is that of memory only if the tensor is much larger than the caches: 1.5 GB or more.
    """
    library = cpu_library()
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    best = float("inf")
    for _ in range(4):  # the first one starts the threads
        start = time.perf_counter()
        if library is None:
            words.sum()
        else:
            library.overspill_read(words.data_ptr(), words.numel(), threads)
        best = min(best, time.perf_counter() - start)
    return flat.numel() / best


class LowRankArgs(ctypes.Structure):
    """Mirror of `LowRankArgs` in cpu_group.h."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("a", "b", "rank", "padded"))


class GroupArgs(ctypes.Structure):
    """Mirror of `GroupArgs` in cpu_group.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "dy", "out", "row_weight", "drow_weight")),
        *((name, ctypes.c_int64) for name in ("x_stride", "dy_stride", "out_stride")),
        *((name, ctypes.POINTER(ctypes.c_int64)) for name in ("records", "starts", "stops")),
        *((name, ctypes.c_int64) for name in ("count", "d", "h")),
        *((name, ctypes.c_int32) for name in ("gated", "bias", "transposed", "function")),
        *((name, ctypes.c_int32) for name in ("backward", "bf16", "threads", "isa")),
        *((f"gradient{name}", ctypes.POINTER(ctypes.c_int64)) for name in ("s", "_kinds")),
        ("squares", ctypes.POINTER(ctypes.c_int64)),
        ("format", ctypes.c_void_p),
        ("low_rank", LowRankArgs * 2),
    )


def group_args(
    x_RD: Tensor,
    out_RD: Tensor,
    experts: Sequence[ExpertRows],
    shape: ExpertShape,
    threads: int,
    isa: str | None = None,
    backward: BackwardRows | None = None,
    form: Form | None = None,
    gradients: Sequence[WeightGradient] = (),
    format: PackedFormat | None = None,
    low_rank: LowRank = (None, None),
) -> GroupArgs:
    """Return the checked arguments of a native call, which are valid as long as the tensors exist.
    `form` is the activation, by default gated SiLU, or GELU without a gate. `format` is the layout
    of packed records; `low_rank` are the low-rank parts of w_in and w_out in records."""
    form = form or Form.usual(shape.gated)
    clamped = form.function is Function.CLAMPED
    assert threads >= 1
    assert shape.gated == form.gated
    assert shape.gated or not clamped
    assert backward is None or format is None
    assert format is None or format.native is not None
    assert backward is None or low_rank == (None, None)
    assert isa is None or ISA_NAMES.index(isa) <= ISA_NAMES.index(cpu_isa() or "")
    for rows in (x_RD, out_RD) if backward is None else (x_RD, out_RD, backward.dy_RD):
        assert rows.dtype == x_RD.dtype
        assert rows.device.type == "cpu"
        assert rows.shape == (x_RD.shape[0], shape.d_model)
        assert rows.stride(1) == 1 or shape.d_model == 1
    for record, start, stop in experts:
        assert record.dtype == (x_RD.dtype if format is None else torch.uint8)
        assert record.device.type == "cpu"
        assert record.is_contiguous()
        assert record.numel() >= (shape.numel if format is None else format.nbytes)
        assert 0 <= start <= stop <= x_RD.shape[0]
    numbers = ctypes.c_int64 * len(experts)
    args = GroupArgs(
        x=x_RD.data_ptr(),
        out=out_RD.data_ptr(),
        x_stride=x_RD.stride(0),
        out_stride=out_RD.stride(0),
        records=numbers(*(expert.record.data_ptr() for expert in experts)),
        starts=numbers(*(expert.start for expert in experts)),
        stops=numbers(*(expert.stop for expert in experts)),
        count=len(experts),
        d=shape.d_model,
        h=shape.d_hidden,
        gated=shape.gated,
        bias=shape.bias,
        transposed=shape.transposed and format is None,
        function=int(form.function),
        bf16=x_RD.dtype == torch.bfloat16,
        threads=threads,
        isa=_BEST_ISA if isa is None else ISA_NAMES.index(isa),
        format=None if format is None else ctypes.addressof(_native(format)),
    )
    for number, planes in enumerate(low_rank):
        if planes is not None:
            a, b = (each * x_RD.element_size() for each in (planes.a, planes.b))
            args.low_rank[number] = LowRankArgs(a, b, planes.rank, planes.padded)
    if backward is not None:
        for weight_R in (backward.row_weight_R, backward.drow_weight_R):
            assert weight_R.dtype == torch.float32
            assert weight_R.is_contiguous()
            assert weight_R.shape == x_RD.shape[:1]
        args.backward = True
        args.dy, args.dy_stride = backward.dy_RD.data_ptr(), backward.dy_RD.stride(0)
        args.row_weight = backward.row_weight_R.data_ptr()
        args.drow_weight = backward.drow_weight_R.data_ptr()
    if gradients:
        assert backward is not None
        row_bytes = factor_row_bytes(shape, x_RD.dtype)
        for (memory, square, kind), (_, start, stop) in zip(gradients, experts, strict=True):
            is_factored = kind is GradientKind.FACTORED
            assert memory.dtype == x_RD.dtype
            assert memory.device.type == square.device.type == "cpu"
            assert memory.is_contiguous()
            assert is_factored or memory.numel() >= shape.numel
            assert not is_factored or memory.nbytes >= (stop - start) * row_bytes
            assert square.dtype == torch.float32
            assert square.numel() == 1
        args.gradients = numbers(*(gradient.memory.data_ptr() for gradient in gradients))
        args.gradient_kinds = numbers(*(gradient.kind for gradient in gradients))
        args.squares = numbers(*(gradient.square.data_ptr() for gradient in gradients))
    return args


def native_formats(formats: Sequence[PackedFormat]) -> "ctypes.Array[ctypes.c_void_p] | None":
    """Return the addresses of the descriptions of records, valid as long as the formats exist; None
    without formats."""
    addresses = [ctypes.addressof(_native(format)) for format in formats]
    return (ctypes.c_void_p * len(addresses))(*addresses) if addresses else None


def _native(format: PackedFormat) -> ctypes.Structure:
    assert format.native is not None
    return format.native


def loaded_library() -> ctypes.CDLL:
    library = cpu_library()
    assert library is not None, "see why_unsupported()"
    return library


def inject_callback(
    inject: Callable[[str], object] | None, failures: list[BaseException]
) -> Callable[[], None] | None:
    """Return the callback with which native threads call `inject("cpu")` in fault-injection tests.
    Its exceptions are appended to `failures`. The caller keeps the callback until they end."""
    if inject is None:
        return None

    def call() -> None:
        try:
            inject("cpu")
        except BaseException as error:
            failures.append(error)

    return _CALLBACK(call)


def raise_first(failures: list[BaseException]) -> None:
    """Raise the first of the stored failures, if there are any, and drop all."""
    if failures:
        failure = failures[0]
        failures.clear()
        raise failure


@functools.cache
def cpu_library() -> ctypes.CDLL | None:
    """Return the compiled kernel with its signatures; None without a compiler, which is logged
    once."""
    library = load_library(Path(__file__).with_name("cpu_kernel.cpp"), "cpu-experts")
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    args = ctypes.POINTER(GroupArgs)
    times = ctypes.POINTER(ctypes.c_int64)
    signatures = {
        "cpu_isa": (ctypes.c_char_p, []),
        "compute": (None, [args]),
        "read": (ctypes.c_uint64, [pointer, ctypes.c_int64, ctypes.c_int]),
        "unpack": (
            None,
            [pointer, pointer, pointer, *[ctypes.c_int64] * 2, *[ctypes.c_int32] * 3],
        ),
        "repack_awq": (None, [pointer, ctypes.c_int64, ctypes.c_int64, pointer]),
        "runner_new": (pointer, []),
        "runner_close": (None, [pointer]),
        "runner_free": (None, [pointer]),
        "runner_submit": (None, [pointer, args, pointer, pointer, number, times, pointer]),
        "misses_new": (pointer, [args, *[pointer] * 5]),
        "misses_close": (None, [pointer]),
        "misses_free": (None, [pointer]),
        "misses_set_records": (None, [pointer, ctypes.c_int64, pointer]),
        "misses_pause": (None, [pointer]),
        "misses_resume": (None, [pointer]),
        "misses_failure": (None, [pointer, pointer, ctypes.c_int64]),
        "misses_counts": (None, [pointer, pointer]),
        "misses_spans": (ctypes.c_int64, [pointer, pointer]),
        "runner_wait": (ctypes.c_int, [pointer, pointer, number, ctypes.c_double, times]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"overspill_{name}")
        function.restype, function.argtypes = result, arguments
    return library

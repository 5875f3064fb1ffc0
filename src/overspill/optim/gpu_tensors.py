"""AdamW for many tensors in one launch. A model has hundreds of dense parameters, and a launch for
each takes the host longer than their updates take a GPU.

Imported only for CUDA tensors, if Triton is installed.
"""

# Triton functions take symbolic values that have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from overspill.compute.launch_triton import Launch
from overspill.compute.permute import to_device
from overspill.optim.arguments import AdamScalars, RecordUpdate
from overspill.optim.gpu_kernel import scalar_arguments, update_elements

_BLOCK = 1024
_FIELDS: tl.constexpr = tl.constexpr(7)


class UpdateTable:
    """Addresses and lengths of tensors, and the tensor of each block, on the device. They are
    copied there when they change: gradients often get the memory of the step before."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._lengths: list[int] = []
        self._addresses: list[tuple[int, ...]] = []
        self._table = self._tensor_of_block = torch.empty(0)

    def run(self, updates: Sequence[RecordUpdate], scalars: AdamScalars) -> None:
        """Queues the updates on the current stream. All tensors are on one device and have the same
        dtypes; their addresses, and their lengths, are multiples of 16."""
        state = updates[0].state
        self._copy(updates, state.weight.device)
        constants = (
            state.weight.dtype == torch.bfloat16,
            state.exp_avg.dtype == torch.bfloat16,
            _BLOCK,
        )
        tensors, grid = (self._table, self._tensor_of_block), (len(self._tensor_of_block), 1)
        _launch(grid, tensors, constants, scalar_arguments(scalars))

    def _copy(self, updates: Sequence[RecordUpdate], device: torch.device) -> None:
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        lengths = [update.grad.numel() for update in updates]
        addresses = [_addresses(update) for update in updates]
        # the copies belong to a stream: another one might read them before they have ended
        if stream != self._stream or lengths != self._lengths:
            self._lengths, self._addresses = [], []
            blocks = torch.tensor([triton.cdiv(length, _BLOCK) for length in lengths])
            tensors = torch.arange(len(blocks), dtype=torch.int32)
            self._tensor_of_block = to_device(tensors.repeat_interleave(blocks), device)
            self._stream, self._lengths = stream, lengths
        if addresses != self._addresses:
            self._addresses = []
            firsts = itertools.accumulate((triton.cdiv(n, _BLOCK) for n in lengths), initial=0)
            rows = [(*a, n, first) for a, n, first in zip(addresses, lengths, firsts, strict=False)]
            self._table = to_device(torch.tensor(rows, dtype=torch.int64), device)
            self._addresses = addresses


def _addresses(update: RecordUpdate) -> tuple[int, ...]:
    weight, low, *moments = update.state
    tensors = weight, weight if low is None else low, update.grad, *moments
    return tuple(tensor.data_ptr() for tensor in tensors)


@triton.jit
def _address(entry, field, TYPE: tl.constexpr):
    return tl.multiple_of(tl.load(entry + field).to(tl.pointer_type(TYPE)), 16)


@triton.jit(do_not_specialize=["seed"])
def adamw_tensors_kernel(
    table,
    tensor_of_block,
    decay,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    step_size,
    inv_sqrt_bias2,
    eps,
    grad_scale,
    seed,
    WEIGHT_IS_BF16: tl.constexpr,
    MOMENTS_ARE_BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    entry = table + tl.load(tensor_of_block + block).to(tl.int64) * _FIELDS
    weight_type: tl.constexpr = tl.int16 if WEIGHT_IS_BF16 else tl.float32
    grad_type: tl.constexpr = tl.bfloat16 if WEIGHT_IS_BF16 else tl.float32
    moment_type: tl.constexpr = tl.int16 if MOMENTS_ARE_BF16 else tl.float32
    weight = _address(entry, 0, weight_type)
    length = tl.multiple_of(tl.load(entry + 5), 16)
    column = (block - tl.load(entry + 6)) * BLOCK + tl.arange(0, BLOCK)
    update_elements(
        weight,
        _address(entry, 1, tl.int16),
        _address(entry, 2, grad_type),
        _address(entry, 3, moment_type),
        _address(entry, 4, moment_type),
        weight,
        column,
        column,
        column,
        column < length,
        decay,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        step_size,
        inv_sqrt_bias2,
        eps,
        grad_scale,
        seed,
        WEIGHT_IS_BF16,
        MOMENTS_ARE_BF16,
        True,
        False,
    )


_launch = Launch(adamw_tensors_kernel, warps=4)

# Triton is optional and has no type information, and its compiler refuses annotations on kernels.
# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator,call-arg,arg-type"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Copies experts of a later layer from pinned memory to the device, while other kernels run."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from overspill.compute.decode.launch import power
from overspill.compute.decode.routing import needed_experts
from overspill.core.sizes import round_up

_PROGRAMS, _BLOCK, _WARPS = 16, 2048, 8
"""Launch of the kernel that copies: it uses the whole PCIe bandwidth of an H200 with few of its
cores."""


class Region(NamedTuple):
    """GPU slots for the experts of one layer that a step needs."""

    slots_ND: Tensor  # records, padded to whole numbers of 16 bytes
    table_E: Tensor  # int64: where experts are, relative to the base of tables
    list_N: Tensor  # int32: experts that are copied, -1 behind the last one

    def with_records(self, numel: int) -> "Region":
        """Return the region for records of `numel` elements, which are no larger."""
        count, width = len(self.slots_ND), _padded(numel, self.slots_ND)
        return self._replace(slots_ND=self.slots_ND.view(-1)[: count * width].view(count, width))


def new_region(n_slots: int, n_experts: int, numel: int, like: Tensor) -> Region:
    """Allocate a region for `n_slots` records of `numel` elements, with the device and dtype of
    `like`."""
    slots = like.new_empty(n_slots, _padded(numel, like))
    table = torch.empty(n_experts, dtype=torch.int64, device=like.device)
    return Region(slots, table, torch.empty(n_slots, dtype=torch.int32, device=like.device))


def _padded(numel: int, like: Tensor) -> int:
    return round_up(numel, 16 // like.element_size())


def migrate(
    region: Region,
    ids_BK: Tensor,
    real_B: Tensor,
    table_E: Tensor,
    pinned_E: Tensor,
    base: Tensor,
) -> None:
    """Copies the experts of the tokens that `table_E` does not have from pinned memory, and writes
    their new offsets."""
    (batch, top_k), n_experts = ids_BK.shape, len(table_E)
    n_slots, width = region.slots_ND.shape
    assert n_slots >= min(n_experts, batch * top_k)
    size = base.element_size()
    first = (region.slots_ND.data_ptr() - base.data_ptr()) // size
    _choose_kernel[(1,)](
        ids_BK, real_B, table_E, region.table_E, region.list_N, first, width, batch, n_experts,
        n_slots, top_k, power(batch), power(n_experts), power(n_slots), num_warps=4,
    )  # fmt: skip
    _migrate_kernel[(_PROGRAMS,)](
        region.slots_ND.view(-1).view(torch.int32), region.list_N, pinned_E,
        base.view(torch.int32), width * size // 4, n_slots, 4 // size, _BLOCK, num_warps=_WARPS,
    )  # fmt: skip


@triton.jit
def _choose_kernel(
    ids, is_real, table, staged, chosen, first, width, n_rows, n_experts, n_slots,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    experts, slots = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    inside = experts < n_experts
    needed = needed_experts(ids, is_real, n_rows, TOP_K, ROWS, BLOCK)
    missing = needed & (tl.load(table + experts, mask=inside, other=0) == -(1 << 62))
    slot = tl.cumsum(missing.to(tl.int32), 0) - 1
    at = tl.where(missing, first + slot.to(tl.int64) * width, -(1 << 62))
    tl.store(staged + experts, at, mask=inside)
    tl.store(chosen + slots, -1, mask=slots < n_slots)
    tl.debug_barrier()
    tl.store(chosen + slot, experts, mask=missing)


@triton.jit
def _migrate_kernel(
    to, chosen, pinned, base, words, n_slots, IN_WORD: tl.constexpr, BLOCK: tl.constexpr
):
    for slot in range(n_slots):
        expert = tl.load(chosen + slot)
        if expert >= 0:
            # offsets are in elements, and a record begins at a multiple of 16 bytes
            source = base + tl.multiple_of(tl.load(pinned + expert) // IN_WORD, 4)
            target = to + tl.multiple_of(tl.cast(slot, tl.int64) * words, 4)
            for start in range(tl.program_id(0) * BLOCK, words, tl.num_programs(0) * BLOCK):
                at = start + tl.arange(0, BLOCK)
                tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)

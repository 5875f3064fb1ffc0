"""The optimizer states of dense parameters, and their updates."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from overspill.core.interrupt import DeferredInterrupt
from overspill.hardware.machine import usable_cores
from overspill.hardware.native import has_triton
from overspill.optim.arguments import AdamHyper, RecordState, RecordUpdate, adam_scalars
from overspill.optim.kernel import adamw_
from overspill.parallel.sharded import local, part_of

if TYPE_CHECKING:
    from overspill.optim.gpu_tensors import UpdateTable

MOMENTS = ("exp_avg", "exp_avg_sq")
ALIGNED = 16
"""Addresses (bytes) and lengths (elements) of tensors that are updated together are multiples."""


def new_zeros(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A state of zeros on the device of the parameter."""
    return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)


@torch.no_grad()
def new_dense_state(
    parameter: Tensor,
    given: Mapping[str, Any],
    dtype: torch.dtype,
    zeros: Callable[[Tensor, torch.dtype], Tensor] = new_zeros,
) -> dict[str, Any]:
    """Return the state of a dense parameter, with moments of `dtype`: copies of the given tensors,
    else zeros. For a parameter that ranks divide it is the state of this rank's part; `given` is
    whole."""
    own = local(parameter)
    state: dict[str, Any] = {"step": int(given.get("step", 0))}
    dtypes = dict.fromkeys(MOMENTS, dtype)
    if parameter.dtype == torch.bfloat16:
        dtypes["low"] = torch.int16
    for name, each in dtypes.items():
        state[name] = zeros(own, each)
        if name in given:
            state[name].copy_(part_of(given[name], parameter))
    return state


class DenseUpdate(NamedTuple):
    """A dense parameter whose gradient updates it."""

    parameter: Tensor
    state: dict[str, Any]
    hyper: Callable[[int], AdamHyper]
    """Its numbers, by the number of the step."""


class DenseUpdates:
    """Updates of dense parameters, on a GPU in as few launches as possible."""

    def __init__(self) -> None:
        self._tables: list[UpdateTable] = []

    def run(self, dense: Sequence[DenseUpdate]) -> None:
        """Update each parameter and its moments, and count its step. After a failure, parameters
        that were not reached are not counted."""
        together: dict[Any, list[tuple[DenseUpdate, RecordUpdate]]] = {}
        alone: list[DenseUpdate] = []
        sharing = _sharing([local(each.parameter) for each in dense])
        for number, each in enumerate(dense):
            # parameters that share memory are updated one after another
            update = None if number in sharing else _joined(each)
            if update is None:
                alone.append(each)
                continue
            weight, hyper = update.state.weight, each.hyper(each.state["step"] + 1)
            kind = hyper, weight.device, weight.dtype, update.state.exp_avg.dtype
            together.setdefault(kind, []).append((each, update))
        for number, ((hyper, *_), found) in enumerate(together.items()):
            with DeferredInterrupt():  # every update is counted
                self._table(number).run([update for _, update in found], adam_scalars(hyper))
                for each, _ in found:
                    each.state["step"] += 1
                    _mark_changed(each.parameter)
        for each in alone:
            _update_alone(each)

    def _table(self, number: int) -> "UpdateTable":
        from overspill.optim.gpu_tensors import UpdateTable

        if number == len(self._tables):
            self._tables.append(UpdateTable())
        return self._tables[number]


def _sharing(weights: Sequence[Tensor]) -> set[int]:
    """Return the numbers of the weights that share memory with others."""
    spans = []
    for number, weight in enumerate(weights):
        if weight.is_contiguous():
            first, size = weight.data_ptr(), weight.nbytes
        else:
            storage = weight.untyped_storage()
            first, size = storage.data_ptr(), storage.nbytes()
        spans.append((first, first + size, number))
    found: set[int] = set()
    stop = last = 0
    for first, end, number in sorted(spans):
        if first < stop:
            found |= {number, last}
        if end > stop:
            stop, last = end, number
    return found


def _joined(each: DenseUpdate) -> RecordUpdate | None:
    """Return the update as the kernel for many tensors takes it, which reads 16 bytes at once and
    checks nothing. None if it does not fit; `_update_alone` copies where it needs to."""
    weight, grad = local(each.parameter), _gradient(each.parameter)
    if not weight.is_cuda or weight.numel() == 0 or weight.numel() % ALIGNED:
        return None
    low, exp_avg, exp_avg_sq = (each.state.get(name) for name in ("low", *MOMENTS))
    is_bf16 = weight.dtype == torch.bfloat16
    if exp_avg is None or exp_avg_sq is None or (low is not None) != is_bf16:
        return None
    if grad.dtype != weight.dtype or exp_avg.dtype != exp_avg_sq.dtype:
        return None
    for tensor in (weight, exp_avg, exp_avg_sq, grad, *(() if low is None else (low,))):
        if tensor.device != weight.device or tensor.numel() != weight.numel():
            return None
        if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNED:
            return None
    if not has_triton("AdamW on the GPU"):
        return None
    return RecordUpdate(_flat_record(weight, each.state), grad.view(-1))


def _update_alone(each: DenseUpdate) -> None:
    own, grad = local(each.parameter), _gradient(each.parameter)
    weight = own.contiguous()  # itself, or a copy: the kernel updates flat memory
    record, flat_grad = _flat_record(weight, each.state), grad.to(own.dtype).reshape(-1)
    each.state["step"] += 1
    adamw_(record, flat_grad, each.hyper(each.state["step"]), _threads())
    if weight is not own:
        own.copy_(weight)
    _mark_changed(each.parameter)


def _mark_changed(parameter: Tensor) -> None:
    """The kernel writes through a pointer: autograd must refuse graphs from before this step."""
    torch.autograd.graph.increment_version(parameter)


def _flat_record(weight: Tensor, state: Mapping[str, Any]) -> RecordState:
    low, exp_avg, exp_avg_sq = state.get("low"), state["exp_avg"], state["exp_avg_sq"]
    flat_low = None if low is None else low.view(-1)
    return RecordState(weight.view(-1), flat_low, exp_avg.view(-1), exp_avg_sq.view(-1))


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)


def _threads() -> int:
    """Threads of dense updates on the CPU; ranks of a machine share its cores."""
    return min(usable_cores(), torch.get_num_threads())

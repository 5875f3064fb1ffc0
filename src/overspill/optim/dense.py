"""The optimizer states of dense parameters, and their updates."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from overspill.hardware.machine import usable_cores
from overspill.hardware.native import has_triton
from overspill.optim.kernel import AdamHyper, RecordState, RecordUpdate, adam_scalars, adamw_
from overspill.parallel.sharded import local, part_of

if TYPE_CHECKING:
    from overspill.optim.gpu_tensors import UpdateTable

MOMENTS = ("exp_avg", "exp_avg_sq")
ALIGNED = 16
"""Bytes to which tensors that are updated together are aligned; their lengths too."""


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
    """The state of a dense parameter, with moments of `dtype`: copies of what is given, else zeros.
    Of a parameter that ranks divide it is that of a part; `given` is whole."""
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


class DenseUpdates:
    """Updates dense parameters, those on a GPU in as few launches as possible."""

    def __init__(self) -> None:
        self._tables: list[UpdateTable] = []

    def run(self, dense: Iterable[tuple[Tensor, Mapping[str, Any], AdamHyper]]) -> None:
        """Updates each parameter and its moments with its gradient."""
        together: dict[Any, list[RecordUpdate]] = {}
        alone: list[tuple[RecordUpdate, AdamHyper]] = []
        addresses: set[int] = set()
        written = []
        for parameter, state, hyper in dense:
            own = local(parameter)
            weight = own.contiguous()  # itself, or a copy: the kernel updates flat memory
            update = RecordUpdate(_flat_record(weight, state), _flat_gradient(parameter))
            # parameters that share memory are updated one after another
            if weight.data_ptr() not in addresses and _can_join(update):
                kind = hyper, weight.device, weight.dtype, update.state.exp_avg.dtype
                together.setdefault(kind, []).append(update)
            else:
                alone.append((update, hyper))
            addresses.add(weight.data_ptr())
            written.append((parameter, own, weight))
        for number, ((hyper, *_), updates) in enumerate(together.items()):
            self._table(number).run(updates, adam_scalars(hyper))
        for update, hyper in alone:
            adamw_(*update, hyper, _threads())
        for parameter, own, weight in written:
            if weight is not own:
                own.copy_(weight)
            # the kernel writes through a pointer: autograd must refuse graphs from before this step
            torch.autograd.graph.increment_version(parameter)

    def _table(self, number: int) -> "UpdateTable":
        from overspill.optim.gpu_tensors import UpdateTable

        if number == len(self._tables):
            self._tables.append(UpdateTable())
        return self._tables[number]


def _flat_record(weight: Tensor, state: Mapping[str, Any]) -> RecordState:
    low, exp_avg, exp_avg_sq = (state.get(name) for name in ("low", *MOMENTS))
    assert exp_avg is not None
    assert exp_avg_sq is not None
    flat_low = None if low is None else low.view(-1)
    return RecordState(weight.view(-1), flat_low, exp_avg.view(-1), exp_avg_sq.view(-1))


def _flat_gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return local(parameter.grad).to(parameter.dtype).reshape(-1)


def _can_join(update: RecordUpdate) -> bool:
    """Whether the kernel for many tensors takes it: it reads 16 bytes at once."""
    grad = update.grad
    if not grad.is_cuda or grad.numel() == 0 or grad.numel() % ALIGNED:
        return False
    tensors = [tensor for tensor in (*update.state, grad) if tensor is not None]
    aligned = all(tensor.data_ptr() % ALIGNED == 0 for tensor in tensors)
    return aligned and has_triton("AdamW on the GPU")


def _threads() -> int:
    """Threads of dense updates on the CPU; ranks of a machine share its cores."""
    return min(usable_cores(), torch.get_num_threads())

"""The optimizer states of a dense parameter, and its update."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from overspill.hardware.machine import usable_cores
from overspill.optim.kernel import AdamHyper, RecordState, adamw_
from overspill.parallel.sharded import local, part_of

MOMENTS = ("exp_avg", "exp_avg_sq")


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


def update_dense(parameter: Tensor, state: Mapping[str, Any], hyper: AdamHyper) -> None:
    """Updates a parameter and its moments with its gradient."""
    low = state.get("low")
    own = local(parameter)
    weight = own.contiguous()  # itself, or a copy: the kernel updates flat memory
    record = RecordState(
        weight.view(-1),
        None if low is None else low.view(-1),
        state["exp_avg"].view(-1),
        state["exp_avg_sq"].view(-1),
    )
    assert parameter.grad is not None
    grad = local(parameter.grad).to(parameter.dtype).reshape(-1)
    adamw_(record, grad, hyper, _threads())
    if weight is not own:
        own.copy_(weight)
    # the kernel writes through a pointer: autograd must refuse graphs from before this step
    torch.autograd.graph.increment_version(parameter)


def _threads() -> int:
    """Threads of dense updates on the CPU; ranks of a machine share its cores."""
    return min(usable_cores(), torch.get_num_threads())

"""Mamba over pieces of a prompt, with the results of the whole prompt.

Some modules begin a piece of several tokens with an empty state. Each token multiplies a state by
exp(A * dt), and adds to it what its input gives. So the results of an empty state are too small by
what is left of the earlier state, which is added. Others limit the time steps dt of several tokens,
but not that of a single one.

Shapes: T tokens, d channels, n elements of the state of a channel.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ContinuedMamba:
    """One pass of a `JambaMambaMixer` over tokens of one sequence, after other tokens."""

    def __init__(self, module: Any, state_1dn: Tensor) -> None:
        self._module = module
        self._state_dn = state_1dn[0].float()
        self.rest_1dn: Tensor
        """Rest of the earlier state after the tokens, once the pass is computed."""

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Context in which the module adds what the state gives to the input of its last
        product."""
        module, seen = self._module, dict[str, Tensor]()

        def keep(name: str) -> Any:
            return lambda _, __, out: seen.update({name: out[0]})

        def add(_: Any, args: tuple[Tensor]) -> Tensor:
            given_1Td = args[0]
            extra_Td = self._results(seen["in_proj"], seen["dt_layernorm"], seen["c_layernorm"])
            return (given_1Td + extra_Td).to(given_1Td.dtype)

        names = "in_proj", "dt_layernorm", "c_layernorm"
        hooks = [getattr(module, name).register_forward_hook(keep(name)) for name in names]
        hooks.append(module.out_proj.register_forward_pre_hook(add))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _results(self, projected_T2d: Tensor, steps_Tr: Tensor, c_Tn: Tensor) -> Tensor:
        """Return what the earlier state adds to the results of the tokens."""
        module = self._module
        dt_Td = F.softplus(F.linear(steps_Tr, module.dt_proj.weight).float() + module.dt_proj.bias)
        passed_Td = dt_Td.cumsum(0)
        decays_dn = -torch.exp(module.A_log.float())
        y_Td = torch.zeros_like(passed_Td)
        for number, c_T in enumerate(c_Tn.float().unbind(1)):  # one by one: [T, d, n] is large
            rest_Td = torch.exp(passed_Td * decays_dn[:, number]) * self._state_dn[:, number]
            y_Td += rest_Td * c_T[:, None]
        self.rest_1dn = (torch.exp(passed_Td[-1][:, None] * decays_dn) * self._state_dn)[None]
        gate_Td = projected_T2d.chunk(2, -1)[1]
        return y_Td * F.silu(gate_Td.float())


def limits_steps(module: nn.Module) -> bool:
    """Return whether a Mamba module limits the time steps of several tokens."""
    return tuple(getattr(module, "time_step_limit", (0.0, torch.inf))) != (0.0, torch.inf)


@contextmanager
def limited_steps(module: Any) -> Iterator[None]:
    """Context in which a module limits the time step of a single token too. A time step is the
    softplus of the last results of its first product, to which a bias is added."""
    limits = torch.tensor(module.time_step_limit, device=module.dt_bias.device)
    least, most = limits + torch.log(-torch.expm1(-limits))  # the inverse of softplus

    def limit(_: Any, __: Any, projected: Tensor) -> Tensor:
        others, steps = projected.tensor_split([-module.num_heads], dim=-1)
        bias = module.dt_bias.float()
        steps = (steps.float() + bias).clamp(least, most) - bias
        return torch.cat((others, steps.to(others.dtype)), dim=-1)

    hook = module.in_proj.register_forward_hook(limit)
    try:
        yield
    finally:
        hook.remove()

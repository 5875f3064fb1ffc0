"""The reference implementation: a loop over experts, differentiated by autograd.

Shapes: T tokens, D model, H hidden, E experts, K top-k.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def moe_reference(
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    gated: bool,
    biases: Sequence[Tensor] = (),
    function: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the weighted sum over each token's experts; `w_in` is [E, H or 2H, D], `w_out` [E, D,
    H], and `biases` are none or [E, H or 2H] and [E, D]. `function` is computed between the
    matrices; by default gated SiLU or GELU.

    An expert without tokens gets a gradient of zeros, not None.
    """
    function = function or (_gated_silu if gated else F.gelu)
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    y_TD = x_TD.new_zeros(x_TD.shape, dtype=wide)
    # Unbound once: with indexing, autograd would allocate a full stack of zeros per expert.
    none = [None] * len(w_in)
    b_ins, b_outs = [each.unbind() for each in biases] or (none, none)
    parameters = zip(w_in.unbind(), w_out.unbind(), b_ins, b_outs, strict=True)
    for expert, (w_up, w_down, b_up, b_down) in enumerate(parameters):
        token, k = (expert_ids_TK == expert).nonzero(as_tuple=True)
        a = function(F.linear(x_TD[token], w_up, b_up))
        y = F.linear(a, w_down, b_down)
        y_TD = y_TD.index_add(0, token, (y * weights_TK[token, k, None]).to(wide))
    return y_TD.to(x_TD.dtype)


def _gated_silu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up

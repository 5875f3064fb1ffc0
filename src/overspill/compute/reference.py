"""The reference implementation: a loop over experts, differentiated by autograd.

Shapes: T tokens, D model, H hidden, E experts, K top-k.
"""

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
) -> Tensor:
    """Weighted sum over each token's experts; `w_in` is [E, H or 2H, D], `w_out` [E, D, H].

    An expert without tokens gets a gradient of zeros, not None.
    """
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    y_TD = x_TD.new_zeros(x_TD.shape, dtype=wide)
    # Unbound once: with indexing, autograd would allocate a full stack of zeros per expert.
    for expert, (w_up, w_down) in enumerate(zip(w_in.unbind(), w_out.unbind(), strict=True)):
        token, k = (expert_ids_TK == expert).nonzero(as_tuple=True)
        h = F.linear(x_TD[token], w_up)
        if gated:
            gate, up = h.chunk(2, dim=-1)
            a = F.silu(gate) * up
        else:
            a = F.gelu(h)
        y = F.linear(a, w_down)
        y_TD = y_TD.index_add(0, token, (y * weights_TK[token, k, None]).to(wide))
    return y_TD.to(x_TD.dtype)

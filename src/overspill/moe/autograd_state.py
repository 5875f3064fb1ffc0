"""The state of autograd in this thread."""

import torch


def graph_task() -> int:
    """The number of the backward that runs in this thread; -1 if none does. A forward inside one
    is the recomputation of a checkpoint."""
    return int(torch._C._current_graph_task_id())


def in_function() -> bool:
    """Whether this forward runs inside an autograd Function, such as a reentrant checkpoint. Torch
    turns forward-mode gradients off there, but not under no_grad()."""
    return not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()

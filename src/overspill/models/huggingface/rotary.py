"""Rotary embeddings of Phi-3.5-MoE, computed on the device alone: its modules read positions on the
host and copy frequencies from there in each pass, which a CUDA graph cannot."""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from overspill.models.huggingface.replaced import replaced_attributes


class FixedRotary:
    """Rotary embeddings of a model that are the same for every length of a sequence."""

    def __init__(self, model: nn.Module) -> None:
        with torch.inference_mode(False):  # frequencies outlive it
            self._forwards = {
                module: partial(_embed, *_frequencies(module))
                for module in model.modules()
                if type(module).__name__ == "PhimoeRotaryEmbedding"
                and module.rope_type in ("default", "longrope")
            }

    def replaced(self) -> AbstractContextManager[None]:
        """Context in which modules compute embeddings on the device."""
        return replaced_attributes(
            (module, "forward", forward) for module, forward in self._forwards.items()
        )


def _frequencies(module: Any) -> tuple[Tensor, float]:
    """Return the frequencies of a module, and the scale of its embeddings."""
    frequencies_d, scale = module.rope_init_fn(module.config)
    if module.rope_type == "longrope":  # batches need the scale of long sequences to be equal
        scale = module.config.rope_parameters["short_mscale"]
    return frequencies_d.float().to(module.inv_freq.device), scale


def _embed(
    frequencies_d: Tensor, scale: float, x: Tensor, position_ids: Tensor
) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].float() * frequencies_d
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)

"""Tiny encoder-decoders to serve, and what transformers generates with them."""

import copy
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch

import overspill
from tests.models.huggingface.families import make_model
from tests.serve.models import family

FAMILIES = ["switch_transformers", "nllb-moe"]
N_NEW = 6
SOURCES: list[list[int]] = [[5, 9, 33, 7, 12, 80, 41], [4], [*range(40, 77), 2], [60, 61, 62, 63]]


@functools.cache
def plain_model(name: str, **options: Any) -> Any:
    """A model of the family. Its answers depend on the source, on distances and on experts: it has
    large weights."""
    made = family(name)
    made = type(made)(**{**vars(made), "build": functools.partial(made.build, **options)})
    model = make_model(made).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
            if "relative" in path:
                parameter.normal_(0, 2, generator=generator)
            if "router" in path:
                parameter.normal_(0, 0.5, generator=generator)
    return model


DEEP: dict[str, dict[str, Any]] = {
    "switch_transformers": {
        "num_layers": 3, "num_decoder_layers": 3, "num_sparse_encoder_layers": 3,
        "num_sparse_decoder_layers": 3,
    },
    "nllb-moe": {
        "encoder_layers": 3, "decoder_layers": 3, "encoder_sparse_step": 1,
        "decoder_sparse_step": 1,
    },
}  # fmt: skip
"""Three blocks with experts in both parts."""


@functools.cache
def pregated(name: str, level: int, **options: Any) -> Any:
    """A model whose pre-gates choose other experts than its gates would."""
    model = copy.deepcopy(plain_model(name, **DEEP[name], **options))
    overspill.pregate(model, level=level)
    return model


@functools.cache
def expected(name: str, **options: Any) -> list[list[int]]:
    """The answers to `SOURCES`."""
    return [plain_answer(plain_model(name, **options), source) for source in SOURCES]


def plain_answer(model: Any, source: Sequence[int], n: int = N_NEW, **options: Any) -> list[int]:
    """The greedy tokens of transformers after those that the decoder begins with."""
    ids = torch.tensor([source], device=model.device)
    forced = options.get("forced_bos_token_id")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=n + (forced is not None),
            do_sample=False,
            eos_token_id=-1,
            **options,
        )
    return [int(token) for token in out[0, 1 + (forced is not None) :]]

"""Tiny models to serve, and what they generate without the engine."""

import dataclasses
import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import overspill
from overspill import LLM, SamplingParams
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from tests.models.huggingface.families import FAMILIES, Family, make_model
from tests.models.huggingface.oracle import offloaded

N_NEW = 4
_LONG = [60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79]
PROMPTS: list[list[int]] = [
    [5, 9, 33, 7, 12, 80, 41, 3, 22, 10, 11],
    [4],
    _LONG,
    [*_LONG[:17], 8, 9],  # shares a block of 16 tokens with the one before
]
GREEDY = SamplingParams(max_tokens=N_NEW, ignore_eos=True)
CONFIG = GPTConfig(
    vocab=48, n_layers=3, d_model=16, d_hidden=24, n_heads=2, n_experts=5, top_k=2, max_seq=64
)


def family(name: str) -> Family:
    (found,) = (each for each in FAMILIES if each.name == name)
    return found


def plain_generate(model: Any, prompt: Sequence[int], n: int = N_NEW) -> list[int]:
    """transformers' `generate`, greedy."""
    ids = torch.tensor([prompt], device=model.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=n,
            do_sample=False,
            eos_token_id=-1,
        )
    return [int(token) for token in out[0, len(prompt) :]]


@functools.cache
def plain_model(name: str) -> tuple[Any, list[list[int]]]:
    """A model of the family, and its greedy tokens after `PROMPTS`."""
    made = family(name)
    if name == "mixtral":
        # Most tests decode with it, and Triton's interpreter takes time for each head. Other
        # families have several heads of keys.
        few = {"num_attention_heads": 2, "num_key_value_heads": 1}
        made = dataclasses.replace(made, build=functools.partial(made.build, **few))
    model = make_model(made).eval()
    return model, [plain_generate(model, prompt) for prompt in PROMPTS]


def tokens_of(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[int]]:
    return [result.token_ids for result in llm.generate(prompts, params)]


@contextmanager
def served(
    name: str,
    mode: str,
    folder: Path,
    settings: overspill.Settings | None = None,
    **options: Any,
) -> Iterator[LLM]:
    """A model of the family with its experts in `mode`."""
    model, _ = plain_model(name)
    with (
        offloaded(model, mode, folder, settings) as twin,
        LLM(twin, **{"context": 64, "max_batch": 3, **options}) as llm,
    ):
        yield llm


@functools.cache
def plain_gpt() -> GPTMoE:
    """Weights are large enough that routing and tokens vary."""
    model = GPTMoE(CONFIG, checkpoint=False, seed=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    return model


def gpt_tokens(prompt: Sequence[int], n: int) -> list[int]:
    """Its own greedy tokens."""
    return list(_gpt_tokens(tuple(prompt), n))


@functools.cache
def _gpt_tokens(prompt: tuple[int, ...], n: int) -> tuple[int, ...]:
    out = plain_gpt().generate(torch.tensor([prompt]), n, temperature=0)
    return tuple(out[0, len(prompt) :].tolist())


@contextmanager
def served_gpt(
    mode: str, folder: Path, settings: overspill.Settings | None = None, **options: Any
) -> Iterator[LLM]:
    with (
        offloaded(plain_gpt(), mode, folder, settings) as twin,
        LLM(twin, **{"context": 64, "max_batch": 3, **options}) as llm,
    ):
        yield llm

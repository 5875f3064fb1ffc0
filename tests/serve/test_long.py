"""Prompts of 8,192 tokens: logits are those of transformers."""

import copy
import dataclasses
import functools
from contextlib import closing
from typing import Any

import pytest
import torch

import overspill
from overspill import LLM, SamplingParams
from tests.models.huggingface.families import make_model
from tests.serve.models import family
from tests.serve.test_sparse import SPARSE
from tests.serve.test_states import NESTED, PLAIN, STATEFUL

LENGTH = 8192
N_NEW = 4


def expected_logits(model: Any, prompt: list[int]) -> torch.Tensor:
    """Those of `generate`, with pieces of other lengths: at once, the scores of all heads of an
    indexer would need 4 GiB. Of two families it cannot compute pieces."""
    ids = torch.tensor([prompt], device=model.device)
    piece = None if model.config.model_type in ("jamba", "minimax") else 512
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=N_NEW,
        do_sample=False,
        eos_token_id=-1,
        prefill_chunk_size=piece,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.cat(out.logits)


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("name", [*SPARSE, *(name for name in STATEFUL if name != NESTED)])
def test_logits_after_long_prompts(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = family(name)
    options = {"max_position_embeddings": 2 * LENGTH, **PLAIN.get(name, {})}
    if name in SPARSE:
        options["index_topk"] = 64
    plain = make_model(dataclasses.replace(made, build=functools.partial(made.build, **options)))
    plain.to(device)
    prompt = torch.randint(3, 90, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = expected_logits(plain.eval(), prompt)
    found: list[torch.Tensor] = []

    def check(rows: list[torch.Tensor]) -> None:
        """On a GPU steps begin before the tokens before them are known: `run` has the first one."""
        seen = rows if device == "cpu" else rows[:1]
        torch.testing.assert_close(torch.stack(seen), expected[: len(seen)], rtol=0, atol=1e-3)

    model = overspill.offload(
        copy.deepcopy(plain), device=device, mode="host", slots=4, quiet=True, progress=False
    )
    with (
        closing(model.overspill),
        LLM(model, context=LENGTH + 64, max_batch=2, prefill_chunk=1000) as llm,
    ):
        runner = llm._loop.runner
        run = runner.run

        def noted(batch: Any) -> torch.Tensor:
            logits = run(batch)
            for (request, count), row in zip(batch, logits, strict=True):
                if request.computed + count >= LENGTH:
                    found.append(row.clone())
            return logits

        monkeypatch.setattr(runner, "run", noted)
        params = SamplingParams(max_tokens=N_NEW, temperature=0.0, ignore_eos=True)
        long, _ = llm.generate([prompt, prompt[:40]], params)
        assert long.token_ids == expected.argmax(-1).tolist()
        check(found)
        found.clear()
        again = llm.generate(prompt, params)[0]
        assert again.cached_tokens == LENGTH - 16
        assert again.token_ids == long.token_ids
        check(found)

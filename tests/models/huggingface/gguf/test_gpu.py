"""Records of several sizes on a GPU: what unpacked experts compute, wherever they are."""

from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from tests.models.huggingface.families import make_batch
from tests.models.huggingface.gguf.cases import CASES, make_case, mixed
from tests.models.huggingface.test_load import outputs
from tests.serve.test_gpu import GREEDY, PROMPTS, fused

__all__ = ["fused"]
pytestmark = pytest.mark.gpu


def load(path: Path, uploader: str = "auto", **given: Any) -> Any:
    # experts stay where a test puts them
    settings = overspill.Settings(residency=False, uploader=uploader)
    return overspill.load(
        path, device="cuda", dtype="float32", train=False, quiet=True, progress=False,
        settings=settings, **given,
    )  # fmt: skip


@pytest.mark.parametrize("uploader", ["native", "thread"])
def test_prompts_are_computed_as_without_offloading(uploader: str, tmp_path: Path) -> None:
    family, eager = make_case(CASES["mixtral"], tmp_path / "model.gguf", mixed)
    batch = make_batch(family, eager)
    expected = outputs(eager, batch)
    model = load(tmp_path / "model.gguf", uploader, packed=True, mode="host", slots=2)
    engine = model.overspill
    batch = {key: value.to("cuda") for key, value in batch.items()}
    for residents in ([0, 0], [1, 3], [4, 0], [4, 4], [0, 4], [2, 2]):
        engine.set_residents(residents)
        for _ in range(2):
            torch.testing.assert_close(outputs(model, batch).cpu(), expected, rtol=1e-4, atol=1e-5)
    engine.check_conserved()
    engine.close()


@pytest.mark.parametrize(
    ("residents", "options"),
    [
        ([4, 4], {}),
        ([1, 0], {"slots": 3, "migrate": "copy"}),
        ([0, 0], {"slots": 1, "migrate": "copy"}),
        ([0, 1], {"slots": 0, "mode": "prefetch-all"}),
        ([0, 1], {"slots": 3, "migrate": "cpu"}),
        (None, {"slots": 3}),
    ],
    ids=["gpu", "cache", "one-slot", "copies", "cpu", "disk"],
)
def test_tokens_are_those_of_unpacked_experts(
    residents: list[int] | None, options: dict[str, Any], tmp_path: Path, fused: list[int]
) -> None:
    make_case(CASES["mixtral"], tmp_path / "model.gguf", mixed)
    tokens = []
    for packed in (True, False):
        memory: dict[str, Any] = {"mode": "host"}
        if residents is None:
            memory = {"mode": "disk", "host_slots": 6, "slots": 2, "disk": tmp_path / "spill"}
        model = load(tmp_path / "model.gguf", packed=packed, **memory)
        if residents is not None:
            model.overspill.set_residents(residents)
        with overspill.LLM(model, context=64, max_batch=4, **options) as llm:
            alone = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS]
            together = [each.token_ids for each in llm.generate(PROMPTS, GREEDY)]
        assert alone == together
        tokens.append(alone)
        model.overspill.check_conserved()
        model.overspill.close()
    assert tokens[0] == tokens[1]
    assert 1 in fused

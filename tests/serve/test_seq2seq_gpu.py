"""Encoder-decoders on a GPU: the greedy tokens of transformers, from the graph, in every mode."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import overspill
from overspill import LLM, SamplingParams
from tests.moe.oracle import delays
from tests.serve.seq2seq import FAMILIES, SOURCES, plain_answer, plain_model, pregated

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@contextmanager
def offloaded(plain: Any, **given: Any) -> Iterator[Any]:
    options = {"device": "cuda", "mode": "host", "slots": 8, "quiet": True, "progress": False}
    model = overspill.offload(copy.deepcopy(plain), **{**options, **given})
    try:
        model.overspill.set_residents([0] * model.overspill.n_layers)
        yield model
    finally:
        model.overspill.close()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of batches for which a step was launched, or captured."""
    from overspill.serve.decode.step import DecodeStep

    sizes: list[int] = []
    call = DecodeStep.__call__

    def counted(self: Any, batch: Any) -> Any:
        sizes.append(len(batch.tokens))
        return call(self, batch)

    monkeypatch.setattr(DecodeStep, "__call__", counted)
    return sizes


def check(plain: Any, steps: list[int], slots: int | None, **flags: Any) -> None:
    on_gpu = copy.deepcopy(plain).to("cuda")
    expected = [plain_answer(on_gpu, source, 12) for source in SOURCES]
    with (
        offloaded(plain) as model,
        LLM(model, context=64, max_batch=4, slots=slots, **flags) as llm,
    ):
        for _ in range(2):
            assert [r.token_ids for r in llm.generate(SOURCES, GREEDY)] == expected, "together"
            alone = [llm.generate([source], GREEDY)[0].token_ids for source in SOURCES]
            assert alone == expected, "alone"
    assert {1, 4} <= set(steps)  # the graph has computed them


@pytest.mark.parametrize("slots", [0, 3, None])
@pytest.mark.parametrize("mode", ["auto", "on-demand", "prefetch-all"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_of_transformers(
    name: str, mode: str, slots: int | None, steps: list[int]
) -> None:
    check(plain_model(name), steps, slots, mode=mode)


@pytest.mark.parametrize("migrate", ["cpu", "copy"])
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_pregates(name: str, level: int, migrate: str, steps: list[int]) -> None:
    check(pregated(name, level), steps, 0, mode="pre-gated", migrate=migrate)


@pytest.mark.parametrize("name", FAMILIES)
def test_all_experts_on_the_gpu_and_in_bf16(name: str, tmp_path: Path, steps: list[int]) -> None:
    """In bfloat16 tokens may differ where two are almost as likely: most are the same."""
    copy.deepcopy(plain_model(name)).bfloat16().save_pretrained(tmp_path)
    results = {}
    for mode in ("gpu-only", "auto"):
        with LLM(tmp_path, device="cuda", mode=mode, context=64, slots=0) as llm:
            results[mode] = [each.token_ids for each in llm.generate(SOURCES, GREEDY)]
            again = [each.token_ids for each in llm.generate(SOURCES, GREEDY)]
            assert again == results[mode]
    same = sum(
        a == b
        for one, other in zip(*results.values(), strict=True)
        for a, b in zip(one, other, strict=True)
    )
    assert steps
    assert same >= 40


@pytest.mark.parametrize("name", FAMILIES)
def test_from_disk_and_with_delays(name: str, tmp_path: Path, steps: list[int]) -> None:
    plain = plain_model(name)
    on_gpu = copy.deepcopy(plain).to("cuda")
    expected = [plain_answer(on_gpu, source, 12) for source in SOURCES]
    settings = overspill.Settings(inject=delays(7))
    disk = {"mode": "disk", "disk": tmp_path, "host_slots": 4, "settings": settings}
    with offloaded(plain, **disk) as model, LLM(model, context=64, max_batch=4) as llm:
        assert [each.token_ids for each in llm.generate(SOURCES, GREEDY)] == expected

"""Modes of decoding steps: whatever is copied when, the tokens are those of the plain model."""

import copy
import dataclasses
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.core.errors import ConfigError
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.serve.decode import decode
from overspill.serve.decode.modes import new_mode
from overspill.serve.decode.rates import ReadRates
from tests.models.huggingface.oracle import offloaded
from tests.serve.decode.decoding import INTERPRETED, Decoding, gpt, small
from tests.serve.models import PROMPTS, plain_gpt, plain_model

pytestmark = INTERPRETED
DEEP = GPTConfig(
    vocab=48, n_layers=5, d_model=16, d_hidden=24, n_heads=1, n_experts=6, top_k=2, max_seq=64
)
COPYING = ["on-demand", "prefetch-all", "lookahead"]
ALL = ["auto", *COPYING, "pre-gated"]


def deep(level: int) -> GPTMoE:
    """Some layers have pre-gates, others compute their gates themselves."""
    return gpt(dataclasses.replace(DEEP, n_layers=level + 2))


@contextmanager
def served(
    plain: Any,
    mode: str,
    folder: Path,
    prompts: list[list[int]],
    slots: int = 0,
) -> Iterator[Decoding]:
    with offloaded(plain, "host", folder) as model:
        made = Decoding(plain, model, prompts, slots, mode)
        try:
            yield made
        finally:
            made.runner.close()


@pytest.mark.parametrize(
    ("mode", "slots"),
    [
        ("on-demand", 3),
        pytest.param("prefetch-all", 0, marks=pytest.mark.slow),
        pytest.param("lookahead", 3, marks=pytest.mark.slow),
    ],
)
def test_the_tokens_of_the_conventional_model(
    mode: str, slots: int, tmp_path: Path, steps: list[int]
) -> None:
    plain, _ = plain_model("mixtral")
    with served(plain, mode, tmp_path, PROMPTS[:1], slots) as made:
        for _ in range(2):
            made.two_steps()
        assert made.runner.stats()["experts_on_cpu"] == 0
        found = made.runner.stats()["expert_hit_rate"]
    assert (sum(found) > 0) == (slots > 0)
    assert steps == [1] * 4


@pytest.mark.parametrize("mode", [pytest.param("on-demand", marks=pytest.mark.slow), *COPYING[1:]])
def test_several_requests(mode: str, tmp_path: Path, steps: list[int]) -> None:
    with served(plain_gpt(), mode, tmp_path, small(PROMPTS[:3]), 2) as made:
        made.step()
    assert steps == [4]


@pytest.fixture
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which pre-gated experts are copied."""
    monkeypatch.setattr(decode, "read_rates", lambda _: ReadRates(cpu=1.0, link=2.0))


@pytest.mark.parametrize(
    ("mode", "level"),
    [
        *(pytest.param(mode, 1, marks=pytest.mark.slow) for mode in COPYING),
        ("pre-gated", 2),
        ("auto", 3),
    ],
)
def test_the_tokens_of_a_model_with_pre_gates(
    mode: str, level: int, tmp_path: Path, steps: list[int]
) -> None:
    plain = overspill.pregate(deep(level), level)
    with served(plain, mode, tmp_path, small(PROMPTS[:1])) as made:
        made.two_steps()
        on_cpu = made.runner.stats()["experts_on_cpu"]
    assert (on_cpu > 0) == (mode in ("auto", "pre-gated"))
    assert steps == [1, 1]


@pytest.mark.usefixtures("fast_link")
@pytest.mark.parametrize("level", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_pre_gated_experts_are_copied_where_that_is_faster(
    level: int, tmp_path: Path, steps: list[int]
) -> None:
    plain = overspill.pregate(deep(level), level)
    with served(plain, "pre-gated", tmp_path, small(PROMPTS[:1])) as made:
        made.two_steps()
        assert made.runner.stats()["experts_on_cpu"] == 0
    assert steps == [1, 1]


@pytest.mark.usefixtures("fast_link")
@pytest.mark.parametrize("level", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_auto_does_not_use_the_cpu_where_the_link_is_faster(
    level: int, tmp_path: Path, steps: list[int]
) -> None:
    plain = overspill.pregate(deep(level), level) if level else deep(1)
    with served(plain, "auto", tmp_path, small(PROMPTS[:1])) as made:
        made.two_steps()
        assert made.runner.stats()["experts_on_cpu"] == 0
    assert steps == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("copied", [False, True])
def test_several_requests_of_a_model_with_pre_gates(
    copied: bool, tmp_path: Path, steps: list[int], request: pytest.FixtureRequest
) -> None:
    if copied:
        request.getfixturevalue("fast_link")
    plain = overspill.pregate(deep(2), 2)
    with served(plain, "pre-gated", tmp_path, small(PROMPTS[:3]), 4) as made:
        made.step()
    assert steps == [4]


@pytest.mark.usefixtures("fast_link")
@pytest.mark.parametrize("name", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_pre_gates_of_transformers(name: str, tmp_path: Path, steps: list[int]) -> None:
    plain = overspill.pregate(copy.deepcopy(plain_model(name)[0]))
    with served(plain, "pre-gated", tmp_path, PROMPTS[:2]) as made:
        made.step()
    assert steps == [2]


@pytest.mark.usefixtures("steps")
def test_modules_announce_the_experts_that_they_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this family the ids come first in the result of a gate (until transformers 5.22)."""
    from overspill.serve.decode.module_step import ModuleStep

    compute, pairs = ModuleStep.__call__, []

    def noted(step: Any, batch: Any) -> Any:
        computed = compute(step, batch)
        pairs.extend((ids_BK.clone(), computed.ids_LBK[n]) for n, ids_BK in step._announced.items())
        return computed

    monkeypatch.setattr(ModuleStep, "__call__", noted)
    plain = overspill.pregate(copy.deepcopy(plain_model("granitemoe")[0]))
    with served(plain, "pre-gated", tmp_path, PROMPTS[:1]) as made:
        made.step()
    assert len(pairs) == 1
    for announced, computed in pairs:
        assert torch.equal(announced, computed)


def test_memory_for_experts_of_later_layers_is_counted_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are slots for each size of a batch: graphs refer to them."""
    from overspill.serve.decode import linked_experts, migration

    made_slots: list[weakref.ref[torch.Tensor]] = []
    most: list[int] = []
    new_region, new = migration.new_region, linked_experts.LinkedExperts.__init__

    def noted(*args: Any) -> Any:
        region = new_region(*args)
        made_slots.append(weakref.ref(region.slots_ND))
        return region

    def counted(self: Any, *args: Any) -> None:
        new(self, *args)
        most.append(self.most_bytes)

    monkeypatch.setattr(migration, "new_region", noted)
    monkeypatch.setattr(linked_experts.LinkedExperts, "__init__", counted)
    plain = gpt(dataclasses.replace(DEEP, n_layers=3, n_experts=12))
    with served(plain, "lookahead", tmp_path, small(PROMPTS[:3])) as made:
        made.step()
        made.requests.pop()
        made._scheduler.remove(made._scheduler.running[-1])
        made.step()
        assert len(made_slots) == 2 * 2
        slots = [each() for each in made_slots]
        assert sum(each.nbytes for each in slots if each is not None) <= most[0]
        del slots
    assert made.runner is not None
    assert not any(each() is not None for each in made_slots)


def test_a_mode_needs_what_it_uses() -> None:
    with pytest.raises(ConfigError, match="needs a model with pre-gates"):
        new_mode("pre-gated", 0)
    with pytest.raises(ConfigError, match="must be one of 'auto', 'gpu-only'"):
        new_mode("fast", 1)

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
from overspill.compute.decode.migrate import Region
from overspill.core.errors import ConfigError
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.plan.eviction import LFU, LRU, Policy
from overspill.serve.decode import cpu_experts, decode, migration
from overspill.serve.decode.modes import check_decoding, new_mode
from overspill.serve.decode.rates import ReadRates
from overspill.serve.options import DecodingOptions
from tests.models.huggingface.oracle import offloaded
from tests.serve.decode.decoding import INTERPRETED, Decoding, gpt, small
from tests.serve.models import PROMPTS, plain_gpt, plain_model
from tests.slow import slow_names

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
    migrate: str = "auto",
    cache_policy: str = "lfu",
) -> Iterator[Decoding]:
    with offloaded(plain, "host", folder) as model:
        options = {"migrate": migrate, "cache_policy": cache_policy}
        made = Decoding(plain, model, prompts, slots, mode, **options)
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
    """A machine whose link is faster than its CPU."""
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


class Ahead:
    """What has been done with experts that were named for a later layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copied = 0
        self.hinted = 0
        migrate, hint = migration.migrate, cpu_experts.hint

        def copies(region: Region, *args: Any) -> None:
            migrate(region, *args)
            self.copied += int((region.list_N >= 0).sum())

        def hints(*args: Any) -> None:
            hint(*args)
            self.hinted += 1

        monkeypatch.setattr(migration, "migrate", copies)
        monkeypatch.setattr(cpu_experts, "hint", hints)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Ahead:
    return Ahead(monkeypatch)


@pytest.mark.parametrize("level", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["pre-gated", pytest.param("auto", marks=pytest.mark.slow)])
def test_copy_copies_what_pre_gates_name(
    mode: str, level: int, tmp_path: Path, steps: list[int], ahead: Ahead
) -> None:
    """On a machine whose CPU would be faster."""
    plain = overspill.pregate(deep(level), level)
    with served(plain, mode, tmp_path, small(PROMPTS[:1]), migrate="copy") as made:
        made.two_steps()
        assert made.runner.stats()["experts_on_cpu"] == 0
    assert (ahead.copied > 0, ahead.hinted) == (True, 0)
    assert steps == [1, 1]


@pytest.mark.usefixtures("fast_link")
@pytest.mark.parametrize(
    ("mode", "named"),
    [
        ("pre-gated", True),
        ("lookahead", True),
        pytest.param("prefetch-all", True, marks=pytest.mark.slow),
        pytest.param("on-demand", False, marks=pytest.mark.slow),
        pytest.param("auto", True, marks=pytest.mark.slow),
    ],
)
def test_cpu_loads_and_computes_what_a_mode_names(
    mode: str, named: bool, tmp_path: Path, steps: list[int], ahead: Ahead
) -> None:
    """On a machine whose link would be faster."""
    plain = overspill.pregate(deep(1), 1)
    with served(plain, mode, tmp_path, small(PROMPTS[:1]), migrate="cpu") as made:
        made.two_steps()
        assert made.runner.stats()["experts_on_cpu"] > 0
    assert (ahead.copied, ahead.hinted > 0) == (0, named)
    assert steps == [1, 1]


@pytest.mark.parametrize("mode", ["on-demand", pytest.param("pre-gated", marks=pytest.mark.slow)])
def test_either_cache_policy_gives_the_same_tokens(
    mode: str, tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[type[Policy]] = []
    for each in (LRU, LFU):
        monkeypatch.setattr(each, "use", _noting(each.use, used))
    plain = overspill.pregate(deep(1), 1)
    for policy, name in ((LRU, "lru"), (LFU, "lfu")):
        used.clear()
        given = small(PROMPTS[:1]), 3, "copy", name
        with served(plain, mode, tmp_path / name, *given) as made:
            for _ in range(2):
                made.two_steps()
            assert made.runner.stats()["expert_slots"] == 3
        assert {*used} == {policy}
    assert steps == [1] * 8


def _noting(use: Any, used: list[type[Policy]]) -> Any:
    def noted(self: Policy, experts_LN: Any) -> None:
        used.append(type(self))
        use(self, experts_LN)

    return noted


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
@pytest.mark.parametrize("migrate", ["cpu", "copy"])
def test_several_requests_of_a_model_with_pre_gates(
    migrate: str, tmp_path: Path, steps: list[int]
) -> None:
    plain = overspill.pregate(deep(2), 2)
    with served(plain, "pre-gated", tmp_path, small(PROMPTS[:3]), 4, migrate) as made:
        made.step()
    assert steps == [4]


@pytest.mark.parametrize(
    "name", slow_names(["mixtral", "gpt_oss", "qwen3_next"], "gpt_oss", "qwen3_next")
)
def test_pre_gates_of_transformers(name: str, tmp_path: Path, steps: list[int]) -> None:
    plain = overspill.pregate(copy.deepcopy(plain_model(name)[0]))
    with served(plain, "pre-gated", tmp_path, PROMPTS[:2], migrate="copy") as made:
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
        new_mode(DecodingOptions(mode="pre-gated"), 0)


def test_migrate_is_refused_where_it_contradicts_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    for migrate in ("cpu", "copy"):
        with pytest.raises(ConfigError, match="'gpu-only' has none there"):
            check_decoding(DecodingOptions(mode="gpu-only", migrate=migrate), gpu)
        check_decoding(DecodingOptions(mode="on-demand", migrate=migrate), gpu)
    with pytest.raises(ConfigError, match="and this model is computed on cpu"):
        check_decoding(DecodingOptions(migrate="copy"), cpu)
    check_decoding(DecodingOptions(migrate="cpu"), cpu)
    monkeypatch.setattr(decode, "why_unsupported", lambda *_, **__: "no C++ compiler")
    with (
        pytest.raises(ConfigError, match="use migrate='copy', or leave it out"),
        served(deep(1), "auto", tmp_path, small(PROMPTS[:1]), migrate="cpu"),
    ):
        pass


def test_experts_on_disk_cannot_be_copied_ahead(tmp_path: Path) -> None:
    plain = deep(1)
    with offloaded(plain, "disk", tmp_path) as model:
        with pytest.raises(ConfigError, match="some are on disk; give more host_memory"):
            Decoding(plain, model, small(PROMPTS[:1]), migrate="copy")
        Decoding(plain, model, small(PROMPTS[:1]), migrate="cpu").runner.close()

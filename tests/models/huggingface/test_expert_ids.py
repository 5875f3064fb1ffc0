"""The experts that pre-gates hint at are those that the block then computes."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.core.errors import ConfigError
from overspill.models.pregate import find_chains
from overspill.moe.dispatch import LocalDispatcher
from overspill.moe.engine import Engine
from tests.models.huggingface.families import (
    FAMILIES,
    UNEVEN,
    Family,
    cases,
    make_batch,
    make_model,
)
from tests.models.huggingface.oracle import budgets
from tests.models.huggingface.pregated import DEEP

DEEP_BY_NAME = {family.name: family for family in DEEP}
BY_NAME = {family.name: family for family in FAMILIES}
ENCODER_DECODERS = ("switch_transformers", "nllb-moe")
REFUSED = {
    "zaya": "ZayaRouter depends on router_states",
    "muse_spark": "MuseSparkExperts.* has a norm after each expert: not supported",
    "ernie4_5_vl_moe": "layers with different experts are not supported",
}
"""Families that cannot be offloaded with pre-gates."""
FEW = [
    DEEP_BY_NAME.get(family.name, family) if family.name in ENCODER_DECODERS else family
    for family in (*FAMILIES, *UNEVEN)
]


class Noted:
    """Expert ids [T, K] by layer, of all passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hinted: dict[int, list[Tensor]] = defaultdict(list)
        self.needed: dict[int, list[Tensor]] = defaultdict(list)
        self.events: list[tuple[str, int]] = []
        hint, route = Engine.hint, LocalDispatcher.route

        def noted_hint(engine: Engine, layer: int, ids_TK: Tensor) -> None:
            self.hinted[layer].append(ids_TK.clone())
            self.events.append(("hinted", layer))
            hint(engine, layer, ids_TK)

        def noted_route(own: Any, layer: int, ids_TK: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.needed[layer].append(ids_TK.clone())
            self.events.append(("needed", layer))
            return route(own, layer, ids_TK, *args, **kwargs)

        monkeypatch.setattr(Engine, "hint", noted_hint)
        monkeypatch.setattr(LocalDispatcher, "route", noted_route)


@contextmanager
def hosted(model: Any, folder: Path, device: str = "cpu", **settings: Any) -> Iterator[Any]:
    given = budgets("host", folder) | {"device": device}
    twin: Any = overspill.offload(model, settings=overspill.Settings(**settings), **given)
    try:
        yield twin
    finally:
        twin.overspill.close()


@torch.no_grad()
def prompt_and_tokens(model: Any, family: Family) -> None:
    """A prompt of twelve tokens, then passes of one token."""
    ids = make_batch(family, model)["input_ids"][:1].to(model.device)
    if model.can_generate():
        model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    else:
        for part in (ids, ids[:, :1]):
            model(input_ids=part)


def check(model: Any, family: Family, level: int, noted: Noted) -> None:
    prompt_and_tokens(model, family)
    number = iter(range(len(noted.needed)))
    layers = [[next(number) for _ in chain] for chain in find_chains(model)]
    conventional = {layer for chain in layers for layer in chain[:level]}
    assert noted.hinted.keys() == noted.needed.keys() - conventional
    for chain in layers:  # each by the block `level` blocks before, when that has its own experts
        order = []
        for place, layer in enumerate(chain):
            order += [("hinted", later) for later in chain[place + level :][:1]]
            order.append(("needed", layer))
        events = [event for event in noted.events if event[1] in chain]
        assert events == order * (len(events) // len(order))
    for layer, hinted in noted.hinted.items():
        assert len(hinted) >= 1
        for ahead, now in zip(hinted, noted.needed[layer], strict=True):
            assert torch.equal(ahead.sort(-1).values, now.sort(-1).values.to(ahead.dtype))
    passes = {len(ids) for ids in noted.needed[max(noted.needed)]}
    assert 1 in passes
    assert max(passes) > 1 or family.name in ENCODER_DECODERS  # the prompt is the encoder's
    assert max(len(ids) for ids in noted.needed[0]) == 12


@pytest.mark.parametrize("family", cases(FEW))
def test_hinted_experts_are_those_that_are_needed(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(family).eval()
    if family.name in REFUSED:
        with (
            pytest.raises(ConfigError, match=REFUSED[family.name]),
            hosted(overspill.pregate(model), tmp_path),
        ):
            pass
        return
    noted = Noted(monkeypatch)
    with hosted(overspill.pregate(model), tmp_path) as twin:
        check(twin, family, 1, noted)


@pytest.mark.parametrize(
    ("family", "level"),
    [
        *((family, 2) for family in DEEP),
        *((DEEP_BY_NAME[name], 3) for name in ENCODER_DECODERS),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_hinted_experts_are_those_that_are_needed_some_blocks_ahead(
    family: Family, level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(monkeypatch)
    with hosted(make_model(family).eval(), tmp_path) as twin:
        check(overspill.pregate(twin, level), family, level, noted)


@pytest.mark.parametrize("fixed", [False, True])
def test_nllb_hints_at_what_its_routing_needs(
    fixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = DEEP_BY_NAME["nllb-moe"]
    noted = Noted(monkeypatch)
    with hosted(make_model(family).eval(), tmp_path, fix_nllb_routing=fixed) as model:
        check(overspill.pregate(model), family, 1, noted)
        n_experts = model.overspill.n_experts
    used = {int(e) for ids in noted.hinted.values() for each in ids for e in each.flatten()}
    assert used - {n_experts} == (set(range(n_experts)) if fixed else {0, 1})


def test_tokens_beyond_the_capacity_of_switch_are_hints_for_no_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = DEEP_BY_NAME["switch_transformers"]
    noted = Noted(monkeypatch)
    model = make_model(family).eval()
    for module in model.modules():
        if hasattr(module, "expert_capacity"):
            module.expert_capacity = 0
    with hosted(overspill.pregate(model), tmp_path) as twin, torch.no_grad():
        twin(**make_batch(family, twin))
        none = twin.overspill.n_experts
    for ahead, now in zip(noted.hinted[1], noted.needed[1], strict=True):
        assert ahead.shape == (24, 1)
        assert torch.equal(ahead, now)
        assert (ahead == none).all()


# -- routers that are not known ------------------------------------------------------------------


def test_a_gate_of_logits_is_refused_by_name() -> None:
    """Its block chooses experts by them, in its own way."""
    model = make_model(BY_NAME["mixtral"])
    for layer in model.model.layers:
        layer.mlp.gate = nn.Linear(32, 4)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp .*how MixtralSparseMoeBlock chooses"):
        overspill.pregate(model)
    assert [type(module) for module in model.modules()] == kinds


class TwoTensors(nn.Module):
    """A router whose result has positions too."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        logits, weights, ids = self.plain(hidden_states)
        return logits, torch.arange(len(ids))[:, None] + ids * 0, weights, ids


def test_a_router_with_several_tensors_of_integers_is_refused_by_name(tmp_path: Path) -> None:
    family = BY_NAME["mixtral"]
    model = make_model(family).eval()
    for layer in model.model.layers:
        layer.mlp.gate = TwoTensors(layer.mlp.gate)
    with (
        hosted(overspill.pregate(model), tmp_path) as twin,
        pytest.raises(ConfigError, match=r"layers\.1\.mlp .*TwoTensors .*2 tensors of integers"),
    ):
        prompt_and_tokens(twin, family)


@pytest.mark.parametrize("training", [False, True])
def test_a_block_that_changes_the_ids_of_its_gate_is_refused_by_name(
    training: bool, tmp_path: Path
) -> None:
    family = BY_NAME["qwen3_moe"]
    model = overspill.pregate(make_model(family).train(training))
    batch = make_batch(family, model)

    def reverse(_: object, args: object, result: Any) -> Any:
        logits, weights, ids = result
        return logits, weights, 3 - ids

    with hosted(model, tmp_path) as twin, torch.set_grad_enabled(training):
        twin(**batch)
        handle = twin.model.layers[2].mlp.gate.register_forward_hook(reverse)
        with pytest.raises(ConfigError, match=r"layers\.2\.mlp .*Qwen3MoeTopKRouter .*other exp"):
            twin(**batch)
        handle.remove()
        twin(**batch)

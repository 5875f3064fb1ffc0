"""Dropout inside the experts of Switch and NLLB, against plain transformers with the same masks."""

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import overspill
from overspill.compute.dropout import Dropout, Site
from overspill.core.experts import ExpertId, Phase
from overspill.models.huggingface.dictionaries import read_nllb, read_nllb_top_2, read_switch
from overspill.moe.state_dict import placeholders, split_record
from tests.models.huggingface.families import FAMILIES, make_batch, make_model
from tests.models.huggingface.oracle import (
    ADAM,
    assert_same_gradients,
    expert_gradients,
    offloaded,
)
from tests.models.huggingface.pregated import DEEP, call_by_hand
from tests.parallel.processes import run_ranks
from tests.slow import slow_rows

BY_NAME = {family.name: family for family in FAMILIES}
DEEP_BY_NAME = {family.name: family for family in DEEP}
RATES = {
    "switch_transformers": {"dropout_rate": 0.1},
    "nllb-moe": {
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "activation_dropout": 0.1,
        "moe_token_dropout": 0.2,
    },
}


def with_dropout(name: str, families: Any = BY_NAME, **changes: float) -> Any:
    """A model that drops elements everywhere, as the checkpoints of these families do."""
    family = families[name]
    build: Any = family.build
    changed = partial(build.func, *build.args, **build.keywords | RATES[name] | changes)
    return make_model(dataclasses.replace(family, build=changed)).train()


def naive_experts(read: Any, experts: Any, hidden: Tensor, *routing: Tensor) -> Tensor:
    """Each token by itself, with the masks of its assignments."""
    linears = [("wi", "wo"), ("fc1", "fc2")][hasattr(experts, "token_dropout")]
    n_experts = len([key for key in experts if key.startswith("expert_")])
    ids_TK, weights_TK = read(*routing, n_experts)
    drawn, of_results = None, getattr(experts, "moe_token_dropout", 0)
    if experts.training:
        drawn = Dropout.draw(experts.expert_0.dropout.p, of_results)
    else:  # as transformers does
        weights_TK = weights_TK * (1 - of_results)
    out_TD = []
    for token, ids in enumerate(ids_TK.tolist()):
        out_TD.append(torch.zeros_like(hidden[token]))
        for k, index in enumerate(ids):
            if index == n_experts:
                continue
            expert = experts[f"expert_{index}"]
            w_in, w_out = (getattr(expert, linear) for linear in linears)
            number = torch.tensor([token * len(ids) + k])
            a = dropped(drawn, Site.HIDDEN, number, expert.act(w_in(hidden[token])))
            y = dropped(drawn, Site.OUTPUT, number, w_out(a) * weights_TK[token, k])
            out_TD[-1] = out_TD[-1] + y
    return torch.stack(out_TD)


def dropped(drawn: Dropout | None, site: Site, number: Tensor, values: Tensor) -> Tensor:
    dropout = None if drawn is None else drawn.of_rows(site, number)
    if dropout is None:
        return values
    return values * dropout.mask(len(values))[0] / (1 - dropout.rate)


def with_naive_experts(model: Any, fixed: bool = False) -> Any:
    for module in model.modules():
        kind = type(module).__name__
        if kind in ("SwitchTransformersExperts", "NllbMoeExperts"):
            read = read_nllb_top_2 if fixed else read_nllb
            read = read_switch if kind == "SwitchTransformersExperts" else read
            module.forward = partial(naive_experts, read, module)
    return model


@pytest.mark.parametrize(
    ("name", "mode", "checkpoint", "batches", "activations"),
    slow_rows(
        [
            ("switch_transformers", "host", None, 2, "recompute"),
            ("switch_transformers", "disk", False, 1, "recompute"),
            ("switch_transformers", "gpu", True, 1, "recompute"),
            ("nllb-moe", "disk", False, 2, "recompute"),
            ("nllb-moe", "host", None, 1, "keep"),
        ],
        1,
    ),
)
def test_training_with_dropout_follows_plain_transformers(
    name: str, mode: str, checkpoint: bool | None, batches: int, activations: str, tmp_path: Path
) -> None:
    """Slots for some experts only, in waves and one by one, recomputed by checkpoints (reentrant or
    not), over several batches; dropout and jitter of transformers itself draw from the same
    generator."""
    fixed = name == "nllb-moe"
    model = with_dropout(name) if fixed else with_dropout(name, router_jitter_noise=0.3)
    settings = overspill.Settings(
        fix_nllb_routing=fixed, waves=mode != "host", activations=activations, max_rows=7
    )
    given = [make_batch(BY_NAME[name], model, seed=seed) for seed in range(batches)]
    with offloaded(model, mode, tmp_path, settings) as twin:
        plain = with_naive_experts(model, fixed)
        if checkpoint is not None:
            twin.gradient_checkpointing_enable({"use_reentrant": checkpoint})
        optimizer = overspill.AdamW(twin, max_grad_norm=1e9, **ADAM)
        torch.manual_seed(11)
        expected = [plain(**batch).loss for batch in given]
        sum(expected).backward()
        torch.manual_seed(11)
        for number, batch in enumerate(given):
            with optimizer.accumulate() if number + 1 < len(given) else nullcontext():
                loss = twin(**batch).loss
                loss.backward()
            torch.testing.assert_close(loss, expected[number], rtol=1e-5, atol=1e-6)
        for key, parameter in plain.named_parameters():
            if parameter.grad is None and ".experts." in key:
                parameter.grad = torch.zeros_like(parameter)  # not chosen by any token
        optimizer.step()
        assert_same_gradients(plain, twin, expert_gradients(twin, optimizer))
        assert twin(**given[0]).loss != twin(**given[0]).loss  # other masks in each pass
        expected_eval = plain.load_state_dict(twin.state_dict()) and plain.eval()(**given[0]).loss
        torch.testing.assert_close(twin.eval()(**given[0]).loss, expected_eval)


@pytest.mark.parametrize(
    ("name", "level", "mode", "recompute"),
    slow_rows(
        [
            ("switch_transformers", 1, "host", True),
            ("switch_transformers", 2, "disk", False),
            ("switch_transformers", 3, "gpu", True),
            ("nllb-moe", 1, "disk", False),
            ("nllb-moe", 2, "gpu", True),
            ("nllb-moe", 3, "host", False),
        ],
        1, 3, 4,
    ),
)  # fmt: skip
def test_training_with_pre_gates_dropout_and_jitter_follows_gates_that_are_called_by_hand(
    name: str, level: int, mode: str, recompute: bool, tmp_path: Path
) -> None:
    """Encoder and decoder have four MoE blocks each."""
    fixed = name == "nllb-moe"
    changes = {} if fixed else {"router_jitter_noise": 0.3}
    model = with_dropout(name, DEEP_BY_NAME, **changes)
    batch = make_batch(DEEP_BY_NAME[name], model)
    settings = overspill.Settings(fix_nllb_routing=fixed)
    with offloaded(model, mode, tmp_path, settings) as twin:
        plain = call_by_hand(with_naive_experts(model, fixed), level)
        overspill.pregate(twin, level)
        if recompute:
            twin.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = overspill.AdamW(twin, max_grad_norm=1e9, **ADAM)
        losses = []
        for each in (plain, twin):
            torch.manual_seed(11)
            losses.append(each(**batch).loss)
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        for key, parameter in plain.named_parameters():
            if parameter.grad is None and ".experts." in key:
                parameter.grad = torch.zeros_like(parameter)  # not chosen by any token
        optimizer.step()
        # eight blocks with large weights, whose sums the oracle computes token by token
        assert_same_gradients(plain, twin, expert_gradients(twin, optimizer), rounding=5e-4)


def test_the_rates_are_those_of_the_modules_now(tmp_path: Path) -> None:
    """As in plain transformers, `p` and `train()` of a dropout module may be changed."""
    model = with_dropout("switch_transformers")
    batch = make_batch(BY_NAME["switch_transformers"], model)
    with offloaded(model, "host", tmp_path) as twin, torch.no_grad():
        plain = with_naive_experts(model)
        for changed in (plain, twin):
            for module in changed.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.4
        torch.manual_seed(2)
        expected = plain(**batch).loss
        torch.manual_seed(2)
        torch.testing.assert_close(twin(**batch).loss, expected)
        for module in twin.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0  # of attention
        before = torch.get_rng_state()
        twin(**batch)
        assert torch.equal(torch.get_rng_state(), before)  # nothing is drawn


def everything(counts: Sequence[int], phase: Phase) -> frozenset[int]:
    return frozenset(range(len(counts)))


def test_the_cpu_computes_no_experts_in_passes_with_dropout(tmp_path: Path) -> None:
    """Its kernel does not drop anything. Frozen experts with GELU, which it would compute."""
    model = with_dropout("switch_transformers")
    for module in model.modules():
        if hasattr(module, "act"):
            module.act = torch.nn.GELU()
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in key)
    batch = make_batch(BY_NAME["switch_transformers"], model)
    settings = overspill.Settings(cpu_experts=True, cpu_policy=everything, threads=1)
    with offloaded(model, "host", tmp_path, settings) as twin:
        plain = with_naive_experts(model)
        for training in (True, False, True):
            torch.manual_seed(4)
            expected = plain.train(training)(**batch).loss
            torch.manual_seed(4)
            loss = twin.train(training)(**batch).loss
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        expected.backward()
        loss.backward()
        assert_same_gradients(plain, twin, {})


# -- several ranks -------------------------------------------------------------------------------


def products_of_rank(
    mesh: DeviceMesh, placement: str
) -> tuple[list[float], list[float], list[float]]:
    """Return for each MoE layer the sum of y * dy over the tokens of this rank, and the sums of
    each weight times its gradient over the experts of this rank, for either matrix."""
    model = with_dropout("switch_transformers")
    experts = [m for m in model.modules() if type(m).__name__ == "SwitchTransformersExperts"]
    own: dict[str, Any] = {"mode": "host", "slots": 2, "quiet": True, "mesh": mesh}
    settings = overspill.Settings(threads=1, placement=placement)
    overspill.offload(model, settings=settings, **own)
    outputs: list[Tensor] = []
    for module in experts:
        module.register_forward_hook(lambda _, args, y: (y.retain_grad(), outputs.append(y))[0])
    optimizer = overspill.AdamW(model, max_grad_norm=1e9, weight_decay=0.0, lr=0.0)
    torch.manual_seed(dist.get_rank())
    model(**make_batch(BY_NAME["switch_transformers"], model, seed=dist.get_rank())).loss.backward()
    of_results = [float((y.detach() * y.grad).sum()) for y in outputs if y.grad is not None]
    optimizer.step()
    engine = model.overspill
    engine.flush()
    of_w_in, of_w_out = [0.0] * len(experts), [0.0] * len(experts)
    moment, weights = (torch.empty(engine.shape.numel) for _ in range(2))
    for _, placeholder, _ in placeholders(model):
        for index in engine.experts.local_ids:
            expert = ExpertId(placeholder.layer, index)
            engine.records.read_weights(expert, weights)
            optimizer.read_expert_state(expert, "exp_avg", moment)
            grads = split_record(moment / (1 - optimizer.param_groups[0]["betas"][0]), engine.shape)
            for total, w, g in zip(
                (of_w_in, of_w_out), split_record(weights, engine.shape), grads, strict=True
            ):
                total[placeholder.layer] += float((w * g).sum())
    engine.close()
    return of_results, of_w_in, of_w_out


def products_of_all(mesh: DeviceMesh) -> list[tuple[list[float], list[float], list[float]]]:
    return [products_of_rank(mesh, placement) for placement in ("static", "dynamic")]


def test_ranks_have_the_same_masks_in_backward() -> None:
    """Experts with ReLU and without biases are homogeneous in either matrix, whatever is dropped:
    weight times gradient, summed over the experts of all ranks, is y * dy, summed over all tokens,
    if and only if backward has dropped what forward has."""
    for results in zip(*run_ranks(2, products_of_all), strict=True):
        of_results, *of_weights = (
            [sum(of_ranks) for of_ranks in zip(*parts, strict=True)]
            for parts in zip(*results, strict=True)
        )
        expected = torch.tensor(of_results) / 2  # gradients of experts are means over ranks
        assert expected.abs().min() > 1e-3
        for found in of_weights:
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-6)

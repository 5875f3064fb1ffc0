"""Losses, gradients and weights of a model that trains in stages equal plain transformers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from tests.models.huggingface.families import make_model
from tests.models.huggingface.oracle import ADAM, MODES, assert_same_weights, offloaded
from tests.models.stages.staged import (
    BLOCKS,
    MIXTRAL,
    Late,
    assert_follows,
    freeze,
    micro_batches,
    staged,
    train_plain,
    train_staged,
)
from tests.moe.streaming.policies import random_policy
from tests.pairs import all_pairs
from tests.slow import slow_rows


@pytest.fixture(scope="module")
def mixtral() -> Any:
    return make_model(MIXTRAL)


@pytest.mark.parametrize(
    ("n_stages", "count", "mode", "clip", "checkpointing", "offload", "frozen", "balance", "late"),
    slow_rows(
        all_pairs(
            [1, 2, 4],
            [1, 2, 4],
            list(MODES),
            [None, 0.1],
            [None, "reentrant", "not reentrant"],
            [False, True],
            ["nothing", "experts", "dense"],
            [False, True],
            [False, True],
        ),
        1,
        2,
        3,
        5,
        6,
        7,
        12,
    ),
)
def test_stages_follow_plain_training(
    mixtral: Any,
    n_stages: int,
    count: int,
    mode: str,
    clip: float | None,
    checkpointing: str | None,
    offload: bool,
    frozen: str,
    balance: bool,
    late: bool,
    tmp_path: Path,
) -> None:
    plain = copy.deepcopy(mixtral)
    freeze(plain, frozen)
    if checkpointing is not None:
        plain.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    others = {"output_router_logits": True} if balance else {}
    steps = [micro_batches(count, **others), micro_batches(1 + count % 2, **others)]
    delays = Late()
    given = {"offload_activations": offload, "model": plain}
    settings = overspill.Settings(inject=delays if late else None, threads=1)
    with staged(n_stages, mode, tmp_path, settings=settings, **given) as (twin, stages):
        optimizer = overspill.AdamW(twin, max_grad_norm=clip, **ADAM)
        run = train_staged(stages, twin, optimizer, steps)
        assert_follows(run, train_plain(plain, steps, clip))
        assert_same_weights(plain, twin, atol=1e-5)
    delays.close()


@pytest.mark.parametrize(
    ("clip", "frozen", "checkpointing"),
    slow_rows([(None, "nothing", False), (0.1, "nothing", True), (None, "experts", False)], 0),
)
def test_any_split_between_cpu_and_device_in_stages(
    mixtral: Any, clip: float | None, frozen: str, checkpointing: bool, tmp_path: Path
) -> None:
    """Of trained and of frozen experts."""
    plain = copy.deepcopy(mixtral)
    freeze(plain, frozen)
    if checkpointing:
        plain.gradient_checkpointing_enable({"use_reentrant": False})
    steps, delays = [micro_batches(4), micro_batches(1)], Late()
    settings = overspill.Settings(
        cpu_experts=True, cpu_training=True, cpu_policy=random_policy(3), inject=delays, threads=1
    )
    with staged(2, "host", tmp_path, settings=settings, model=plain) as (twin, stages):
        optimizer = overspill.AdamW(twin, max_grad_norm=clip, **ADAM)
        run = train_staged(stages, twin, optimizer, steps)
        assert_follows(run, train_plain(plain, steps, clip))
        assert_same_weights(plain, twin, atol=1e-5)
    assert "cpu" in delays.seen
    delays.close()


def test_stages_give_the_bits_of_micro_batches_one_after_another(
    mixtral: Any, tmp_path: Path
) -> None:
    """In bf16, where another order of additions would show."""
    narrow, batches = copy.deepcopy(mixtral).to(torch.bfloat16), micro_batches(3)
    with offloaded(narrow, "host", tmp_path) as one:
        optimizer = overspill.AdamW(one, max_grad_norm=0.5, **ADAM)
        for _ in range(2):
            for batch in batches[:-1]:
                with optimizer.accumulate():
                    (one(**batch).loss / 3).backward()
            (one(**batches[-1]).loss / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = {name: value.clone() for name, value in one.state_dict().items()}
    with staged(3, "disk", tmp_path, model=narrow) as (twin, stages):
        optimizer = overspill.AdamW(twin, max_grad_norm=0.5, **ADAM)
        for _ in range(2):
            stages.backward(batches, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        for name, value in twin.state_dict().items():
            assert torch.equal(value, expected[name]), name


def test_adapters_are_trained_in_stages(mixtral: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        init_lora_weights=False,
    )
    steps = [micro_batches(3), micro_batches(2)]
    with offloaded(mixtral, "host", tmp_path) as twin:
        torch.manual_seed(0)
        mine = peft.get_peft_model(twin, config)
        stages = overspill.Stages(mine, 3, offload_activations=True, small_activation=0)
        optimizer = overspill.AdamW(mine, **ADAM)
        torch.manual_seed(0)
        theirs = peft.get_peft_model(copy.deepcopy(mixtral), config)
        run = train_staged(stages, mine, optimizer, steps)
        expected = train_plain(theirs, steps)
        assert run.losses == [pytest.approx(step, rel=1e-5) for step in expected.losses]
        trained = {n: p for n, p in theirs.named_parameters() if p.requires_grad}
        assert len(trained) == 2 * 4 * BLOCKS
        for name, parameter in mine.named_parameters():
            if name in trained:
                torch.testing.assert_close(parameter, trained[name], rtol=1e-5, atol=1e-6)

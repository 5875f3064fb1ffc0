"""Models with pre-gates in stages: results of pre-gates travel to the stage of their block."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from tests.models.huggingface.families import make_batch, make_model
from tests.models.huggingface.oracle import ADAM, assert_same_weights, offloaded
from tests.models.huggingface.pregated import DEEP, call_by_hand
from tests.models.stages.staged import Batch, assert_follows, train_plain, train_staged
from tests.pairs import all_pairs
from tests.slow import slow_rows

FAMILIES = {family.name: family for family in DEEP}


def batches_of(name: str, model: Any, **others: Any) -> list[Batch]:
    """Micro-batches of one sequence and of two."""
    batch: dict[str, Any] = make_batch(FAMILIES[name], model)
    return [batch | others, {key: value[1:] for key, value in batch.items()} | others]


@pytest.mark.parametrize(
    ("name", "n_stages", "level", "checkpointing", "offload", "balance"),
    slow_rows(
        all_pairs(
            ["mixtral", "gpt_oss", "deepseek_v3", "qwen3_moe"],
            [2, 3, 4],
            [1, 2, 3],
            [False, True],
            [False, True],
            [False, True],
        ),
        *(n for n in range(14) if n not in (1, 7, 8)),
    ),
)
def test_stages_follow_gates_that_are_called_by_hand(
    name: str,
    n_stages: int,
    level: int,
    checkpointing: bool,
    offload: bool,
    balance: bool,
    tmp_path: Path,
) -> None:
    plain = make_model(FAMILIES[name])
    others = {"output_router_logits": True} if balance and name != "deepseek_v3" else {}
    steps = [batches_of(name, plain, **others)] * 2
    with offloaded(plain, "host", tmp_path) as twin:
        overspill.pregate(twin, level)
        if checkpointing:
            twin.gradient_checkpointing_enable({"use_reentrant": False})
        stages = overspill.Stages(twin, n_stages, offload_activations=offload, small_activation=0)
        optimizer = overspill.AdamW(twin, max_grad_norm=0.5, **ADAM)
        run = train_staged(stages, twin, optimizer, steps)
        assert_follows(run, train_plain(call_by_hand(plain, level), steps, 0.5))
        assert_same_weights(plain, twin, atol=1e-5)
        twin.overspill.check_conserved()


@pytest.mark.parametrize("small", slow_rows([None, 0, 1 << 16], 0, 1))
def test_the_bits_are_those_of_the_same_model_without_stages(
    small: int | None, tmp_path: Path
) -> None:
    """In bf16, with gradients of pre-gates that come back from later stages. Activations stay on
    the device (None), leave it, or would leave it if they were larger."""
    plain = make_model(FAMILIES["mixtral"]).to(torch.bfloat16)
    batches = batches_of("mixtral", plain)
    found = []
    parked = {"offload_activations": small is not None, "small_activation": small or 0}
    for n_stages in (None, 3):
        with offloaded(copy.deepcopy(plain), "host", tmp_path) as twin:
            overspill.pregate(twin, 2)
            twin.gradient_checkpointing_enable({"use_reentrant": False})
            optimizer = overspill.AdamW(twin, max_grad_norm=0.5, **ADAM)
            if n_stages is None:
                with optimizer.accumulate():
                    (twin(**batches[0]).loss / 2).backward()
                (twin(**batches[1]).loss / 2).backward()
            else:
                stages = overspill.Stages(twin, n_stages, **parked)  # type: ignore[arg-type]
                stages.backward(batches, optimizer)
            optimizer.step()
            losses: list[float] = []
            twin.eval()
            if n_stages is None:
                with torch.no_grad():
                    losses += [twin(**batch).loss.item() for batch in batches]
            else:

                def take(_: int, output: Any, losses: list[float] = losses) -> None:
                    losses.append(output.loss.item())

                stages.forward(batches, take)
            weights = {name: value.clone() for name, value in twin.state_dict().items()}
            found.append((losses, weights))
    (losses, weights), (theirs, expected) = found
    assert losses == theirs
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        assert torch.equal(value, expected[name]), name

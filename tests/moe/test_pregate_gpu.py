"""On a GPU: pre-gates follow the naive implementation, wherever experts and dense weights are."""

from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from tests.moe.oracle import Task, loss_of
from tests.moe.pregated import naive_loss

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("measured_roughly")]
TASK = Task(n_layers=4, steps=3)
MODES: list[dict[str, Any]] = [
    {"mode": "gpu"},
    {"mode": "host", "slots": 3},
    {"mode": "host", "slots": 3, "gpu_experts": 7, "dense_weights": "host"},
    {"mode": "disk", "slots": 3, "host_slots": 3},
]


def naive_losses(level: int) -> list[float]:
    model, losses = TASK.model().cuda(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=TASK.lr, eps=1e-4)
    for (tokens,) in TASK.batches():
        loss = naive_loss(model, tokens.cuda(), level)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("where", MODES, ids=lambda where: "-".join(map(str, where.values())))
@pytest.mark.parametrize("level", [1, 2, 3])
def test_training_follows_the_naive_model(
    level: int, where: dict[str, Any], tmp_path: Path
) -> None:
    model = TASK.model()
    model.checkpoint = level != 2
    given = where | ({"disk": tmp_path} if where["mode"] == "disk" else {})
    if level == 3:
        overspill.pregate(model, level)
    overspill.offload(model, device="cuda", quiet=True, **given)
    if level != 3:
        overspill.pregate(model, level)
    try:
        optimizer = overspill.AdamW(model, lr=TASK.lr, eps=1e-4, max_grad_norm=1e9)
        losses = []
        for (tokens,) in TASK.batches():
            loss = loss_of(model, tokens.cuda())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.overspill.check_conserved()
    finally:
        model.overspill.close()
    assert losses == pytest.approx(naive_losses(level), rel=1e-3)


def test_two_forwards_before_two_backwards() -> None:
    """Blocks are recomputed by the thread of the device."""
    model = overspill.pregate(TASK.model().cuda(), 2)
    first, second = (tokens.cuda() for (tokens,), _ in zip(TASK.batches(), range(2), strict=False))
    for tokens in (first, second):
        loss_of(model, tokens).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.checkpoint = True
    losses = [loss_of(model, tokens) for tokens in (first, second)]
    for loss in losses:
        loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-5, msg=name)


def test_an_llm_serves_a_gpt_with_pre_gates() -> None:
    model = overspill.pregate(TASK.model().eval().requires_grad_(False), 2)
    prompt = next(TASK.batches())[0][:1, :5]
    expected = model.generate(prompt, 6, temperature=0)[0, 5:].tolist()
    overspill.offload(model, mode="host", slots=3, device="cuda", quiet=True)
    try:
        with overspill.LLM(model, context=16) as llm:
            params = overspill.SamplingParams(max_tokens=6, temperature=0.0)
            for result in llm.generate([prompt[0].tolist()] * 3, params):
                assert result.token_ids == expected
    finally:
        model.overspill.close()

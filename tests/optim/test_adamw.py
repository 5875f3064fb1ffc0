"""overspill.AdamW on a model that is not offloaded is torch.optim.AdamW with clipping built in."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill


def model_and_data(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).to(dtype)
    return model, [torch.randn(5, 6, dtype=dtype) for _ in range(8)]


def train(optimizer_of: Any, clip: float | None = None) -> tuple[list[float], list[Tensor]]:
    model, data = model_and_data()
    optimizer = optimizer_of(model)
    losses = []
    for x in data:
        loss = model(x).square().mean() * 50
        loss.backward()
        if clip is not None and isinstance(optimizer, torch.optim.AdamW):
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("clip", [None, 0.7])
def test_losses_and_weights_match_torch(clip: float | None) -> None:
    options: dict[str, Any] = {"lr": 3e-2, "betas": (0.8, 0.95), "weight_decay": 0.2, "eps": 1e-7}
    expected = train(lambda model: torch.optim.AdamW(model.parameters(), **options), clip)
    got = train(lambda model: overspill.AdamW(model, max_grad_norm=clip, **options))
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    for mine, theirs in zip(got[1], expected[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_parameter_without_gradient_is_not_changed() -> None:
    model, data = model_and_data()
    unused = nn.Parameter(torch.ones(3))
    optimizer = overspill.AdamW([*model.parameters(), unused], lr=0.1, weight_decay=1.0)
    model(data[0]).sum().backward()
    optimizer.step()
    assert torch.equal(unused, torch.ones(3))


def test_step_returns_the_loss_of_its_closure() -> None:
    model, data = model_and_data()
    optimizer = overspill.AdamW(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(data[0]).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    second = optimizer.step(closure)
    assert second < first


def test_accumulate_without_experts_changes_nothing() -> None:
    model, data = model_and_data()
    optimizer = overspill.AdamW(model)
    with optimizer.accumulate():
        model(data[0]).sum().backward()
    once = model[0].weight.grad.clone()
    model(data[0]).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, 2 * once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_training_continues_bit_for_bit_from_a_state_dict(
    dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    def run(model: nn.Module, optimizer: overspill.AdamW, data: list[Tensor]) -> list[float]:
        losses = []
        for x in data:
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, data = model_and_data(dtype)
    whole = run(model, overspill.AdamW(model, lr=0.01, state_dtype=state_dtype), data)
    model, data = model_and_data(dtype)
    optimizer = overspill.AdamW(model, lr=0.01, state_dtype=state_dtype)
    first = run(model, optimizer, data[:3])
    other, _ = model_and_data(dtype)
    other.load_state_dict(model.state_dict())
    carried = overspill.AdamW(other, lr=7.0, state_dtype=state_dtype)
    carried.load_state_dict(optimizer.state_dict())
    assert first + run(other, carried, data[3:]) == whole
    # the loaded states are copies
    run(other, carried, data[:1])
    assert optimizer.steps_taken == 3
    assert carried.steps_taken == 9


def test_dense_state_dict_restores_copies_of_the_states() -> None:
    model, data = model_and_data()
    optimizer = overspill.AdamW(model, lr=0.01)
    model(data[0]).sum().backward()
    optimizer.step()
    flat = optimizer.dense_state_dict()
    assert all(isinstance(value, Tensor) for value in flat.values())
    other = overspill.AdamW(model, lr=0.01)
    other.load_dense_state_dict(flat)
    for parameter in model.parameters():
        mine, theirs = other.state[parameter], optimizer.state[parameter]
        assert mine["step"] == theirs["step"] == 1
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
        assert mine["exp_avg"].data_ptr() != theirs["exp_avg"].data_ptr()

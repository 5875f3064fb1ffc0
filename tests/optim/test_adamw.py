"""overspill.AdamW on a model that is not offloaded is torch.optim.AdamW with clipping built in."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.core.errors import ConfigError, OrderError


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


VARIANTS = ("amsgrad", "maximize", "capturable", "differentiable", "decoupled_weight_decay")
"""Keys of groups, not arguments, that ask for another step."""


@pytest.mark.parametrize(
    "options",
    [
        {"betas": (1.0, 0.999)},
        {"betas": (0.9, 1.0)},
        {"betas": (-0.1, 0.999)},
        {"betas": (0.9, float("nan"))},
        {"betas": (0.9,)},
        {"lr": -1.0},
        {"lr": float("nan")},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"amsgrad": True},
        {"maximize": True},
        {"capturable": True},
        {"differentiable": True},
        {"decoupled_weight_decay": False},
    ],
    ids=str,
)
def test_hyperparameters_that_cannot_be_right_are_named(options: dict[str, Any]) -> None:
    (name,) = options
    parameters = [nn.Parameter(torch.ones(2))]
    if name not in VARIANTS:
        with pytest.raises(ValueError, match=name):
            overspill.AdamW(parameters, **options)
    with pytest.raises(ValueError, match=name):
        overspill.AdamW([{"params": parameters, **options}])
    optimizer = overspill.AdamW(parameters)
    with pytest.raises(ValueError, match=name):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", VARIANTS)
def test_another_variant_that_a_group_asks_for_later_is_refused_by_the_step(name: str) -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer = overspill.AdamW([{"params": [first]}, {"params": [second]}])
    torch_group = torch.optim.AdamW([second]).param_groups[0]
    (first.sum() + second.sum()).backward()
    optimizer.param_groups[1][name] = not torch_group[name]
    with pytest.raises(ConfigError, match=name):
        optimizer.step()
    assert first.eq(1).all()
    optimizer.param_groups[1][name] = torch_group[name]
    optimizer.step()
    assert not first.eq(1).any()
    assert not second.eq(1).any()


def test_groups_saved_by_torch_are_accepted_if_they_mean_the_same_step() -> None:
    """Of Adam without decay too, which computes what AdamW does then."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = overspill.AdamW([parameter])
    for kind, options in (
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adam, {}),
    ):
        optimizer.load_state_dict(kind([parameter], **options).state_dict())  # type: ignore[arg-type]
        optimizer.step()
    with pytest.raises(ConfigError, match="decoupled_weight_decay"):
        optimizer.load_state_dict(torch.optim.Adam([parameter], weight_decay=0.1).state_dict())


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan")])
def test_a_maximal_norm_that_is_not_positive_is_named(norm: float) -> None:
    with pytest.raises(ValueError, match="max_grad_norm"):
        overspill.AdamW([nn.Parameter(torch.ones(2))], max_grad_norm=norm)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64], ids=str)
def test_dense_parameters_of_other_dtypes_are_named(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(3, 2, dtype=dtype))
    message = rf"shape \(3, 2\) is {dtype}; .*bfloat16"
    with pytest.raises(ConfigError, match=message):
        overspill.AdamW([parameter])
    optimizer = overspill.AdamW([parameter.requires_grad_(False)])  # frozen: never updated
    optimizer.step()
    parameter.requires_grad_(True).abs().sum().backward()
    with pytest.raises(ConfigError, match=message):
        optimizer.step()


def test_a_sparse_gradient_is_named_and_nothing_is_updated() -> None:
    first = nn.Parameter(torch.ones(2))
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = overspill.AdamW([first, *table.parameters()])
    (first.sum() + table(torch.tensor([1, 2])).sum()).backward()
    with pytest.raises(ConfigError, match=r"shape \(5, 3\) .* sparse=False"):
        optimizer.step()
    assert torch.equal(first, torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("view", ["transposed", "strided"])
def test_parameters_that_are_not_contiguous_are_updated(dtype: torch.dtype, view: str) -> None:
    start = torch.randn(6, 4).to(dtype)
    memory = torch.zeros(6, 8, dtype=dtype)
    layouts = {"transposed": start.t().contiguous().t(), "strided": memory[:, ::2].copy_(start)}
    parameter, plain = nn.Parameter(layouts[view]), nn.Parameter(start.clone())
    assert not parameter.is_contiguous()
    optimizers = [overspill.AdamW([p], lr=0.1) for p in (parameter, plain)]
    for step in range(3):
        target = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        for p, optimizer in zip((parameter, plain), optimizers, strict=True):
            (p.float() - target).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        carried = overspill.AdamW([parameter], lr=0.1)
        carried.load_state_dict(optimizers[0].state_dict())
        optimizers[0] = carried
    assert torch.equal(parameter, plain)
    assert not memory[:, 1::2].any(), "what is between the elements is not touched"


@pytest.mark.parametrize("order", [1, -1])
def test_parameters_that_share_memory_are_updated_one_after_another(order: int) -> None:
    memory = torch.zeros(6, 4)
    sharing = [nn.Parameter(memory), nn.Parameter(memory.t()), nn.Parameter(memory[2:5])][::order]
    for parameter in sharing:
        parameter.grad = torch.ones_like(parameter)
    overspill.AdamW(sharing, lr=0.1, weight_decay=0.0).step()
    updates = torch.tensor([2.0, 2.0, 3.0, 3.0, 3.0, 2.0])
    torch.testing.assert_close(memory, -0.1 * updates.unsqueeze(1).expand(6, 4))


def test_an_update_that_fails_is_not_counted_for_parameters_after_it() -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = overspill.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer.step()
    whole = optimizer.state[parameters[1]]["exp_avg"]
    optimizer.state[parameters[1]]["exp_avg"] = whole[:2]
    with pytest.raises(AssertionError):
        optimizer.step()
    steps = [optimizer.state[parameter]["step"] for parameter in parameters]
    assert steps[0] == 2
    assert steps[2] == 1
    assert torch.equal(parameters[2], parameters[1])
    assert not torch.equal(parameters[2], parameters[0])


def test_a_state_of_torch_goes_on_as_in_torch() -> None:
    model, data = model_and_data()
    theirs = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(data[0]).square().mean().backward()
    theirs.step()
    other, _ = model_and_data()
    other.load_state_dict(model.state_dict())
    mine = overspill.AdamW(other, lr=7.0)
    mine.load_state_dict(theirs.state_dict())
    assert mine.steps_taken == 1
    for twin, optimizer in ((model, theirs), (other, mine)):
        optimizer.zero_grad()
        twin(data[1]).square().mean().backward()
        optimizer.step()
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_loading_a_state_before_the_first_step_forgets_the_moments() -> None:
    model, data = model_and_data()
    optimizer = overspill.AdamW(model)
    empty = optimizer.state_dict()
    flat = optimizer.dense_state_dict()
    for load in (
        lambda: optimizer.load_state_dict(empty),
        lambda: optimizer.load_dense_state_dict(flat),
    ):
        model(data[0]).sum().backward()
        optimizer.step()
        assert optimizer.steps_taken == 1
        load()
        assert optimizer.steps_taken == 0
        assert not optimizer.state_dict()["state"]


def test_a_gradient_scaler_works_where_no_expert_is_offloaded() -> None:
    model, data = model_and_data()
    optimizer, scaler = overspill.AdamW(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(model(data[0]).sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(model(data[0]).sum()).backward()
    scaler.step(optimizer)
    assert optimizer.steps_taken == 1


@pytest.mark.parametrize("function", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(function: Any) -> None:
    model, _ = model_and_data()
    with pytest.raises(OrderError, match="load that into a new one"):
        function(overspill.AdamW(model))

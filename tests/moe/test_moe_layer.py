"""`overspill.MoELayer` behaves like a module of torch."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import overspill
from bench.loopback import LoopbackExchange
from overspill.compute.cpu_kernel import cpu_isa
from overspill.core.errors import ConfigError, OrderError
from tests.moe.pipeline.cases import STRATEGIES
from tests.moe.streaming.policies import all_on_cpu
from tests.parallel.processes import run_ranks

D, H, E = 8, 16, 5


def layer_of(**options: Any) -> overspill.MoELayer:
    return overspill.MoELayer(D, H, E, 2, **{"seed": 1, "partitions": 3, **options})


def tokens(n: int = 10) -> Tensor:
    return torch.randn(n, D, requires_grad=True)


def gradients(layer: nn.Module, x: Tensor, forward: Callable[..., Any]) -> list[Tensor]:
    layer.zero_grad()
    x.grad = None
    y, balance = forward(x)
    (y.square().sum() + balance).backward()
    return [p.grad.clone() for p in (*layer.parameters(), x) if p.grad is not None]


def test_batches_of_sequences_keep_their_shape() -> None:
    layer = layer_of()
    y, balance = layer(torch.randn(2, 3, D))
    assert y.shape == (2, 3, D)
    assert balance.shape == ()
    assert [*layer.state_dict()] == ["w_in", "w_out", "router.weight"]


def test_weights_follow_the_seed_and_torchs_generator() -> None:
    assert torch.equal(layer_of().w_in, layer_of(partitions=1).w_in)
    torch.manual_seed(5)
    first, second = layer_of(seed=None), layer_of(seed=None)
    assert not torch.equal(first.w_in, second.w_in)  # layers of one model differ
    torch.manual_seed(5)
    assert torch.equal(first.w_in, layer_of(seed=None).w_in)


def test_meta_layers_are_initialized_later() -> None:
    layer = layer_of(device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    for mine, other in zip(layer.parameters(), layer_of().parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_checkpoints_give_the_same_gradients(strategy: str, use_reentrant: bool) -> None:
    layer, x = layer_of(strategy=strategy), tokens()
    expected = gradients(layer, x, layer)

    def forward(x: Tensor) -> Any:
        return checkpoint(layer, x, use_reentrant=use_reentrant)

    for mine, other in zip(gradients(layer, x, forward), expected, strict=True):
        assert torch.equal(mine, other)


def test_compiled_layers_compute_the_same() -> None:
    layer, x = layer_of(), tokens()
    compiled = torch.compile(layer, backend="eager")
    for mine, other in zip(gradients(layer, x, compiled), gradients(layer, x, layer), strict=True):
        torch.testing.assert_close(mine, other)


def test_autocast_computes_experts_in_bfloat16_and_the_router_in_float32() -> None:
    layer, x = layer_of(), tokens()

    def forward(x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y, balance = layer(x)
        assert y.dtype == torch.bfloat16
        return y.float(), balance

    got, want = gradients(layer, x, forward), gradients(layer, x, layer)
    assert all(grad.dtype == torch.float32 for grad in got)
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=0.1, atol=0.02)


def test_no_grad_and_inference_mode_compute_the_output() -> None:
    layer, x = layer_of(strategy="S1", exchange=LoopbackExchange("cpu")), tokens()
    outputs = []
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode:
            outputs.append(layer(x)[0])
    y, _ = layer(x)
    y.sum().backward()
    assert all(torch.equal(output, y) for output in outputs)


@pytest.mark.parametrize("frozen", ["w_in", "w_out", "router.weight", "x"])
def test_frozen_parts_get_no_gradient_and_others_the_same(frozen: str) -> None:
    layer, x = layer_of(), tokens()
    names = [*(name for name, _ in layer.named_parameters()), "x"]
    expected = dict(zip(names, gradients(layer, x, layer), strict=True))
    tensors = {**dict(layer.named_parameters()), "x": x}
    tensors[frozen].requires_grad_(False)
    tensors[frozen].grad = None
    found = gradients(layer, x, layer)
    assert tensors[frozen].grad is None
    others = [name for name in names if name != frozen]
    for name, grad in zip(others, found, strict=True):
        torch.testing.assert_close(grad, expected[name])


def test_a_second_backward_is_the_same_and_double_backward_is_refused() -> None:
    layer, x = layer_of(strategy="none"), tokens()
    loss = layer(x)[0].square().sum()
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


def test_empty_batches_have_zero_gradients() -> None:
    layer = layer_of()
    grads = gradients(layer, tokens(0), layer)
    assert len(grads) == 4
    assert all((grad == 0).all() for grad in grads)


def test_copies_and_pickles() -> None:
    layer, x = layer_of(), tokens()
    y, _ = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(other(x)[0], y)
    exchanging = layer_of(exchange=LoopbackExchange("cpu"))
    assert torch.equal(copy.deepcopy(exchanging)(x)[0], y)
    with pytest.raises(OrderError, match="state_dict"):
        pickle.dumps(exchanging)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_search_settles_in_training(checkpointed: bool) -> None:
    layer = layer_of(partitions=None, exchange=LoopbackExchange("cpu", 0.05))
    assert layer.partitions is None

    def forward(x: Tensor) -> Any:
        return checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)

    for _ in range(18):
        gradients(layer, tokens(64), forward)
    assert layer.best_partitions(64) in (1, 2, 4, 8)
    assert layer.strategy == "S4"


def test_one_process_has_one_partition() -> None:
    """There is nothing to overlap with."""
    assert layer_of(partitions=None).partitions == 1
    assert layer_of(partitions=None, pipeline=False).partitions == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partitions": 0}, "partitions=0 must be"),
        ({"partitions": 2, "pipeline": False}, "needs pipeline=True"),
        ({"strategy": "S9"}, "strategy='S9' must be one of"),
        ({"strategy": "S1", "memory_reuse": False}, "needs memory_reuse=True"),
        ({"activation": "tanh"}, "activation='tanh' must be one of gelu"),
    ],
)
def test_impossible_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layer_of(**options)


def test_impossible_sizes_and_inputs_are_refused() -> None:
    with pytest.raises(ConfigError, match="top_k=6 exceeds num_experts=5"):
        overspill.MoELayer(D, H, E, 6)
    with pytest.raises(ConfigError, match="d_hidden=-1"):
        overspill.MoELayer(D, -1, E, 1)
    with pytest.raises(ConfigError, match="d_model=8"):
        layer_of()(torch.randn(3, 4))
    with pytest.raises(ConfigError, match=r"the experts are torch\.float32"):
        layer_of()(torch.randn(3, D, dtype=torch.bfloat16))


class Model(nn.Module):
    def __init__(self, gated: bool, activation: str, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        kind = {"gated": gated, "activation": activation, "mesh": mesh}
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer_of(seed=seed, **kind) for seed in range(2))
        self.head = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y, _ = layer(x)
            x = x + y
        return self.head(x).square().mean()


@pytest.mark.parametrize(("gated", "activation"), [(False, "gelu"), (True, "relu")])
def test_offloaded_layers_train_as_resident_ones(gated: bool, activation: str) -> None:
    plain, model = Model(gated, activation), Model(gated, activation)
    model.load_state_dict(plain.state_dict())
    overspill.offload(model, device="cpu", mode="host", slots=3, quiet=True)
    optimizers = overspill.AdamW(model, lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(3):
        x = torch.randn(12, D)
        losses = []
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            loss = each(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)
    engine: Any = model.overspill
    engine.close()


@pytest.mark.skipif(cpu_isa() is None, reason="the CPU kernel needs AVX2")
def test_the_cpu_computes_experts_of_offloaded_layers() -> None:
    plain, model = Model(True, "silu").eval(), Model(True, "silu").eval()
    model.load_state_dict(plain.state_dict())
    settings = overspill.Settings(cpu_experts=True, cpu_policy=all_on_cpu)
    overspill.offload(model, device="cpu", mode="host", slots=3, quiet=True, settings=settings)
    engine: Any = model.overspill
    x = torch.randn(12, D)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
    engine.flush()
    assert engine.compute.streamer.cpu_bytes > 0
    engine.close()


def offload_on_rank(mesh: DeviceMesh) -> tuple[list[float], str]:
    model, losses = Model(False, "gelu", mesh), []
    try:
        overspill.offload(model, device="cpu", mode="host", slots=3, quiet=True)
    except ConfigError as error:
        refused = str(error)
    overspill.offload(model, device="cpu", mode="host", slots=3, quiet=True, mesh=mesh)
    optimizer = overspill.AdamW(model, lr=1e-2)
    for number in range(3):
        loss = model(batch(number, mesh.get_local_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    engine: Any = model.overspill
    engine.close()
    return losses, refused


def batch(number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(12, D, generator=generator)


@pytest.mark.slow
def test_offloaded_layers_of_ranks_train_as_one_process() -> None:
    (losses, refused), (other_losses, _) = run_ranks(2, offload_on_rank)
    assert "give the same mesh to overspill.offload" in refused
    plain = Model(False, "gelu")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for number, found in enumerate(zip(losses, other_losses, strict=True)):
        both = torch.stack([plain(batch(number, rank)) for rank in range(2)])
        assert both.tolist() == pytest.approx(found, rel=1e-5)
        both.mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_on_rank(mesh: DeviceMesh) -> Any:
    torch.manual_seed(mesh.get_local_rank())  # ranks agree on a seed all the same
    layer = layer_of(mesh=mesh, partitions=None, seed=None)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(18):
        x = tokens(32 - 8 * mesh.get_local_rank())
        y, balance = layer(x)
        (y.square().mean() + balance).backward()
        layer.average_gradients(layer)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        layer(x)
    refused = []
    for n_experts, partitions in ((E, 1 + mesh.get_local_rank()), (1, 1)):
        try:
            overspill.MoELayer(D, H, n_experts, 1, mesh=mesh, partitions=partitions)
        except ConfigError as error:
            refused.append(str(error))
    return layer.router.weight.detach(), layer.w_in.shape, layer.best_partitions(32), refused


def test_ranks_choose_the_same_and_keep_the_same_router() -> None:
    results = run_ranks(2, train_on_rank)
    (router, shape, n, refused), (other_router, other_shape, other_n, _) = results
    assert torch.equal(router, other_router)
    assert (shape[0], other_shape[0]) == (3, 2)
    assert n == other_n
    assert n in (1, 2, 4, 8)
    assert "must be the same on all ranks" in refused[0]
    assert "2 ranks cannot divide 1 experts" in refused[1]


def wrap_on_rank(mesh: DeviceMesh) -> Any:
    """The router's gradient inside DistributedDataParallel, and by `average_gradients`."""

    def train(ignored: list[str], wrapped: bool) -> Tensor | None:
        torch.manual_seed(mesh.get_local_rank())
        layer = overspill.MoELayer(D, H, 4, 2, mesh=mesh, seed=1)
        model = nn.Sequential(layer)
        model._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]
        forward = nn.parallel.DistributedDataParallel(model) if wrapped else model
        y, balance = forward(tokens())
        (y.square().sum() + balance).backward()
        if not wrapped:
            layer.average_gradients(model)
        return layer.router.weight.grad

    try:
        train([], wrapped=True)
    except OrderError as error:
        refused = str(error)
    names = ["0.w_in", "0.w_out"]
    return refused, train(names, wrapped=True), train(names, wrapped=False)


def test_distributed_data_parallel_must_ignore_experts() -> None:
    for refused, wrapped, averaged in run_ranks(2, wrap_on_rank):
        assert "has replaced 0.w_in, 0.w_out" in refused
        torch.testing.assert_close(wrapped, averaged)

"""What a MoELayer refuses, on one rank and on all: by name, and no rank waits forever."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import overspill
from bench.loopback import LoopbackExchange
from overspill.core.errors import ConfigError, RankError
from overspill.parallel.exchange.collective import CollectiveExchange
from overspill.parallel.exchange.interface import Exchange, LocalExchange
from overspill.parallel.ranks import Ranks
from tests.parallel.processes import run_ranks

D, H, E = 8, 16, 5


def layer_of(**options: Any) -> overspill.MoELayer:
    sizes = {"d_model": D, "d_hidden": H, "num_experts": E, "top_k": 2}
    return overspill.MoELayer(**{**sizes, **options})


def train(layer: overspill.MoELayer, n_tokens: int = 6) -> Tensor:
    x = torch.randn(n_tokens, D, requires_grad=True)
    layer(x)[0].square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partitions": 65}, "partitions=65 exceeds 64"),
        ({"partitions": True}, "partitions=True must be a whole number"),
        ({"seed": "1"}, "seed='1' must be a whole number of 64 bits"),
        ({"seed": 2**64}, "seed=18446744073709551616 must be"),
        ({"dtype": torch.int8}, "dtype=torch.int8 must be one of torch.float32"),
        ({"dtype": torch.float8_e5m2}, "dtype=torch.float8_e5m2 must be one of"),
        ({"mesh": 2}, "mesh=2 must be a DeviceMesh"),
        ({"exchange": "cpu"}, "exchange='cpu' must be an object of overspill.parallel.exchange"),
    ],
)
def test_impossible_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layer_of(**options)


def test_whole_numbers_of_numpy_are_seeds() -> None:
    assert torch.equal(layer_of(seed=np.int64(3)).w_in, layer_of(seed=3).w_in)


def test_a_given_seed_leaves_the_generator_of_torch_alone() -> None:
    state = torch.get_rng_state()
    layer_of(seed=1, device="meta").to_empty(device="cpu").reset_parameters()
    drawn = torch.get_rng_state()
    assert torch.equal(drawn, state)


def test_more_partitions_than_tokens_leave_some_empty() -> None:
    for tokens in (0, 1, 3):
        x = torch.randn(tokens, D)
        many, one = (layer_of(partitions=n, seed=1)(x)[0] for n in (64, 1))
        torch.testing.assert_close(many, one)


@pytest.mark.parametrize("strategy", ["S1", "S2", "S3", "S4"])
@pytest.mark.parametrize("exchange", [None, LocalExchange("cpu")])
def test_strategies_need_neither_a_link_nor_a_gpu(strategy: str, exchange: Exchange | None) -> None:
    """What is copied stays in host memory, and what is sent again does not leave the process."""
    torch.manual_seed(0)
    found = train(layer_of(strategy=strategy, partitions=2, exchange=exchange, seed=1))
    torch.manual_seed(0)
    torch.testing.assert_close(found, train(layer_of(strategy="none", seed=1)))


def test_inputs_and_exchanges_of_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot compute on the meta device; call to_empty"):
        layer_of(device="meta")(torch.randn(2, D, device="meta"))
    with pytest.raises(ConfigError, match=r"the experts are torch\.float32 on meta"):
        layer_of(device="meta")(torch.randn(2, D))
    with pytest.raises(ConfigError, match=r"the input is torch\.float8_e5m2; convert it"):
        layer_of()(torch.randn(2, D).to(torch.float8_e5m2))
    with pytest.raises(ConfigError, match="the exchange is for meta, and the layer is on cpu"):
        layer_of(exchange=LoopbackExchange("meta"))(torch.randn(2, D))


# -- ranks -----------------------------------------------------------------------------------

Attempt = Callable[[DeviceMesh, bool], object]


def differ(name: str, value: Any, other: Any, mesh: DeviceMesh, odd: bool) -> object:
    return layer_of(**{"mesh": mesh, name: other if odd else value})


def two_dimensions(mesh: DeviceMesh, odd: bool) -> object:
    return layer_of(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "expert")))


def exchange_of_another_mesh(mesh: DeviceMesh, odd: bool) -> object:
    return layer_of(mesh=mesh, exchange=LoopbackExchange("cpu"))


def other_shape(mesh: DeviceMesh, odd: bool) -> object:
    return layer_of(mesh=mesh)(torch.randn(2, D + odd))


def other_input_type(mesh: DeviceMesh, odd: bool) -> object:
    dtype = torch.bfloat16 if odd else torch.float32
    return layer_of(mesh=mesh, partitions=2)(torch.randn(2, D, dtype=dtype))


def autocast_on_one(mesh: DeviceMesh, odd: bool) -> object:
    with torch.autocast("cpu", torch.bfloat16, enabled=odd):
        return layer_of(mesh=mesh)(torch.randn(2, D))


def no_grad_on_one(mesh: DeviceMesh, odd: bool) -> object:
    with torch.set_grad_enabled(not odd):
        return layer_of(mesh=mesh)(torch.randn(2, D))


SAME = "of a MoELayer must be the same on all ranks: rank 0 has"
REFUSED: dict[Attempt, tuple[tuple[type[Exception], str], tuple[type[Exception], str]]] = {
    **{
        partial(differ, name, *values): ((ConfigError, f"{name} {SAME}"),) * 2
        for name, values in {
            "d_hidden": (16, 24),
            "top_k": (1, 2),
            "gated": (True, False),
            "memory_reuse": (True, False),
            "partitions": (None, 4),
            "strategy": ("S1", "S2"),
            "dtype": (torch.float32, torch.float64),
            "device": ("cpu", "meta"),
            "seed": (1, 2),
        }.items()
    },
    partial(differ, "partitions", 4, 400): (
        (RankError, "of rank 1 was refused there: partitions=400 exceeds 64"),
        (ConfigError, "partitions=400 exceeds 64"),
    ),
    two_dimensions: ((ConfigError, "the mesh has 2 dimensions"),) * 2,
    exchange_of_another_mesh: ((ConfigError, "the exchange is for rank 0 of 1, the mesh"),) * 2,
    other_shape: (
        (RankError, "rank 1 has refused the input"),
        (ConfigError, "the input has the shape (2, 9)"),
    ),
    other_input_type: (
        (RankError, "rank 1 has refused the input"),
        (ConfigError, "the input is torch.bfloat16"),
    ),
    autocast_on_one: ((ConfigError, "rank 0 in torch.float32, rank 1 in torch.bfloat16"),) * 2,
    no_grad_on_one: ((ConfigError, "rank 1 computes no gradients"),) * 2,
}


def attempt_all(mesh: DeviceMesh, attempts: list[Attempt]) -> tuple[list[Any], Tensor, Any]:
    """What each attempt raises, and afterwards a step of unequal batches."""
    rank, found = mesh.get_local_rank(), list[Any]()
    for attempt in attempts:
        try:
            attempt(mesh, rank == 1)
        except Exception as error:
            found.append(error)
        else:
            found.append(None)
    dx = train(layer_of(mesh=mesh, partitions=8, seed=1), n_tokens=3 * rank)  # fewer than 8
    ranks = Ranks(mesh, torch.device("cpu"))
    torch.manual_seed(rank)
    without_mesh = layer_of(exchange=CollectiveExchange(ranks, torch.device("cpu")))
    return found, dx, without_mesh.router.weight.detach()


def test_ranks_refuse_together_and_go_on() -> None:
    first, second = run_ranks(2, attempt_all, list(REFUSED))
    found = zip(first[0], second[0], strict=True)
    for (attempt, expected), errors in zip(REFUSED.items(), found, strict=True):
        for error, (kind, message) in zip(errors, expected, strict=True):
            assert type(error) is kind, (attempt, error)
            assert message in str(error)
    assert (first[1].shape, second[1].shape) == ((0, D), (3, D))
    assert second[1].abs().sum() > 0
    assert torch.equal(first[2], second[2])  # ranks of an exchange agree on a seed, too


def end_early(mesh: DeviceMesh, where: str) -> None:
    odd = mesh.get_local_rank() == 1

    def fail(kind: str) -> None:
        if odd:
            raise ValueError("this rank fails in the middle of a forward")

    inject = fail if where == "exchange" else None
    ranks = Ranks(mesh, torch.device("cpu"))
    exchange = CollectiveExchange(ranks, torch.device("cpu"), inject=inject)
    layer = layer_of(mesh=mesh, exchange=exchange, partitions=2)
    if odd and where == "before":
        raise ValueError("this rank fails before its forward")
    train(layer)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("before", "the forward of a MoELayer on rank 0 waited for other ranks"),
        ("exchange", "an exchange of token rows failed"),
    ],
)
def test_a_rank_that_ends_is_not_waited_for(where: str, message: str) -> None:
    waiting, failed = run_ranks(2, end_early, where)
    assert isinstance(failed, ValueError)
    assert isinstance(waiting, RankError)
    assert message in str(waiting)

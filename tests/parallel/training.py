"""The same training twice: plain PyTorch in one process with the batches of all ranks, in float64,
and ranks that divide the experts."""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import overspill
from overspill.models.gpt import GPTMoE
from overspill.moe.router import Router, RouterOutput
from overspill.moe.row_placer import Balance
from overspill.moe.settings import Settings
from overspill.moe.state_dict import split_record
from overspill.parallel.sharded import as_sharded, whole
from tests.moe.oracle import Task, loss_of
from tests.parallel.processes import run_ranks


@dataclass(frozen=True)
class Case:
    """A training on several ranks."""

    task: Task
    n_ranks: int = 2
    uneven: bool = False  # batches of different sizes
    where: dict[str, Any] = field(default_factory=lambda: {"mode": "host", "slots": 2})
    settings: Settings = field(default_factory=Settings)
    hot: bool = False  # one expert of each layer gets most tokens

    def model(self) -> GPTMoE:
        model = self.task.model()
        if self.hot:
            for moe in model.moe_layers():
                moe.router = HotRouter(moe.router)  # type: ignore[assignment]
        return model

    def batches(self, rank: int) -> list[list[Tensor]]:
        """The micro-batches of each step of one rank."""
        task = dataclasses.replace(self.task, micro_batches=self.task.micro_batches * self.n_ranks)
        mine = [step[rank :: self.n_ranks] for step in task.batches()]
        n_sequences = 1 + rank % 3 if self.uneven else 2
        return [[tokens[:n_sequences] for tokens in step] for step in mine]


class HotRouter(nn.Module):
    """Sends about 60% of the tokens to the last expert. It is not trained."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.top_k = router.top_k
        generator = torch.Generator().manual_seed(5)
        weight = torch.randn(router.weight.shape, generator=generator)
        self.register_buffer("weight", weight / weight.shape[1] ** 0.5)
        self.register_buffer("bias", torch.tensor([0.0] * (len(weight) - 1) + [1.7]))

    def forward(self, x_TD: Tensor, pieces: int = 1) -> RouterOutput:
        probs_TE = F.linear(x_TD, self.weight, self.bias).softmax(-1)
        return RouterOutput(*probs_TE.topk(self.top_k), probs_TE.new_zeros(()))


@dataclass
class Result:
    """The results of a training; with several ranks, those of one."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    dense: dict[str, list[Tensor]] = field(default_factory=dict)
    """Weight and second moment of each parameter: a wrong factor of all gradients, which does not
    change Adam's weights, changes the moment."""
    experts: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    """The same for each tensor of each expert."""
    balance: Balance | None = None
    cpu_jobs: int = 0


def plain(case: Case) -> Result:
    """The loss is the mean over ranks of the mean of their batches. In float64: Adam divides by the
    gradient's size, so of a small gradient fp32 would change steps by more than the tolerance."""
    task = dataclasses.replace(case.task, checkpoint=False)  # which changes no bit
    return _plain(task, case.n_ranks, case.uneven, case.hot)


@functools.cache
def _plain(task: Task, n_ranks: int, uneven: bool, hot: bool) -> Result:
    case, result = Case(task, n_ranks, uneven, hot=hot), Result()
    model = case.model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=task.weight_decay)
    ranks = [case.batches(rank) for rank in range(case.n_ranks)]
    for step in range(task.steps):
        batches = [tokens for batches in ranks for tokens in batches[step]]
        losses = [loss_of(model, tokens) / len(batches) for tokens in batches]
        torch.stack(losses).sum().backward()
        result.losses.append(sum(loss.item() for loss in losses))
        if task.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
            result.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    experts = {id(p) for moe in model.moe_layers() for p in moe.expert_parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in experts:
            result.dense[name] = _with_moment(parameter, optimizer)
    for layer, moe in enumerate(model.moe_layers()):
        pairs = [_with_moment(parameter, optimizer) for parameter in moe.expert_parameters()]
        for expert in range(moe.n_experts):
            result.experts[layer, expert] = [part[expert] for pair in pairs for part in pair]
    return result


def _with_moment(parameter: Tensor, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = optimizer.state.get(parameter)
    found = [parameter.detach()] if not state else [parameter.detach(), state["exp_avg_sq"]]
    if state:
        found[1] = as_sharded(found[1], parameter.detach())
    return [whole(tensor).to("cpu", copy=True) for tensor in found]


def offload(model: GPTMoE, mesh: DeviceMesh, **options: Any) -> None:
    options = {"mode": "host", "slots": 2, "settings": Settings(threads=1), **options}
    overspill.offload(model, mesh=mesh, quiet=True, **options)


def train_rank(
    mesh: DeviceMesh, case: Case, before_step: Callable[[Any, int], None] = lambda *_: None
) -> Result:
    """What one rank does: a user's loop. `before_step` gets the engine and the step."""
    task, result = case.task, Result()
    model = case.model()
    settings = dataclasses.replace(case.settings, threads=1)
    offload(model, mesh, settings=settings, **case.where)
    optimizer = overspill.AdamW(
        model, lr=task.lr, weight_decay=task.weight_decay, max_grad_norm=task.clip
    )
    engine: Any = model.overspill
    if settings.cpu_experts:
        engine.recorder.start()
    for step, batches in enumerate(case.batches(dist.get_rank())):
        before_step(engine, step)
        losses = []
        for number, tokens in enumerate(batches, start=1):
            with nullcontext() if number == len(batches) else optimizer.accumulate():
                loss = loss_of(model, tokens.to(engine.device)) / len(batches)
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(sum(losses))
        if optimizer.total_norm is not None:
            result.norms.append(optimizer.total_norm)
    engine.flush()
    engine.check_conserved()
    result.balance = engine.balance
    result.cpu_jobs = sum(span.row == "cpu compute" for span in engine.recorder.spans())
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "is_expert_placeholder"):
            result.dense[name] = _with_moment(parameter, optimizer)
    for expert in engine.records.ids():
        weights, moments = torch.empty(2, engine.shape.numel)
        engine.records.read_weights(expert, weights)
        engine.records.read_state(expert, "exp_avg_sq", moments)
        pairs = zip(
            split_record(weights, engine.shape), split_record(moments, engine.shape), strict=True
        )
        result.experts[tuple(expert)] = [part for pair in pairs for part in pair]
    engine.close()
    return result


def train_cases(
    mesh: DeviceMesh, cases: dict[str, Case], train: Callable[[DeviceMesh, Case], Result]
) -> dict[str, Result]:
    return {name: train(mesh, case) for name, case in cases.items()}


def results_of(
    cases: dict[str, Case], train: Callable[[DeviceMesh, Case], Result] = train_rank
) -> dict[str, list[Result]]:
    """What the ranks of each case find. Cases of equally many ranks share their processes, which
    take as long to start as two steps."""
    found: dict[str, list[Result]] = {}
    for n_ranks in {case.n_ranks for case in cases.values()}:
        chosen = {name: case for name, case in cases.items() if case.n_ranks == n_ranks}
        ranks = run_ranks(n_ranks, train_cases, chosen, train)
        for result in ranks:
            if isinstance(result, Exception):
                raise result
        found |= {name: [result[name] for result in ranks] for name in chosen}
    return found


def assert_follows(ranks: list[Result], want: Result, copies: int = 1) -> None:
    """Losses, weights and moments agree to 1e-5 of the largest; the dense ones are the same bits on
    all ranks, and each expert is on `copies` of them, with the same bits."""
    for result in ranks:
        if isinstance(result, Exception):
            raise result
    means = [sum(losses) / len(ranks) for losses in zip(*(r.losses for r in ranks), strict=True)]
    assert means == pytest.approx(want.losses, rel=1e-5)
    for result in ranks:
        assert result.norms == pytest.approx(want.norms, rel=1e-5)
        assert result.norms == ranks[0].norms
        assert result.dense.keys() == want.dense.keys()
        for name, expected in want.dense.items():
            for mine, first in zip(result.dense[name], ranks[0].dense[name], strict=True):
                assert torch.equal(mine, first), name
            assert_close(result.dense[name], expected, name)
    assert sum(len(result.experts) for result in ranks) == copies * len(want.experts)
    found = {e: t for result in ranks for e, t in result.experts.items()}
    for expert, tensors in found.items():
        assert_close(tensors, want.experts[expert], f"expert {expert}")
        for replica in (result.experts.get(expert, tensors) for result in ranks):
            assert all(map(torch.equal, replica, tensors)), f"expert {expert}"


def assert_close(tensors: list[Tensor], expected: list[Tensor], name: str) -> None:
    for got, want in zip(tensors, expected, strict=True):
        atol = 1e-5 * float(want.abs().max())
        torch.testing.assert_close(got.to(want.dtype), want, rtol=1e-4, atol=atol, msg=name)

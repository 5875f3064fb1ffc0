"""Rows go to the ranks that a placement names, in the order of one process, and come back, in any
groups of experts."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from overspill.parallel.exchange.choice import exchange_for
from overspill.parallel.row_exchange import RowExchange, Rows, combine_grads, combine_results
from overspill.plan.exchange_groups import divide_experts
from tests.parallel.processes import run_ranks

N_EXPERTS, RANKS = 5, 3
TOKENS = [7, 0, 4]  # of each rank
CPU = torch.device("cpu")


def routing(rank: int) -> Tensor:
    """Ids of two experts for each token; the last id means no expert."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, N_EXPERTS + 1, (TOKENS[rank], 2), generator=generator)


def placement(tokens_E: Rows, seed: int) -> Rows:
    """Any: cuts the rows of each expert at random."""
    rows_GE = np.zeros((RANKS, len(tokens_E)), np.int64)
    random = np.random.default_rng(seed)
    for expert, count in enumerate(tokens_E):
        cuts = np.sort(random.integers(0, count + 1, RANKS - 1))
        rows_GE[:, expert] = np.diff([0, *cuts, count])
    return rows_GE


def exchange(mesh: DeviceMesh, seeds: list[int]) -> list[Any]:
    """With as many groups as the seed says, and one more."""
    over, found = exchange_for(mesh, CPU), []
    for seed in seeds:
        rows = RowExchange(
            over,
            N_EXPERTS,
            lambda tokens_E, seed=seed: placement(tokens_E, seed),
            lambda rows_GE, order_GE, n=seed + 1: divide_experts(rows_GE, order_GE, n),
        )
        x_TD = 100.0 * over.rank + torch.arange(TOKENS[over.rank]).float().view(-1, 1)
        weights_TK = torch.rand(len(x_TD), 2)
        n_own = (2, 2, 1)[over.rank]
        versions = [10 * over.rank + n for n in range(n_own)]
        # experts have exchanged places where the seed is odd
        sent = rows.route(routing(over.rank), versions, [*range(n_own)][:: 1 - 2 * (seed % 2)])
        x_ND, w_N1 = sent.received_like(x_TD), sent.received_like(weights_TK[:, :1])
        y_RD, dx_RD, dw_R1 = (sent.returned_like(like) for like in (x_TD, x_TD, weights_TK[:, :1]))
        ids_N1 = sent.expert_ids_N1
        for number, group in enumerate(sent.groups):
            of = group.computed
            rows.send(sent, number, x_TD, x_ND).wait()
            rows.send_weights(sent, number, weights_TK, w_N1).wait()
            assert {*ids_N1[of, 0].tolist()} <= group.experts
            factor_N1 = ids_N1[of] + 1
            rows.send_back(sent, number, factor_N1 * x_ND[of], y_RD).wait()
            rows.send_back(sent, number, factor_N1 * w_N1[of], dx_RD).wait()
            rows.send_back(sent, number, x_ND[of], dw_R1).wait()
        y_TD = combine_results(sent, y_RD, weights_TK)
        dx_TD, dweights_TK = combine_grads(sent, dx_RD, dw_R1)
        found.append((x_TD, ids_N1, x_ND, weights_TK, y_TD, dx_TD, dweights_TK, sent))
    return found


def test_rows_follow_any_placement() -> None:
    seeds = [0, 1, 2, 3]
    ids = [routing(rank) for rank in range(RANKS)]
    for seed, *ranks in zip(seeds, *run_ranks(RANKS, exchange, seeds), strict=True):
        # by expert: all its tokens in the order of ranks and tokens
        tokens: list[list[float]] = [[] for _ in range(N_EXPERTS + 1)]
        for (x_TD, *_), ids_TK in zip(ranks, ids, strict=True):
            for value, experts in zip(x_TD[:, 0].tolist(), ids_TK.tolist(), strict=True):
                for expert in experts:
                    tokens[expert].append(value)
        rows_GE = placement(np.array([len(rows) for rows in tokens[:N_EXPERTS]]), seed)
        owners = [0, 0, 1, 1, 2]
        assert len({len(sent.groups) for *_, sent in ranks}) == 1
        assert 1 <= len(ranks[0][-1].groups) <= seed + 1
        for rank, (x_TD, ids_N1, x_ND, weights_TK, y_TD, dx_TD, dw_TK, sent) in enumerate(ranks):
            for expert in range(N_EXPERTS):
                first = int(rows_GE[:rank, expert].sum())
                want = tokens[expert][first : first + int(rows_GE[rank, expert])]
                assert x_ND[ids_N1[:, 0] == expert, 0].tolist() == want
                assert sent.counts[expert] == len(want)
                computed = tuple(np.flatnonzero(rows_GE[:, expert]).tolist())
                assert sent.shared.get(expert, (owners[expert],)) in (computed, (owners[expert],))
                assert (expert in sent.shared) is (not {*computed} <= {owners[expert]})
            assert sent.versions == [0, 1, 10, 11, 20]
            factor_TK = torch.where(ids[rank] < N_EXPERTS, ids[rank] + 1.0, 0.0)
            torch.testing.assert_close(y_TD, (factor_TK * weights_TK).sum(1, keepdim=True) * x_TD)
            torch.testing.assert_close(dx_TD, (factor_TK * weights_TK).sum(1, keepdim=True))
            routed_TK = (ids[rank] < N_EXPERTS).float()
            torch.testing.assert_close(dw_TK, routed_TK * x_TD)

"""Rows go to the ranks that a placement names, in the order of one process, and come back."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from overspill.parallel.ranks import Ranks
from overspill.parallel.row_exchange import RowExchange, Rows
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
    ranks, found = Ranks(mesh, CPU), []
    for seed in seeds:
        rows = RowExchange(
            ranks, N_EXPERTS, CPU, lambda tokens_E, seed=seed: placement(tokens_E, seed)
        )
        x_TD = 100.0 * ranks.rank + torch.arange(TOKENS[ranks.rank]).float().view(-1, 1)
        versions = [10 * ranks.rank + n for n in range((2, 2, 1)[ranks.rank])]
        sent = rows.route(routing(ranks.rank), versions)
        x_ND, weights_TK = rows.send(sent, x_TD), torch.rand(len(x_TD), 2)
        ids_N1 = sent.expert_ids_N1
        y_TD = rows.combine(sent, (ids_N1 + 1) * x_ND, weights_TK)
        w_N1 = rows.send_weights(sent, weights_TK)
        dx_TD, dweights_TK = rows.combine_grads(sent, (ids_N1 + 1) * w_N1, x_ND)
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

"""A replay gives the recorded routing, token by token."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.simulate import ReplayedRouting
from tests.simulate.recordings import CPU, TRACE, needs_recordings, trace_of


def test_a_replay_is_the_trace_again_and_again() -> None:
    trace = trace_of(10)
    source = ReplayedRouting(trace, 9)
    assert (source.n_layers, source.n_experts, source.top_k) == (3, 9, 2)
    taken: list[list[Tensor]] = [[], [], []]
    for n in (4, 3, 0, 6, 25):
        for layer in (2, 0):
            taken[layer].append(source(layer, n, CPU))
    taken[1].append(source(1, 38, CPU))
    for layer in range(3):
        replayed = torch.cat(taken[layer])
        assert replayed.dtype == torch.int64
        assert torch.equal(replayed, torch.cat([trace[:, layer]] * 4)[:38])


def test_all_layers_at_once_are_as_one_by_one() -> None:
    trace = trace_of(10)
    source = ReplayedRouting(trace, 9)
    taken = [source.all_layers(n, CPU) for n in (4, 3, 5)]
    assert torch.equal(torch.cat(taken, dim=1), torch.cat([trace] * 2).transpose(0, 1)[:, :12])
    source(1, 3, CPU)  # one layer is ahead of the others
    (_, ahead, _), again = source.all_layers(2, CPU), torch.cat([trace] * 2)
    assert torch.equal(ahead, again[5:7, 1])


def test_sequences_are_those_of_the_file(tmp_path: Path) -> None:
    trace, offsets = trace_of(10), [0, 4, 4, 10]
    path = tmp_path / "trace.npz"
    np.savez(path, experts=trace.numpy().astype(np.uint8), offsets=np.array(offsets))
    source = ReplayedRouting.from_npz(path, n_experts=12)
    assert source.n_experts == 12
    assert torch.equal(source.sequence(0), trace[:4])
    assert source.sequence(1).shape == (0, 3, 2)
    assert torch.equal(source.sequence(-1), trace[4:])
    assert torch.equal(ReplayedRouting(source.sequence(2))(1, 6, CPU), trace[4:, 1])
    with pytest.raises(IndexError):
        source.sequence(3)
    with pytest.raises(
        ConfigError, match=r"contains expert 8, beyond n_experts=5; give at least 9"
    ):
        ReplayedRouting.from_npz(path, n_experts=5)


def test_files_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing.npz is not a recorded routing"):
        ReplayedRouting.from_npz(tmp_path / "missing.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ConfigError, match=r"text.npz is not a recorded routing"):
        ReplayedRouting.from_npz(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", experts=np.zeros((2, 2, 2), np.uint8))
    with pytest.raises(ConfigError, match="offsets"):
        ReplayedRouting.from_npz(tmp_path / "other.npz")
    np.savez(tmp_path / "float.npz", experts=np.zeros((2, 2, 2)), offsets=[0, 2])
    with pytest.raises(ConfigError, match="whole numbers"):
        ReplayedRouting.from_npz(tmp_path / "float.npz")
    for trace in (torch.zeros(3, 2), torch.zeros(0, 2, 2)):
        with pytest.raises(ConfigError, match=r"\[tokens, layers, top_k\]"):
            ReplayedRouting(trace.long())
    for offsets in ([0, 3], [1, 4], [0, 3, 2, 4], []):
        with pytest.raises(ConfigError, match="rise from 0 to 4"):
            ReplayedRouting(trace_of(4), offsets=offsets)


@needs_recordings
def test_the_recorded_trace_is_replayed() -> None:
    source = ReplayedRouting.from_npz(TRACE)
    assert (source.n_layers, source.n_experts, source.top_k) == (24, 32, 4)
    with np.load(TRACE) as file:
        experts, offsets = file["experts"], file["offsets"]
    for layer in (0, 23):
        got = np.concatenate([source(layer, n, CPU).numpy() for n in (100, 57)])
        assert (got == experts[:157, layer]).all()
    assert len(source.offsets) == len(offsets) == 501
    assert (source.sequence(7).numpy() == experts[offsets[7] : offsets[8]]).all()

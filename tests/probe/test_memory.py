from pathlib import Path

import pytest
import torch

from overspill.probe import memory
from overspill.probe.memory import cold_bytes, fill_with_noise, last_cache


def test_the_largest_cache_is_read(tmp_path: Path) -> None:
    assert last_cache(tmp_path) == 0
    for index, size in enumerate(["48K", "2048K", "32768K"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert last_cache(tmp_path) == 32 << 20


@pytest.mark.parametrize(
    ("cache", "free", "cold"),
    [
        (0, 64 << 30, 256 << 20),
        (200 << 20, 64 << 30, 600 << 20),
        (900 << 20, 64 << 30, 1 << 30),
        (200 << 20, 800 << 20, 100 << 20),
    ],
)
def test_cold_is_more_than_the_caches_and_less_than_the_memory(
    cache: int, free: int, cold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "last_cache", lambda: cache)
    monkeypatch.setattr(memory, "available_memory", lambda: free)
    assert cold_bytes() == cold


@pytest.mark.parametrize("numel", [1, 1000, (1 << 20) + 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_noise_fills_all_of_it(numel: int, dtype: torch.dtype) -> None:
    into = torch.full((numel,), torch.nan, dtype=dtype)
    before = torch.get_rng_state()
    fill_with_noise(into, 0.02)
    assert torch.equal(torch.get_rng_state(), before), "the global generator is the user's"
    assert into.isfinite().all()
    assert into.float().abs().max() < 0.2
    assert (into != 0).float().mean() > 0.9

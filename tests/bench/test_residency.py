"""The benchmark of GPU memory: what it records and draws, and what a failure leaves."""

import importlib
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import overspill
from overspill.models import GPTMoE, get_preset
from overspill.moe.settings import Settings


@pytest.fixture
def residency(scripts: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with sequences of eight tokens."""
    monkeypatch.setattr(importlib.import_module("workload"), "SEQ", 8)
    return importlib.import_module("residency")


def options(**changes: Any) -> Namespace:
    return Namespace(**{"warm": 1, "steps": 2, "timeline": None, "timeline_at": 24.0, **changes})


@pytest.fixture
def model() -> Iterator[GPTMoE]:
    sizes = {"n_layers": 3, "d_model": 16, "d_hidden": 16, "n_heads": 2, "n_experts": 4}
    model = GPTMoE(get_preset("nano", vocab=32, **sizes))
    settings = Settings(residency=True)
    overspill.offload(model, "1GiB", device="cpu", settings=settings, gpu_experts=0, quiet=True)
    yield model
    model.overspill.close()


def test_a_record_is_named_by_model_budget_and_clipping(residency: ModuleType) -> None:
    assert residency.Case("w1", None, 16, 12.0, False).name == "residency-w1-12gib"
    assert residency.Case("w1", None, 16, 12.5, True).name == "residency-w1-12.5gib-clip"
    assert residency.Case("moe-l", 24, 32, 40.0, False).name == "residency-moe-l-24-40gib"


def test_budgets_are_measured_in_growing_order(residency: ModuleType) -> None:
    assert residency.budgets("40,12,9.5") == [9.5, 12.0, 40.0]
    with pytest.raises(Exception, match="above 0"):
        residency.budgets("12,-1")


def test_the_limit_counts_streamed_experts_only(residency: ModuleType) -> None:
    limit, config = importlib.import_module("train").limit, get_preset("w1")
    tokens, experts = 16 * 1024, config.expert_params
    whole, half, none = (limit(config, tokens, part) for part in (experts, experts // 2, 0))
    assert whole.source == "CPU AdamW alone at 5.36 Gparam/s"
    assert half.value == pytest.approx(2 * whole.value)
    assert half.source.endswith(", 50% of the experts")
    assert none.source.startswith("GPU")
    assert none.value > half.value


def test_timing_begins_when_residents_have_not_changed_for_some_steps(
    residency: ModuleType,
) -> None:
    class Engine:
        residents = (0, 0)

    def run(changes: dict[int, tuple[int, int]]) -> Iterator[None]:
        for number in range(99):
            taken.append(number)
            engine.residents = changes.get(number, engine.residents)
            yield

    for changes, steps, settled in (
        ({}, 3, True),
        ({2: (1, 1), 4: (2, 1)}, 8, True),
        ({number: (number, 1) for number in range(99)}, residency.MOST_STEPS, False),
    ):
        engine, taken = Engine(), list[int]()
        assert residency.settle(engine, run(changes), 3) is settled
        assert len(taken) == steps


def test_a_budget_that_runs_out_of_memory_does_not_stop_the_others(
    residency: ModuleType,
    model: GPTMoE,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine, calls = model.overspill, 0
    failing_call = {1.0: 1, 1.5: 2}  # by budget: in forward; in backward, which recomputes

    def limit(size: int) -> None:
        nonlocal calls, budget
        calls, budget = 0, size / 2**30
        engine.set_residents([int(2 * budget)] * engine.n_layers)

    def run_out(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == failing_call.get(budget):
            raise torch.OutOfMemoryError("no memory left")

    budget = 0.0
    monkeypatch.setattr(engine.memory, "limit", limit)
    model.blocks[1].attention.register_forward_pre_hook(run_out)
    cases = [residency.Case("toy", None, 2, budget, True) for budget in (0.5, 1.0, 1.5, 2.0)]
    found = {
        case.budget: measured and measured.residents
        for case, measured in residency.measure_round(model, cases, [0] * 3, options())
    }
    assert found == {0.5: [1] * 3, 1.0: None, 1.5: None, 2.0: [4] * 3}
    said = capsys.readouterr().err
    assert said.count("no memory left") == 2
    assert f"{cases[1].name} failed" in said
    engine.check_conserved()


def test_a_record_has_the_medians_of_all_rounds(
    residency: ModuleType, model: GPTMoE, tmp_path: Path
) -> None:
    case = residency.Case("toy", None, 2, 12.0, True)
    rounds = [
        residency.Measured(_run(seconds, host), residents, True)
        for seconds, host, residents in (([1.0, 2.0], 10, [2, 2, 2]), ([4.0, 5.0], 30, [2, 2, 3]))
    ]
    residency.save(model.config, case, rounds, {"preset": "toy"}, tmp_path)
    record = json.loads((tmp_path / f"{case.name}.json").read_text())
    metrics = record["metrics"]
    assert next(iter(metrics)) == "tokens_per_second"
    assert metrics["step"] == {"median": 3.0, "low": 1.0, "high": 5.0, "unit": "s"}
    assert metrics["experts_on_gpu"]["high"] == pytest.approx(100 * 7 / 12)
    assert metrics["host_memory"]["high"] == 10 / model.config.expert_params
    assert record["config"]["residents"] == [2, 2, 3]
    assert record["config"]["gpu_memory"] == "12GiB"


@pytest.mark.gpu
@pytest.mark.usefixtures("measured_roughly")
def test_on_a_gpu_a_small_model_ends_up_there_within_each_budget(
    residency: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = "--preset nano --batch 2 --budgets 2,3 --clip both --rounds 2 --steps 2 --out"
    monkeypatch.setattr(sys, "argv", ["bench/residency.py", *arguments.split(), str(tmp_path)])
    assert residency.main() == 0
    records = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(records) == {
        f"residency-nano-{budget}gib{clip}" for budget in (2, 3) for clip in ("", "-clip")
    }
    for name, record in records.items():
        assert record["metrics"]["experts_on_gpu"]["low"] == 100
        assert 0 < record["metrics"]["gpu_memory"]["high"] <= (2 if "-2gib" in name else 3)
        assert record["config"]["settled"]
        assert record["limit"]["source"].startswith("GPU")


def _run(seconds: list[float], host_bytes: int) -> Any:
    busy = {"compute": 0.5}
    return importlib.import_module("workload").Run(16, seconds, 3.0, 2**30, host_bytes, busy)


def _record(name: str, **metrics: float) -> dict[str, Any]:
    return {"name": name, "metrics": {key: {"median": value} for key, value in metrics.items()}}


RECORDS = [
    _record("residency-w1-24gib", gpu_memory=23.5, tokens_per_second=19e3),
    _record("residency-w1-12gib", gpu_memory=11.8, tokens_per_second=14e3),
    _record("residency-w1-12gib-clip", gpu_memory=11.9, tokens_per_second=11e3),
    _record("residency-moe-l-24-40gib", gpu_memory=39.0, tokens_per_second=20e3),
    _record("train-w1-gpu-only-16x1024", gpu_memory=58.6, tokens_per_second=55e3),
    _record(
        "train-w1-vs-deepspeed",
        deepspeed_16_clip_gpu_memory=15.4,
        deepspeed_16_clip_tokens_per_second=4600.0,
    ),
]


def test_the_plot_shows_our_records_of_w1_and_the_peers(tmp_path: Path, scripts: None) -> None:
    plot = importlib.import_module("residency_plot")
    assert plot.our_points(RECORDS, clip=False) == [(11.8, 14e3), (23.5, 19e3)]
    assert plot.our_points(RECORDS, clip=True) == [(11.9, 11e3)]
    assert plot.peer_points(RECORDS) == {
        "MegaTrain, clipping": (4.8, 3500.0),
        "DeepSpeed ZeRO-3 offload, clipping": (15.4, 4600.0),
    }
    plot.draw_plot(RECORDS, tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="no record residency-w1"):
        plot.draw_plot(RECORDS[3:], tmp_path / "none.png")

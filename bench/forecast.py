"""Forecasts of training steps on several GPUs, and their error on steps measured on one GPU.

Needs no GPU: rates come from records and from the measurements of the reference machine.

PYTHONPATH=src python3 bench/forecast.py
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import RESULTS, Metric, metric, write_record

from overspill.simulate import DrawnRouting
from overspill.simulate.forecast import Forecast, NodeRates, TrainingWork, forecast

LINK = 50e9
"""Bytes a second between pinned host memory and the H200, both ways at once, each way."""
DEVICE_MEMORY = 4.4e12
"""Bytes a second of the H200's memory: 1.99 GB of a token in 0.45 ms."""
DIRECT = 300e9
"""Bytes a second that GPUs with direct links send each other: assumed, not measured."""
HOME = 12
"""Bytes of GPU memory for each parameter of a resident expert."""
GPU_MEMORY = 139 * 2**30
GPUS = (1, 2, 4, 8)
BATCH = 16 * 1024
IMBALANCE = 2.0
"""The sum of squared shares, over that of an even routing."""


@dataclass(frozen=True)
class Model:
    n_layers: int
    n_experts: int
    top_k: int
    d_model: int
    expert: int  # parameters of one expert
    dense_active: int  # parameters that compute for every token, without experts
    embedding: int

    def work(self, tokens: int, g: float = 1.0) -> TrainingWork:
        """A step whose imbalance is `g` times that of an even routing."""
        routing = DrawnRouting.with_imbalance(
            self.n_layers, self.n_experts, self.top_k, g / self.n_experts
        )
        rows = tokens * self.top_k
        rows_LE = [[round(p * rows) for p in routing.shares(i)] for i in range(self.n_layers)]
        return TrainingWork(
            expert=self.expert,
            dense=self.dense_active + self.embedding,
            dense_active=self.dense_active,
            d_model=self.d_model,
            tokens=tokens,
            rows_LE=rows_LE,
        )


W1 = Model(
    24, 16, 2, 1024, 3 * 1024 * 4096, 24 * (4 * 1024**2 + 16 * 1024) + 32_000 * 1024, 32_000 * 1024
)
QWEN = Model(  # Qwen3-30B-A3B
    48, 128, 8, 2048, 3 * 2048 * 768,
    48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 2048) + 151_936 * 2048, 151_936 * 2048,
)  # fmt: skip


def moe_l(n_experts: int) -> Model:
    """The head is the embedding."""
    dense = 24 * (4 * 1536**2 + n_experts * 1536) + 51_200 * 1536
    return Model(24, n_experts, 1, 1536, 2 * 1536 * 6144, dense, 0)


def read(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return record


def step_of(name: str) -> float:
    return float(read(name)["metrics"]["step"]["median"])


def home_share(name: str) -> float:
    return float(read(name)["metrics"]["experts_on_gpu"]["median"]) / 100


def on_gpu(row: int) -> tuple[int, float]:
    """Times of the record of moe-l, whose steps have 32×1024 tokens: the number of experts, and
    seconds of a step with everything on the GPU."""
    found = read("scale-moe-l")["table"][row]
    return found["experts"], 32 * 1024 / float(found["tokens/s, all on GPU"].replace(",", ""))


def measured_rates() -> NodeRates:
    """Rates of the reference machine, from records of moe-l, so that the records of W1 are left to
    check the forecasts. GPUs exchange tokens through host memory."""
    n_experts, seconds = on_gpu(0)
    model = moe_l(n_experts)
    work = model.work(32 * 1024)
    update = 28 * (work.experts + work.dense) / DEVICE_MEMORY
    active = work.dense_active + model.n_layers * model.top_k * model.expert
    streamed = moe_l(24).work(1024).experts * (1 - home_share("residency-moe-l-24-40gib"))
    return NodeRates(
        link=LINK,
        host_memory=32 * streamed / step_of("residency-moe-l-24-40gib"),
        cpu_update=read("adam-kernel-fp32")["metrics"]["speed"]["median"] * 1e9,
        compute=8 * active * work.tokens / (seconds - update),
        device_memory=DEVICE_MEMORY,
        exchange=LINK,
        through_host=True,
    )


@dataclass(frozen=True)
class Check:
    """A measured step and its forecast."""

    record: str
    measured: float
    found: Forecast
    used: bool = False  # a rate was taken from this record

    @property
    def error(self) -> float:
        return self.found.seconds / self.measured - 1


def checks(rates: NodeRates) -> list[Check]:
    def trained(name: str, model: Model, batch: int, used: bool = False) -> Check:
        found = forecast(model.work(batch * 1024), rates, 1, home_share(name))
        return Check(name, step_of(name), found, used)

    found = [
        trained("train-w1-16x1024", W1, 16),
        trained("train-w1-64x1024", W1, 64),
        trained("train-w1-gpu-only-16x1024", W1, 16),
        *(trained(f"residency-w1-{gib}gib", W1, 16) for gib in (5, 8, 12, 24, 40, 52, 60, 64)),
        trained("residency-moe-l-24-40gib", moe_l(24), 32, used=True),
    ]
    for row in (0, 1):
        n_experts, seconds = on_gpu(row)
        step = forecast(moe_l(n_experts).work(32 * 1024), rates, 1, resident=1)
        name = f"scale-moe-l, {n_experts} experts on the GPU"
        found.append(Check(name, seconds, step, used=row == 0))
    return found


def direct(rates: NodeRates) -> NodeRates:
    return NodeRates(**{**vars(rates), "exchange": DIRECT, "through_host": False})


def predictions(rates: NodeRates) -> list[dict[str, Any]]:
    """The step of both models on each number of GPUs."""
    return [
        _prediction(name, model, batch, each, exchange, node, experts)
        for name, model in (("W1", W1), ("Qwen3-30B-A3B", QWEN))
        for batch, each in ((16, False), (16, True), (64, True))
        for experts in ("streamed", "resident")
        for exchange, node in (("host memory", rates), ("direct", direct(rates)))
    ]


def _prediction(
    name: str, model: Model, batch: int, each: bool, exchange: str, node: NodeRates, experts: str
) -> dict[str, Any]:
    """Forecasts for several numbers of GPUs. With `each`, more GPUs train with more tokens a
    step."""
    cells, speeds = {}, {}
    resident = experts == "resident"
    for n in GPUS:
        work = model.work(batch * 1024 * (n if each else 1), IMBALANCE)
        steps = [forecast(work, node, n, resident, dynamic=on) for on in (False, True)]
        fits = not resident or HOME * work.experts / n < GPU_MEMORY
        cells[f"{n} GPU" + "s" * (n > 1)] = _cell(*steps) if fits else "does not fit"
        speeds[n] = work.tokens / steps[1].seconds if fits else None
    first = min(n for n in GPUS if speeds[n])
    gain = f"{speeds[8] / speeds[first]:.1f}×" + (f" of {first}" if first > 1 else "")
    return {
        "model": name,
        "tokens a step": f"{batch}×1024" + " on each GPU" * each,
        "experts": experts,
        "exchange": exchange,
        **cells,
        "tokens/s of 8 GPUs": gain,
    }


def _cell(static: Forecast, dynamic: Forecast) -> str:
    times = dict.fromkeys(f"{step.seconds:.3g}" for step in (static, dynamic))
    return f"{' / '.join(times)} s, {dynamic.limit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of the records; default bench/results")
    args = parser.parse_args()
    rates = measured_rates()
    found = checks(rates)
    free = [check for check in found if not check.used]
    used = {name: rate for name, rate in vars(rates).items() if rate is not None}
    write_record(
        "placement-forecast-error",
        {"row": "forecasts and measured steps of one GPU", "rates": used},
        {
            "error": metric([100 * abs(check.error) for check in free], "%"),
            **{f"error of {check.record}": metric([100 * check.error], "%") for check in found},
        },
        None,
        args.out,
        table=[
            {
                "record": check.record,
                "measured": f"{check.measured:.3f} s",
                "forecast": f"{check.found.seconds:.3f} s",
                "limit": check.found.limit,
                "error": f"{check.error:+.0%}" + (", a rate is from it" if check.used else ""),
            }
            for check in found
        ],
    )
    rows = predictions(rates)
    write_record(
        "placement-forecast",
        {
            "row": "predicted steps with static / dynamic placement, and what limits them",
            "rates": used,
            "direct exchange, bytes/s, assumed": DIRECT,
        },
        {
            "w1_streamed_8_gpus": _seconds(W1, rates, 0),
            "w1_resident_8_gpus": _seconds(W1, rates, 1),
        },
        None,
        args.out,
        table=rows,
    )
    print(f"median error {statistics.median(abs(c.error) for c in free):.1%}")


def _seconds(model: Model, rates: NodeRates, resident: float) -> Metric:
    return metric([forecast(model.work(BATCH, IMBALANCE), rates, 8, resident).seconds], "s")


if __name__ == "__main__":
    main()

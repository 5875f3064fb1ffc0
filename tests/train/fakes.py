"""A model that trains in plain PyTorch behind the interface of the engine and its optimizer."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from overspill.core.experts import ExpertId, ExpertShape
from overspill.core.layer_map import LayerMap
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.trace.recorder import Recorder
from overspill.train.metrics import EvalMetrics, StepMetrics
from overspill.train.run_spec import RunSpec
from overspill.train.session import Session
from overspill.train.train_spec import TrainSpec

TINY = GPTConfig(
    vocab=320, n_layers=4, d_model=16, d_hidden=24, n_heads=2, n_experts=4, top_k=2, moe_every=2
)


class FakeEngine:
    """Experts stay where the plain model has them."""

    def __init__(self, model: GPTMoE) -> None:
        self.layers = model.moe_layers()
        self.layer_map = LayerMap.whole(len(self.layers))
        self.n_layers, self.n_experts = len(self.layers), self.layers[0].n_experts
        self.shape: ExpertShape = self.layers[0].shape
        self.dtype = self.layers[0].w_in.dtype
        self.recorder = Recorder()
        self.records = self.memory = self  # reads and writes the plain model's parameters
        self.packed = False
        self.closed = False
        self.can_train = False
        self.ranks = None

    def ids(self) -> list[ExpertId]:
        return [ExpertId(n, index) for n in range(self.n_layers) for index in range(self.n_experts)]

    def _parts(self, expert: ExpertId) -> tuple[Tensor, Tensor]:
        layer = self.layers[expert.layer]
        return layer.w_in.data[expert.index].view(-1), layer.w_out.data[expert.index].view(-1)

    def read_weights(self, expert: ExpertId, out: Tensor) -> None:
        torch.cat(self._parts(expert), out=out)

    def write_weights(self, expert: ExpertId, fill: Callable[[Tensor], None]) -> None:
        record = torch.empty(self.shape.numel, dtype=self.dtype)
        fill(record)
        self._parts(expert)[0].copy_(record[: self.shape.in_numel])
        self._parts(expert)[1].copy_(record[self.shape.in_numel :])

    def flush(self) -> None:
        assert not self.closed

    def describe(self) -> str:
        return "mode fake: all experts in the plain model"

    def bytes_by_tier(self) -> dict[str, int]:
        return {"gpu": 1024, "host": 2048, "disk": 0}

    balance = None
    popularity = SimpleNamespace(observer=None)

    def gpu_use(self) -> None:
        return None

    def close(self) -> None:
        self.closed = True


class FakeAdamW(torch.optim.AdamW):
    """torch's AdamW, asked for its states as the expert-wise one is."""

    def __init__(self, model: GPTMoE, max_grad_norm: float | None, **arguments: Any) -> None:
        super().__init__(model.parameters(), **arguments)
        self.model, self.max_grad_norm = model, max_grad_norm
        self.total_norm: float | None = None
        self.layers = model.moe_layers()
        experts = {id(p) for layer in self.layers for p in (layer.w_in, layer.w_out)}
        self.dense = {n: p for n, p in model.named_parameters() if id(p) not in experts}
        for parameter in model.parameters():
            self.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.max_grad_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
            self.total_norm = float(norm)
        super().step()

    def accumulate(self) -> AbstractContextManager[None]:
        return nullcontext()

    def expert_sections(self) -> list[tuple[str, torch.dtype]]:
        return [("exp_avg", torch.float32), ("exp_avg_sq", torch.float32)]

    def allocate_expert_states(self) -> None: ...

    def _states(self, expert: ExpertId, name: str) -> tuple[Tensor, Tensor]:
        layer = self.layers[expert.layer]
        w_in, w_out = self.state[layer.w_in][name], self.state[layer.w_out][name]
        return w_in[expert.index].view(-1), w_out[expert.index].view(-1)

    def read_expert_state(self, expert: ExpertId, name: str, out: Tensor) -> None:
        torch.cat(self._states(expert, name), out=out)

    def write_expert_state(self, expert: ExpertId, name: str, value: Tensor) -> None:
        w_in, w_out = self._states(expert, name)
        w_in.copy_(value[: w_in.numel()])
        w_out.copy_(value[w_in.numel() :])

    def dense_state_dict(self) -> dict[str, Tensor]:
        steps = self.state[self.layers[0].w_in]["step"]
        states = {
            f"{name}.{key}": value
            for name, parameter in self.dense.items()
            for key, value in self.state[parameter].items()
        }
        return {**states, "experts.step": steps}

    def load_dense_state_dict(self, state: dict[str, Tensor]) -> None:
        for layer in self.layers:
            self.state[layer.w_in]["step"].copy_(state["experts.step"])
            self.state[layer.w_out]["step"].copy_(state["experts.step"])
        for name, parameter in self.dense.items():
            for key, value in self.state[parameter].items():
                value.copy_(state[f"{name}.{key}"])


def make_session(
    shape: GPTConfig = TINY, seed: int = 0, lr: float = 1e-3, clip: float | None = 1.0
) -> Session:
    model = GPTMoE(shape, checkpoint=False, seed=seed)
    for layer in model.moe_layers():
        for parameter in (layer.w_in, layer.w_out):
            parameter.is_expert_placeholder = True  # type: ignore[attr-defined]
    optimizer = FakeAdamW(model, max_grad_norm=clip, lr=lr)
    return Session(model, FakeEngine(model), optimizer)


def build_fake(spec: RunSpec) -> Session:
    """Replaces `build_session`."""
    assert isinstance(spec, TrainSpec)
    config = spec.config
    return make_session(spec.shape, config.run.seed, spec.lr, config.optim.clip or None)


class Watcher:
    """A display that keeps what it is told, and may act after a step."""

    def __init__(self, after: Callable[[int], None] = lambda step: None) -> None:
        self.lines: list[str] = []
        self.losses: list[float] = []
        self.evals: list[float] = []
        self.ended = False
        self._after = after

    def say(self, line: str) -> None:
        self.lines.append(line)

    def begin(self, steps: int, done: int) -> None:
        self.ended = False

    def step(self, metrics: StepMetrics, log: bool) -> None:
        self.losses.append(metrics.loss)
        self._after(metrics.step)

    def evaluation(self, metrics: EvalMetrics) -> None:
        self.evals.append(metrics.eval_loss)

    def end(self) -> None:
        self.ended = True


def tiny_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run that takes a moment."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"expert {i} of layer {i % 7} spills\n" for i in range(400)))
    return {
        "data": str(text), "cache": str(folder / "cache"), "out": str(folder / "run"),
        "layers": 2, "d_model": 16, "d_hidden": 24, "heads": 2, "experts": 4, "seq_len": 16,
        "batch": 2, "steps": 8, "warmup": 2, "save_every": 3, "eval_every": 4, "log_every": 2,
        "trace_steps": 0, "device": "cpu", "slots": 3, **changes,
    }  # fmt: skip

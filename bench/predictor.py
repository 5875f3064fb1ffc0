"""How well the experts of a layer are known layers ahead, and what knowing costs.

Trains small MoE models on text. Then training goes on, and predictors that start as copies of the
gates learn beside it, as they do in a run. What they are worth is measured on other text.

PYTHONPATH=src python3 bench/predictor.py --data train.txt.gz --held-out test.txt.gz
"""

import argparse
import gzip
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from record import Metric, metric, write_record
from torch import Tensor

import overspill
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.moe.predictor import Lookahead, expert_accuracy, history_accuracy, token_accuracy
from overspill.train.tokenizer import load_tokenizer, vocab_size

AHEAD = (1, 2)
RATE, END_RATE, WARM = 2e-3, 2e-4, 30
HELD_OUT = 0.1
MODELS = (16, 64)
FIELDS = ("token", "narrow", "loose")
PAPER = [
    ("Mixtral-8x7B, 8 experts (APTMoE)", "predictor, 1 layer ahead", 0.85, 1.0, None),
    ("NLLB-MoE, 128 experts (APTMoE)", "predictor, 4 layers ahead", 0.64, None, 0.94),
    ("NLLB-MoE, 128 experts (APTMoE)", "last step", None, None, 0.733),
]


@dataclass(frozen=True)
class Work:
    """What is trained, for how long, on what."""

    model: GPTConfig
    wide: GPTConfig  # of which only the cost is measured
    batch: int
    steps: int
    learn: int  # further steps, beside which predictors learn
    eval_batches: int
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


class Seen(NamedTuple):
    """What the gate of a layer read in one forward, and what it chose."""

    x_TD: Tensor
    ids_TK: Tensor


class Scores(NamedTuple):
    """Accuracies of one layer; None where there is no such thing."""

    token: float | None
    narrow: float
    """Of the quarter predicted to be rarest, the share in the quarter that is."""
    loose: float
    """The share in the rarest three eighths."""


class Cost(NamedTuple):
    """Seconds a layer, of each repeat."""

    forward: list[float]
    observe: list[float]

    def share(self) -> Metric:
        pairs = zip(self.observe, self.forward, strict=True)
        return metric([observe / forward for observe, forward in pairs], "of a layer's forward")

    def time(self) -> Metric:
        return metric([1e6 * seconds for seconds in self.observe], "µs")


@dataclass(frozen=True)
class Outcome:
    """All that was measured on one model."""

    loss: float
    scores: dict[str, list[Scores]]  # by who predicts; one for each layer
    converged: int
    cost: Cost


class Text:
    """Tokens to learn from, and tokens held out."""

    def __init__(
        self,
        file: Path,
        held_out: Path | None,
        tokenizer: str,
        length: int,
        device: torch.device,
    ) -> None:
        """Without a file of its own, the end of the text is held out."""
        own = load_tokenizer(tokenizer)
        self.vocab = vocab_size(own)

        def tokens(file: Path) -> Tensor:
            opener: Callable[..., Any] = gzip.open if file.suffix == ".gz" else open
            with opener(file, "rt", encoding="utf-8") as lines:
                return torch.from_numpy(own.encode(lines.read()).astype("int64")).to(device)

        self.length = length
        self.train = tokens(file)
        if held_out is None:
            start = int(len(self.train) * (1 - HELD_OUT))
            self.train, self.held_out = self.train[:start], self.train[start:]
        else:
            self.held_out = tokens(held_out)
        self.order = torch.Generator().manual_seed(0)

    def batch(self, n: int) -> Tensor:
        """The next `n` windows to train on."""
        return self._windows(n, self.train, self.order)

    def held_out_batches(self, count: int, n: int) -> list[Tensor]:
        """`count` times `n` windows, always the same."""
        order = torch.Generator().manual_seed(1)
        return [self._windows(n, self.held_out, order) for _ in range(count)]

    def _windows(self, n: int, tokens: Tensor, order: torch.Generator) -> Tensor:
        starts = torch.randint(len(tokens) - self.length, (n, 1), generator=order)
        window = starts + torch.arange(self.length + 1)
        return tokens[window.to(tokens.device)]


def main() -> None:
    arguments = parse()
    device = torch.device(arguments.device)
    length = 128 if arguments.small else 256
    text = Text(arguments.data, arguments.held_out, arguments.tokenizer, length, device)
    work = plan(arguments, text, device)
    outcomes = {}
    for n_experts in MODELS:
        model = replace(work.model, n_experts=n_experts)
        outcomes[n_experts] = run(replace(work, model=model), text)
    with built(work.wide, work) as wide:
        wide_cost = cost(wide, text.batch(work.batch))
    write(work, outcomes, wide_cost, arguments.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="text, .gz or not")
    parser.add_argument("--held-out", type=Path, help="text to measure on; else the last tenth")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, or a tokenizer.json")
    parser.add_argument("--steps", type=int, default=None, help="of training before predictors")
    parser.add_argument("--learn", type=int, default=None, help="steps with predictors beside")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--small", action="store_true", help="minutes on a CPU")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if not arguments.data.is_file():
        parser.error(f"--data {arguments.data} is not there; give a text file")
    return arguments


def plan(arguments: argparse.Namespace, text: Text, device: torch.device) -> Work:
    small = arguments.small
    model = GPTConfig(
        vocab=text.vocab,
        n_layers=3 if small else 8,
        d_model=64 if small else 256,
        d_hidden=128 if small else 512,
        n_heads=4,
        n_experts=16,
        top_k=2,
        gated=True,
        max_seq=text.length,
    )
    wide = replace(model, n_layers=2, d_model=256 if small else 1024, d_hidden=1024)
    return Work(
        model=model,
        wide=wide if small else replace(wide, d_hidden=4096, n_heads=16),
        batch=8 if small else 32,
        steps=arguments.steps or (80 if small else 400),
        learn=arguments.learn or (40 if small else 200),
        eval_batches=2 if small else 8,
        device=device,
    )


@contextmanager
def built(config: GPTConfig, work: Work) -> Iterator[GPTMoE]:
    """A model whose experts are all on the device."""
    model = GPTMoE(config, checkpoint=False, device=work.device, dtype=work.dtype)
    overspill.offload(model, device=work.device.type, mode="gpu", quiet=True)
    try:
        yield model
    finally:
        model.overspill.close()


def run(work: Work, text: Text) -> Outcome:
    """Trains one model, then goes on with predictors beside it."""
    began = time.perf_counter()
    with built(work.model, work) as model:
        optimizer = overspill.AdamW(model, lr=RATE, weight_decay=0.1, max_grad_norm=1.0)
        loss = train(model, optimizer, text, work)
        took = time.perf_counter() - began
        print(f"{work.model.n_experts} experts: loss {loss:.3f} after {took:.0f} s", flush=True)
        learned = [lookahead(model, ahead) for ahead in AHEAD]
        history, curve = learn(model, optimizer, text, work, learned)
        copied = [lookahead(model, ahead) for ahead in AHEAD]
        seen = look(model, text, work.eval_batches, work.batch)
        scores = {}
        for name, kind in (("copied gate", copied), ("predictor", learned)):
            for one in kind:
                scores[f"{name}, {one.ahead} ahead"] = judge(one, seen, work.model)
        scores["last step"] = judge_history(history, work.model)
        spent = cost(model, text.batch(work.batch))
    for name, layers in scores.items():
        token, narrow, loose = (middle([getattr(s, field) for s in layers]) for field in FIELDS)
        print(f"  {name:>22}: token {token}, rarest quarter {narrow}, of 3/8 {loose}", flush=True)
    return Outcome(loss, scores, converged(curve), spent)


def train(model: GPTMoE, optimizer: overspill.AdamW, text: Text, work: Work) -> float:
    """Warms up, then goes down in a line; the last loss."""
    loss = torch.zeros(())
    for step in range(work.steps):
        done = step / work.steps
        set_rate(optimizer, min(1.0, (step + 1) / WARM) * (RATE + done * (END_RATE - RATE)))
        loss = train_step(model, optimizer, text.batch(work.batch))
    set_rate(optimizer, END_RATE)
    return float(loss)


def set_rate(optimizer: overspill.AdamW, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def train_step(model: GPTMoE, optimizer: overspill.AdamW, tokens: Tensor) -> Tensor:
    loss = model(tokens[:, :-1], tokens[:, 1:]).loss
    assert loss is not None
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def lookahead(model: GPTMoE, ahead: int) -> Lookahead:
    config, gates = model.config, [moe.router.weight for moe in model.moe_layers()]
    return Lookahead(gates, config.n_experts, config.d_model, gates[0].device, ahead)


def learn(
    model: GPTMoE,
    optimizer: overspill.AdamW,
    text: Text,
    work: Work,
    predictors: Sequence[Lookahead],
) -> tuple[Tensor, list[tuple[int, float]]]:
    """Trains on, with predictors that watch. The real counts of each step and layer, [S, L, E],
    and the token accuracy of the first predictors after some of the steps."""
    history: list[Tensor] = []
    curve = []
    every = max(1, work.learn // 10)
    n_experts = work.model.n_experts

    def watch(layer: int, seen: Seen) -> None:
        for one in predictors:
            one.observe(layer, *seen)
        history.append(torch.bincount(seen.ids_TK.flatten(), minlength=n_experts))

    for step in range(work.learn):
        if step % every == 0:
            curve.append((step, accuracy(model, predictors[0], text, work)))
        with watched(model, watch):
            train_step(model, optimizer, text.batch(work.batch))
    curve.append((work.learn, accuracy(model, predictors[0], text, work)))
    return torch.stack(history).unflatten(0, (work.learn, -1)), curve


def accuracy(model: GPTMoE, one: Lookahead, text: Text, work: Work) -> float:
    layers = judge(one, look(model, text, 2, work.batch), work.model)
    return statistics.median(scores.token or 0.0 for scores in layers)


@contextmanager
def watched(model: GPTMoE, tell: Callable[[int, Seen], None]) -> Iterator[None]:
    """Within it, `tell` hears of each gate: its layer, what it read, what it chose."""

    def hook(layer: int) -> Callable[..., None]:
        return lambda _, args, output: tell(layer, Seen(args[0].detach(), output.expert_ids_TK))

    routers = [moe.router for moe in model.moe_layers()]
    handles = [router.register_forward_hook(hook(layer)) for layer, router in enumerate(routers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def look(model: GPTMoE, text: Text, n: int, batch: int) -> list[list[Seen]]:
    """What the gates see of text held out: for each batch, layer by layer."""
    return [see(model, tokens[:, :-1]) for tokens in text.held_out_batches(n, batch)]


def see(model: GPTMoE, tokens: Tensor) -> list[Seen]:
    seen: list[Seen] = []
    with watched(model, lambda _, one: seen.append(one)):
        model(tokens)
    return seen


def judge(one: Lookahead, batches: list[list[Seen]], config: GPTConfig) -> list[Scores]:
    """For each layer that is predicted, the mean over batches."""
    result = []
    for layer, predictor in one.predictors.items():
        scores = []
        for seen in batches:
            x_TD, real = seen[layer - one.ahead].x_TD, seen[layer].ids_TK
            ids = predictor.predict_ids(x_TD, config.top_k)
            counts = predictor.predict(x_TD, config.top_k)
            real_counts = torch.bincount(real.flatten(), minlength=config.n_experts)
            experts = [expert_accuracy(counts, real_counts, n, m) for n, m in borders(config)]
            scores.append((token_accuracy(ids, real), *experts))
        result.append(Scores(*(statistics.fmean(column) for column in zip(*scores, strict=True))))
    return result


def judge_history(counts_SLE: Tensor, config: GPTConfig) -> list[Scores]:
    """The counts of each step as a prediction of those of the next."""
    layers = counts_SLE.cpu().unbind(1)
    return [Scores(None, *(history_accuracy(one, *b) for b in borders(config))) for one in layers]


def borders(config: GPTConfig) -> list[tuple[int, int]]:
    n_experts = config.n_experts
    return [(n_experts // 4, n_experts // 4), (n_experts // 4, 3 * n_experts // 8)]


def converged(curve: list[tuple[int, float]]) -> int:
    """The first step after which the accuracy is within 0.01 of the last."""
    last = curve[-1][1]
    return next(step for step, value in curve if value >= last - 0.01)


@torch.no_grad()
def cost(model: GPTMoE, tokens: Tensor, repeats: int = 7) -> Cost:
    """A forward of a layer, and what predictors add to it, one after the other."""
    tokens = tokens[:, :-1]
    seen, one = see(model, tokens), lookahead(model, 1)
    spent = Cost([], [])

    def observe() -> None:
        for layer, (x_TD, ids_TK) in enumerate(seen):
            one.observe(layer, x_TD, ids_TK)

    for repeat in range(repeats + 2):
        times = [seconds(lambda: model(tokens), tokens.device), seconds(observe, tokens.device)]
        if repeat >= 2:  # the first ones start threads and compile
            spent.forward.append(times[0] / len(seen))
            spent.observe.append(times[1] / len(seen))
    return spent


def seconds(work: Callable[[], object], device: torch.device) -> float:
    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    settle()
    start = time.perf_counter()
    work()
    settle()
    return time.perf_counter() - start


def middle(values: Sequence[float | None]) -> str | None:
    """The median over layers, as the tables show it."""
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1%}" if known else None


def write(work: Work, outcomes: dict[int, Outcome], wide: Cost, out: Path | None) -> None:
    table = []
    for n_experts, outcome in outcomes.items():
        for name, layers in outcome.scores.items():
            values = (middle([getattr(one, field) for one in layers]) for field in FIELDS)
            table.append(line(f"{n_experts} experts, trained here", name, *values))
    for model, name, *paper in PAPER:
        values = (None if value is None else f"{value:.1%}" for value in paper)
        table.append(line(model, name, *values))
    config = work.model
    metrics: dict[str, Metric] = {}
    for n_experts, outcome in outcomes.items():
        metrics |= figures(outcome, "" if n_experts == MODELS[0] else f"_{n_experts}_experts")
    metrics |= {"cost_wide": wide.time(), "cost_share_wide": wide.share()}
    tokens = work.batch * config.max_seq
    write_record(
        "predictor",
        {
            "row": f"Experts known ahead: {config.n_layers} layers of width {config.d_model}, "
            f"top-{config.top_k}, batches of {tokens} tokens; medians over layers, on text held "
            f"out. Predicting and learning take {wide.share().median:.1%} of the forward of a "
            f"layer of {work.wide.n_experts} experts {work.wide.d_model}×{work.wide.d_hidden}",
            "steps": work.steps,
            "learn_steps": work.learn,
            "batch_tokens": tokens,
            "dtype": str(work.dtype),
            "device": work.device.type,
        },
        metrics,
        None,
        out,
        table,
    )


def line(model: str, name: str, *values: str | None) -> dict[str, str | None]:
    token, narrow, loose = values
    return {
        "model": model,
        "experts told by": name,
        "token accuracy": token,
        "rarest 1/4, in the real 1/4": narrow,
        "in the real 3/8": loose,
    }


def figures(outcome: Outcome, suffix: str) -> dict[str, Metric]:
    one, two = (outcome.scores[f"predictor, {ahead} ahead"] for ahead in AHEAD)
    copied = outcome.scores["copied gate, 1 ahead"]
    figures = {
        "token_accuracy": metric([scores.token or 0.0 for scores in one], "share"),
        "token_accuracy_copied": metric([scores.token or 0.0 for scores in copied], "share"),
        "token_accuracy_2_ahead": metric([scores.token or 0.0 for scores in two], "share"),
        "expert_accuracy": metric([scores.narrow for scores in one], "share"),
        "expert_accuracy_3_8": metric([scores.loose for scores in one], "share"),
        "history_3_8": metric([s.loose for s in outcome.scores["last step"]], "share"),
        "converged": metric([outcome.converged], "steps"),
        "loss": metric([outcome.loss], "nats"),
        "cost": outcome.cost.time(),
        "cost_share": outcome.cost.share(),
    }
    return {name + suffix: value for name, value in figures.items()}


if __name__ == "__main__":
    main()

"""Experts of the next layer named by copied gates and by a predictor that learns: accuracy, speed
of training beside it, and of decoding with it.

PYTHONPATH=src python3 bench/lookahead.py --routing gptoss20b_decode_experts_only.npz --disk FOLDER
PYTHONPATH=src python3 bench/lookahead.py --parts trained
PYTHONPATH=src python3 bench/lookahead.py --parts cached --shares 0.74,0.82 --routing FILE
PYTHONPATH=src python3 bench/lookahead.py --smoke              # tiny, on the CPU, no record

Two models are trained here on Python's sources, with 16 and 64 experts, while the predictor learns.
Then the accuracies on text held out, and the speed of decoding with a quarter of the experts
cached. W2 has random weights and replays the routing of gpt-oss, which no predictor can know from
its hidden states: so many of the experts that it names are right as were of the model with 64
experts, or as `--shares` says (copied gates, learned). Everything else of the predictor runs as
usual. Parts that run alone have a record of their own.
"""

import argparse
import copy
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from record import Metric, metric, write_record
from serve import decode, read_routing, w2
from torch import Tensor

import overspill
from overspill.core.garbage import short_collections
from overspill.models.config import GPTConfig
from overspill.models.predictor import new_observer, predictor_file
from overspill.moe.predictor import Accuracy, Predictor
from overspill.plan.popularity import expert_accuracy, rarest
from overspill.serve.decode import step
from overspill.simulate import routed_by

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODES: dict[str, dict[str, Any]] = {
    "auto": {"mode": "auto"},
    "copied gates": {"mode": "lookahead", "predictor": "gates"},
    "copied gates, by the CPU": {"mode": "lookahead", "predictor": "gates", "migrate": "cpu"},
    "learned": {"mode": "lookahead", "predictor": "learned"},
}
PARTS = "trained", "cached", "disk"
ON_DISK = ("auto", "copied gates", "learned")
"""There the CPU computes in every mode."""
_OFF = overspill.Settings(residency=False, follow_usage=False)


class Text:
    """Bytes of Python's sources."""

    def __init__(self, length: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        data = b"".join(file.read_bytes() for file in files)
        self._bytes = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._length = length
        self._random = torch.Generator().manual_seed(1)

    def batch(self, sequences: int, held_out: bool = False) -> Tensor:
        """The last twentieth is held out."""
        border = len(self._bytes) * 19 // 20
        first, last = (border, len(self._bytes)) if held_out else (0, border)
        span = last - self._length - 2
        starts = torch.randint(first, span, (sequences,), generator=self._random)
        rows = [self._bytes[start : start + self._length + 1] for start in starts.tolist()]
        return torch.stack(rows).long().to(DEVICE)


class Judged(NamedTuple):
    """Accuracies of predictions, by distance."""

    gates: dict[int, Accuracy]
    learned: dict[int, Accuracy]
    served: "dict[str, Served]"


def config(n_experts: int, args: argparse.Namespace) -> GPTConfig:
    width = 32 if args.smoke else 512
    return GPTConfig(
        vocab=256, n_layers=4 if args.smoke else 8, d_model=width, d_hidden=width, n_heads=4,
        n_experts=n_experts, top_k=2, gated=True, max_seq=1024,
    )  # fmt: skip


def new_model(n_experts: int, args: argparse.Namespace) -> Any:
    dtype = torch.float32 if args.smoke else torch.bfloat16
    return overspill.GPTMoE(config(n_experts, args), checkpoint=False, device=DEVICE, dtype=dtype)


def train(model: Any, text: Text, steps: int, sequences: int, lr: float = 1e-3) -> list[float]:
    """The seconds of each step."""
    optimizer = overspill.AdamW(model, lr=lr, max_grad_norm=1.0)
    seconds = []
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (number + 1) / 30) * (1 - 0.8 * number / steps)
        tokens = text.batch(sequences)
        began = time.perf_counter()
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = float(loss.detach())
        seconds.append(time.perf_counter() - began)
    print(f"  {steps} steps, loss {value:.3f}", flush=True)
    return seconds


@torch.no_grad()
def judge(model: Any, predictor: Predictor, batches: list[Tensor]) -> dict[int, Accuracy]:
    """The accuracies by distance, means over batches and layers."""
    layers = model.moe_layers()
    n_experts = layers[0].n_experts
    found: dict[int, list[tuple[float, float]]] = {a: [] for a in predictor.distances}
    for tokens in batches:
        seen: list[tuple[Tensor, Tensor]] = []

        def see(_: Any, args: Any, output: Any, seen: list[Any] = seen) -> None:
            seen.append((args[0].detach().clone(), output.expert_ids_TK))

        handles = [layer.router.register_forward_hook(see) for layer in layers]
        model(tokens[:, :-1])
        for handle in handles:
            handle.remove()
        for a, scores in found.items():
            for number, (x_TD, _) in enumerate(seen[:-a]):
                real_TK = seen[number + a][1]
                named_TK = predictor.predict(number, x_TD, a, real_TK.shape[1])
                right = (real_TK[:, :, None] == named_TK[:, None]).any(-1).double().mean()
                rows, real = (
                    torch.bincount(each.flatten(), minlength=n_experts).tolist()
                    for each in (named_TK, real_TK)
                )
                scores.append((float(right), expert_accuracy(rows, real, *rarest(n_experts))))
    return {
        a: Accuracy(*(statistics.fmean(each) for each in zip(*scores, strict=True)))
        for a, scores in found.items()
    }


def run_trained(n_experts: int, args: argparse.Namespace, table: list[dict[str, Any]]) -> Judged:
    print(f"{n_experts} experts, trained here", flush=True)
    text = Text(32 if args.smoke else 256)
    model = new_model(n_experts, args)
    settings = overspill.Settings(popularity="learned", residency=False)
    where: dict[str, Any] = {"device": DEVICE, "quiet": True, "progress": False}
    overspill.offload(model, mode="gpu", settings=settings, **where)
    seconds = train(model, text, args.steps, args.batch)
    observer = model.overspill.popularity.observer
    assert observer is not None
    share = observer.pace.seconds / sum(seconds)
    model.eval()
    batches = [text.batch(args.batch, held_out=True) for _ in range(4)]
    learned = judge(model, observer.predictor, batches)
    predictor_file(model).unlink(missing_ok=True)
    gates = judge(model, new_observer(model, (1, 2)).predictor, batches)
    for name, accuracies in (("copied gates", gates), ("learned", learned)):
        for distance, (tokens, experts) in accuracies.items():
            table.append({
                "work": f"{n_experts} experts, trained here",
                "named by": name,
                "layers ahead": distance,
                "token accuracy": f"{tokens:.1%}",
                "rarest quarter in 3/8": "–" if experts is None else f"{experts:.1%}",
                "tokens/s": None,
                "of the time": f"{share:.2%}" if name == "learned" else None,
            })  # fmt: skip
            print(f"  {table[-1]}", flush=True)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.overspill.close()
    run_training(n_experts, weights, text, args, table)
    served = new_model(n_experts, args).eval()
    served.load_state_dict(weights)
    overspill.offload(served, mode="host", slots=2 * n_experts, settings=_OFF, **where)
    engine = served.overspill
    predictor_file(served).unlink(missing_ok=True)
    slots = engine.n_layers * n_experts // 4
    work = f"{n_experts} experts, trained here, a quarter cached"
    answers = serve(served, MODES, slots, args)
    table += [row(work, name, found) for name, found in answers.items()]
    engine.close()
    return Judged(gates, learned, answers)


def run_training(
    n_experts: int,
    weights: dict[str, Tensor],
    text: Text,
    args: argparse.Namespace,
    table: list[dict[str, Any]],
) -> None:
    """Steps with few tokens and all experts in host memory: uploads ahead depend on the expected
    experts."""
    for popularity in ("history", "learned"):
        model = new_model(n_experts, args)
        model.load_state_dict(weights)
        settings = overspill.Settings(popularity=popularity, residency=False)
        overspill.offload(
            model, mode="host", slots=n_experts, device=DEVICE, quiet=True, progress=False,
            settings=settings,
        )  # fmt: skip
        seconds = train(model, text, args.host_steps, 1, 1e-5)[args.host_steps // 3 :]
        speed = [256 / each for each in seconds]
        table.append({
            "work": f"{n_experts} experts, training 256 tokens a step, experts in host memory",
            "named by": popularity,
            "layers ahead": None,
            "token accuracy": None,
            "rarest quarter in 3/8": None,
            "tokens/s": f"{statistics.median(speed):,.0f}",
            "of the time": None,
        })  # fmt: skip
        print(f"  {table[-1]}", flush=True)
        model.overspill.close()


class Served(NamedTuple):
    speeds: list[float]  # tokens a second, in each round
    stats: dict[str, Any]
    ids: list[int]  # of a greedy answer


def serve(
    model: Any,
    modes: dict[str, dict[str, Any]],
    slots: int,
    args: argparse.Namespace,
    guesses: dict[str, float] | None = None,
    routing: Callable[[], Any] | None = None,
    tokens: int | None = None,
) -> dict[str, Served]:
    """`guesses` are the shares of experts that are named rightly, by mode, with replayed
    `routing`."""
    found: dict[str, Served] = {}
    for name, flags in modes.items():
        if "migrate" in flags and DEVICE == "cpu":
            continue
        named: AbstractContextManager[None] = nullcontext()
        if guesses is not None and name in guesses:
            named = guessed(guesses[name])
        chosen = nullcontext() if routing is None else routed_by(model, routing())
        with (
            named,
            overspill.LLM(model, context=512, max_batch=1, slots=slots, **flags) as llm,
            short_collections(),
            chosen,
        ):
            count = tokens or args.tokens
            decode(llm, 1, count, 1)  # the cache and the predictor learn
            speeds = [each.speed for each in decode(llm, 1, count, args.rounds)]
            greedy = overspill.SamplingParams(max_tokens=16, ignore_eos=True)
            ids = list(llm.generate([[5, 6, 7]], greedy)[0].token_ids)
            found[name] = Served(speeds, llm.stats(), ids)
        told = {key: value for key, value in found[name].stats.items() if "predictor" in key}
        print(f"  {name:25s} {statistics.median(speeds):8.1f} tokens/s {told}", flush=True)
    first = next(iter(found.values()))
    for name, each in found.items():
        if each.ids != first.ids:  # with bf16 the CPU and the GPU round differently
            print(f"  {name}: other tokens than {next(iter(found))}", flush=True)
    return found


def row(work: str, name: str, found: Served) -> dict[str, Any]:
    share = found.stats.get("predictor_token_accuracy_1")
    learning = found.stats.get("predictor_learning_seconds")
    if learning is not None:
        learning /= found.stats["decode_seconds"]
    return {
        "work": work,
        "named by": name,
        "layers ahead": None if name == "auto" else 1,
        "token accuracy": None if share is None else f"{share:.1%}",
        "rarest quarter in 3/8": None,
        "tokens/s": f"{statistics.median(found.speeds):,.1f}",
        "of the time": None if learning is None else f"{learning:.2%}",
    }


@contextmanager
def guessed(share: float) -> Iterator[None]:
    """Within it, of the experts that a decoding step with replayed routing names ahead, this share
    is right; others take the places of the rest. The kernels that would name them run too."""
    plain = step._Routing.guess

    def guess(self: Any, layer: int) -> Tensor | None:
        given, self._given = self._given, False
        named = plain(self, layer)
        self._given = given
        if named is None:
            return None
        ids = self._ids_LBK[layer]
        places = torch.arange(ids.numel(), device=ids.device).view_as(ids)
        number = self._batch.positions[:, None] * 7919 + places * 104_729 + layer * 1_299_709
        number = (number * 48_271 % 2_147_483_647) % 10_000
        n_experts = self._step.experts.table.offsets.shape[1]
        wrong = (ids + 1 + number % (n_experts - 1)) % n_experts
        return torch.where(number < 10_000 * share, ids, wrong).to(torch.int32)

    step._Routing.guess = guess  # type: ignore[method-assign]
    try:
        yield
    finally:
        step._Routing.guess = plain  # type: ignore[method-assign]


def small_w2() -> Any:
    found = w2()
    found.hidden_size, found.moe_intermediate_size, found.num_hidden_layers = 32, 24, 3
    found.num_attention_heads, found.num_key_value_heads, found.head_dim = 2, 1, 16
    found.num_experts, found.num_experts_per_tok, found.vocab_size = 8, 2, 512
    return found


def run_w2(
    right: tuple[float, float], args: argparse.Namespace, table: list[dict[str, Any]]
) -> dict[str, Any]:
    """A quarter of the experts cached; then with 4 GiB of host memory, and the rest on disk.
    `right` are the shares of experts that copied gates and the predictor name rightly."""
    shares = {name: right[0] for name in MODES if "gates" in name}
    shares["learned"] = right[1]
    dtype = torch.float32 if args.smoke else torch.bfloat16
    w2_config = small_w2() if args.smoke else w2()
    given: dict[str, Any] = {"train": False, "quiet": True, "settings": _OFF, "dtype": dtype}
    found: dict[str, dict[str, Served]] = {}
    works: dict[str, tuple[dict[str, Any], Any, int | None]] = {}
    if "cached" in args.parts:
        works["W2, a quarter cached, routing of gpt-oss"] = {}, MODES, args.tokens
    if "disk" in args.parts and args.disk is not None:
        budgets = {"gpu_memory": "8GiB", "host_memory": "4GiB", "disk": args.disk}
        if args.smoke:
            budgets = {"mode": "disk", "slots": 4, "host_slots": 16, "disk": args.disk}
        work = "W2, a quarter cached, 4 GiB of host memory, the rest on disk, routing of gpt-oss"
        works[work] = budgets, {name: MODES[name] for name in ON_DISK}, args.tokens_on_disk
    for work, (budgets, modes, tokens) in works.items():
        print(work, flush=True)
        model = overspill.from_config(copy.deepcopy(w2_config), **budgets, **given)
        engine = model.overspill
        slots = engine.n_layers * engine.n_experts // 4
        routing = None
        if args.routing is not None:
            routing = partial(read_routing, args.routing, engine.n_layers, engine.n_experts)
        predictor_file(model).unlink(missing_ok=True)
        found[work] = serve(model, modes, slots, args, shares, routing, tokens)
        predictor_file(model).unlink(missing_ok=True)
        for name, each in found[work].items():
            line = row(work, name, each)
            line["token accuracy"] = f"{shares[name]:.1%}" if name in shares else None
            table.append(line)
        engine.close()
    return found


def save(
    judged: dict[int, Judged],
    served: dict[str, dict[str, Served]],
    table: list[dict[str, Any]],
    args: argparse.Namespace,
) -> None:
    named = {"on_disk" if "disk" in work else "cached": found for work, found in served.items()}
    named |= {f"{n_experts}_experts": each.served for n_experts, each in judged.items()}
    metrics: dict[str, Metric] = {}
    for name, found in named.items():
        auto = statistics.median(found["auto"].speeds)
        metrics[f"over_auto_{name}"] = metric([s / auto for s in found["learned"].speeds], "times")
    least = min(metrics.values(), key=lambda found: found.median)
    metrics = {"least_over_auto": least, **metrics}
    for n_experts, each in judged.items():
        for distance, accuracy in each.learned.items():
            name = f"token_accuracy_{distance}_of_{n_experts}_experts"
            metrics[name] = metric([accuracy.tokens], "share")
            if accuracy.experts is not None:
                name = f"expert_accuracy_{distance}_of_{n_experts}_experts"
                metrics[name] = metric([accuracy.experts], "share")
    details = {
        "row": "Experts of later layers named by copied gates and by a predictor that learns; one "
        "request where tokens are generated"
    }
    name = "lookahead" if len(args.parts) == len(PARTS) else "-".join(["lookahead", *args.parts])
    write_record(name, details, metrics, None, args.out, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--models", default="16,64", help="numbers of experts that are trained")
    parser.add_argument("--shares", help="rightly named: by copied gates, by the predictor")
    parser.add_argument("--routing", type=Path, help="recorded routing of gpt-oss, for W2")
    parser.add_argument("--disk", type=Path, help="folder for experts of W2")
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--host-steps", type=int, default=36, help="with experts in host memory")
    parser.add_argument("--batch", type=int, default=32, help="sequences of 256 tokens")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--tokens-on-disk", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU, no record")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    models = [int(number) for number in args.models.split(",")]
    if args.smoke:
        models = models[:1]
        args.steps, args.host_steps, args.batch, args.tokens, args.rounds = 3, 3, 4, 4, 1
        args.tokens_on_disk = 3
    elif DEVICE == "cpu":
        raise SystemExit("this needs a GPU; --smoke runs tiny sizes on the CPU")
    elif args.routing is None and args.parts != ["trained"]:
        raise SystemExit("W2 needs --routing; --parts trained does without")
    elif args.shares is None and "trained" not in args.parts:
        raise SystemExit("without the part trained, --shares says how many experts are named right")
    table: list[dict[str, Any]] = []
    began = time.perf_counter()
    judged: dict[int, Judged] = {}
    if "trained" in args.parts:
        judged = {n_experts: run_trained(n_experts, args, table) for n_experts in models}
    if args.shares is not None:
        gates, learned = (float(share) for share in args.shares.split(","))
    else:
        gates, learned = (each[1].tokens for each in judged[models[-1]][:2])
    served = run_w2((gates, learned), args, table)
    for line in table:
        print(" | ".join(str(value) for value in line.values() if value is not None))
    print(f"{time.perf_counter() - began:.0f} s")
    if not args.smoke:
        save(judged, served, table, args)


if __name__ == "__main__":
    main()

"""Fine-tuning with frozen experts: LoRA on attention, with room on the GPU for some of the experts.

PYTHONPATH=src python3 bench/lora.py --shares 0.1,0.5
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from record import Limit, Metric, metric, write_record
from torch import Tensor, nn
from train import MATRIX, PCIE
from workload import SEQ, measure_steps, show

import overspill
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE

# Qwen3-30B-A3B, cut to 12 of 48 layers
W2 = GPTConfig(
    vocab=32_000,
    n_layers=12,
    d_model=2048,
    d_hidden=768,
    n_heads=32,
    n_experts=128,
    top_k=8,
    gated=True,
    tie_embeddings=False,
)


class Adapted(nn.Module):
    """A frozen linear layer plus a product of two small trained matrices."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        like = linear.weight
        self.down = nn.Parameter(torch.randn_like(like[:rank]) / like.shape[1] ** 0.5)
        self.up = nn.Parameter(like.new_zeros(like.shape[0], rank))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y + (x @ self.down.t()) @ self.up.t()


def add_adapters(model: GPTMoE, rank: int) -> list[nn.Parameter]:
    """Adapters on all linear layers of attention."""
    trained: list[nn.Parameter] = []
    for block in model.blocks:
        attention = block.attention
        for name, linear in list(attention.named_children()):
            adapted = Adapted(linear, rank)
            setattr(attention, name, adapted)
            trained += [adapted.down, adapted.up]
    return trained


def steps(model: GPTMoE, optimizer: torch.optim.Optimizer, batch: int) -> Iterator[Tensor]:
    device = model.embedding.weight.device
    generator = torch.Generator(device).manual_seed(0)
    while True:
        tokens = torch.randint(
            model.config.vocab, (batch, SEQ + 1), device=device, generator=generator
        )
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def limit(resident: float, tokens: int) -> float:
    """Tokens a second of the slower one of GPU and link, if all else were free: no weight gradients
    of frozen parameters; each expert that is not on the GPU is uploaded twice."""
    experts = W2.expert_params
    active = W2.total_params - experts + experts * W2.top_k // W2.n_experts
    return tokens / max(6 * active * tokens / MATRIX, 4 * experts * (1 - resident) / PCIE)


def label(share: float) -> str:
    return f"room_for_{100 * share:.0f}_percent"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shares", default="0.1,0.5", help="of the experts that the GPU holds")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 1024 tokens a step")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    shares = [float(text) for text in args.shares.split(",")]
    model = GPTMoE(W2, seed=0, meta_experts=True, device="cuda", dtype=torch.bfloat16)
    model.requires_grad_(False)
    overspill.offload(model, gpu_memory="12GiB", quiet=True)
    optimizer = torch.optim.AdamW(add_adapters(model, args.rank), lr=1e-4)
    engine, tokens = model.overspill, args.batch * SEQ
    record, total = engine.layout.weight_bytes, W2.n_layers * W2.n_experts
    run = steps(model, optimizer, args.batch)
    for _ in range(2):
        next(run)
    base = torch.cuda.max_memory_reserved() - engine.memory.share.experts * record
    metrics: dict[str, Metric] = {}
    for share in shares:
        engine.memory.limit(int((base + share * total * record) / 0.97))
        found = measure_steps(engine, run, tokens, args.warm, args.steps)
        experts = engine.memory.share.experts
        show(f"lora, {experts} of {total} experts on the GPU", found)
        metrics[label(share)] = metric(found.speed, "tokens/s")
        metrics[f"{label(share)}_experts"] = metric([experts], "experts")
        metrics[f"{label(share)}_gpu_memory"] = metric([found.gpu_bytes / 2**30], "GiB")
    few, many = metrics[label(shares[0])], metrics[label(shares[-1])]
    ratio = Metric(many.median / few.median, many.low / few.high, many.high / few.low, "×")
    ceiling = limit(shares[-1], tokens) / limit(shares[0], tokens)
    config = {
        "row": f"W2 shape, frozen experts, LoRA on attention, {args.batch}×{SEQ} tokens a step: "
        f"room for {shares[-1]:g} of the experts over room for {shares[0]:g}",
        "show": list(metrics),
        "rank": args.rank,
        "warm": args.warm,
        "steps": args.steps,
        "parameters": W2.total_params,
    }
    source = "the slower one of GPU and PCIe in both"
    write_record(
        "residency-lora",
        config,
        {"speedup": ratio, **metrics},
        Limit(ceiling, "×", source),
        args.out,
    )
    engine.close()


if __name__ == "__main__":
    main()

"""Adapters of experts (LoRA, through peft) beside those of attention, on a Qwen3-30B-A3B's shape.

PYTHONPATH=src python3 bench/lora_experts.py --out rec
PYTHONPATH=src python3 bench/lora_experts.py --tiny --device cpu
"""

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
from record import Limit, metric, write_record
from torch import Tensor
from train import MATRIX, PCIE
from transformers import Qwen3MoeConfig
from workload import SEQ, measure_steps, show

import overspill
from overspill.trace.spans import STEP

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def shape(tiny: bool) -> Qwen3MoeConfig:
    sizes = {
        "num_hidden_layers": 48, "hidden_size": 2048, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32, "head_dim": 128,
        "num_key_value_heads": 4, "vocab_size": 151_936, "max_position_embeddings": SEQ,
    }  # fmt: skip
    if tiny:
        sizes |= {
            "num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 32,
            "num_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 4, "head_dim": 16,
            "vocab_size": 512,
        }  # fmt: skip
    return Qwen3MoeConfig(**sizes, tie_word_embeddings=False)


def steps(model: Any, optimizer: overspill.AdamW, batch: int, device: str) -> Iterator[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    engine, vocab = model.get_base_model().overspill, model.config.vocab_size
    while True:
        tokens = torch.randint(vocab, (batch, SEQ), device=device, generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        engine.recorder.mark(STEP)
        optimizer.zero_grad()
        yield loss.detach()


def limit(model: Any, tokens: int, on_gpu: float) -> Limit:
    """The slower one of GPU and link: no weight gradients of frozen parameters, whose products are
    computed twice in forward; each expert that is not on the GPU is uploaded twice."""
    engine = model.overspill
    experts, top_k = engine.expert_parameters, model.config.num_experts_per_tok
    active = model.num_parameters() - experts + experts * top_k // engine.n_experts
    times = {
        "GPU, 6 operations per parameter and token": 6 * active * tokens / MATRIX,
        "PCIe, every expert uploaded twice": 4 * experts * (1 - on_gpu) / PCIE,
    }
    source, seconds = max(times.items(), key=lambda item: item[1])
    return Limit(tokens / seconds, "tokens/s", source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=16, help="of attention")
    parser.add_argument("--experts-rank", type=int, default=4, help="0: attention alone")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 1024 tokens a step")
    parser.add_argument("--gpu-memory", default="24GiB")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="another shape, to try the script")
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--timeline", type=Path, default=None, help="folder for a timeline")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    base: Any = overspill.from_config(
        shape(args.tiny), args.gpu_memory, dtype=torch.bfloat16, device=args.device, train=False
    )
    base.gradient_checkpointing_enable({"use_reentrant": False})
    rank = args.experts_rank
    config = peft.LoraConfig(
        r=args.rank,
        target_modules=ATTENTION,
        target_parameters=EXPERTS if rank else None,
        rank_pattern=dict.fromkeys(EXPERTS, rank) if rank else {},
    )
    with warnings.catch_warnings():  # that patterns match no module, but parameters
        warnings.simplefilter("ignore", RuntimeWarning)
        model: Any = peft.get_peft_model(base, config).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = overspill.AdamW(trained, lr=1e-4)
    name = "lora-experts-30b" if rank else "lora-attention-30b"
    run, tokens = steps(model, optimizer, args.batch, args.device), args.batch * SEQ
    timeline = None if args.timeline is None else args.timeline / name
    found = measure_steps(base.overspill, run, tokens, args.warm, args.steps, timeline)
    show(name, found)
    if not args.tiny:
        ranks = f"rank {rank} on experts, {args.rank}" if rank else f"rank {args.rank}"
        details = {
            "row": f"Qwen3-30B-A3B's shape, {ranks} on attention, {args.batch}×{SEQ} tokens a "
            f"step, {args.gpu_memory}",
            "show": ["gpu_memory", "host_memory", "experts_on_gpu"],
            "trained": sum(parameter.numel() for parameter in trained),
            "parameters": base.num_parameters(),
            "placement": base.overspill.describe(),
        }
        metrics = {
            "tokens_per_second": metric(found.speed, "tokens/s"),
            "gpu_memory": metric([found.gpu_bytes / 2**30], "GiB"),
            "host_memory": metric([found.host_bytes / 2**30], "GiB"),
            "experts_on_gpu": metric([100 * found.on_gpu], "%"),
        }
        write_record(name, details, metrics, limit(base, tokens, found.on_gpu), args.out)
    base.overspill.close()


if __name__ == "__main__":
    main()

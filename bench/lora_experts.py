"""Adapters of experts (LoRA, through peft) beside those of attention, on a Qwen3-30B-A3B's shape
with random weights.

PYTHONPATH=src python3 bench/lora_experts.py --out rec                   # lora-experts-30b
PYTHONPATH=src python3 bench/lora_experts.py --packing mxfp4 --out rec   # qlora-30b
PYTHONPATH=src python3 bench/lora_experts.py --smoke                     # tiny, on the CPU
"""

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
from packed_models import PLAIN, random_model
from record import Limit, metric, write_record
from torch import Tensor
from train import MATRIX, PCIE
from transformers import Qwen3MoeConfig
from workload import SEQ, measure_steps, show

import overspill
from overspill.models.loss import fused_linear_cross_entropy
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


def steps(
    model: Any, optimizer: overspill.AdamW, tokens: torch.Size, chunked: bool
) -> Iterator[Tensor]:
    """Endless steps on random tokens; yields losses. The loss is that of the model, or `chunked`
    from parts of the logits."""
    generator = torch.Generator(model.device).manual_seed(0)
    engine, vocab = model.get_base_model().overspill, model.config.vocab_size
    while True:
        ids = torch.randint(vocab, tokens, device=model.device, generator=generator)
        loss = _chunked_loss(model, ids) if chunked else model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        engine.recorder.mark(STEP)
        optimizer.zero_grad()
        yield loss.detach()


def _chunked_loss(model: Any, ids: Tensor) -> Tensor:
    plain = model.get_base_model()
    x = plain.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    return fused_linear_cross_entropy(x, plain.lm_head.weight, ids[:, 1:].flatten())


def limit(model: Any, tokens: int, on_gpu: float) -> Limit:
    """The slower one of GPU and link: no weight gradients of frozen parameters, whose products are
    computed twice in forward; each expert that is not on the GPU is uploaded twice."""
    engine = model.overspill
    experts, top_k = engine.expert_parameters, model.config.num_experts_per_tok
    active = model.num_parameters() - experts + experts * top_k // engine.n_experts
    times = {
        "GPU, 6 operations per parameter and token": 6 * active * tokens / MATRIX,
        "PCIe, every expert uploaded twice": 2 * engine.records.weights_bytes * (1 - on_gpu) / PCIE,
    }
    source, seconds = max(times.items(), key=lambda item: item[1])
    return Limit(tokens / seconds, "tokens/s", source)


def adapted(base: Any, rank: int, experts_rank: int) -> Any:
    """The model with adapters; without a rank for experts, of attention alone."""
    targets = EXPERTS if experts_rank else None
    config = peft.LoraConfig(
        r=rank,
        target_modules=ATTENTION,
        target_parameters=targets,
        rank_pattern=dict.fromkeys(targets or (), experts_rank),
    )
    with warnings.catch_warnings():  # that patterns match no module, but parameters
        warnings.simplefilter("ignore", RuntimeWarning)
        return peft.get_peft_model(base, config).train()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=16, help="of attention")
    parser.add_argument("--experts-rank", type=int, default=4, help="0: attention alone")
    parser.add_argument("--packing", default=PLAIN, help="bf16, mxfp4, int4 or fp8")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 1024 tokens a step")
    parser.add_argument("--gpu-memory", default=None, help="24GiB, or 12GiB for packed experts")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--warm", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--timeline", type=Path, default=None, help="folder for a timeline")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(arguments)
    packed, rank = args.packing != PLAIN, args.experts_rank
    gpu_memory = args.gpu_memory or ("12GiB" if packed else "24GiB")
    batch, seq, warm, count = args.batch, SEQ, args.warm, args.steps
    given: dict[str, Any] = {"gpu_memory": gpu_memory, "device": "cuda"}
    if args.smoke:
        batch, seq, warm, count = 2, 16, 1, 1
        given = {"device": "cpu", "mode": "host", "slots": 3}
    base = random_model(shape(args.smoke), args.packing, **given)
    base.gradient_checkpointing_enable({"use_reentrant": False})
    model = adapted(base, args.rank, rank)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = overspill.AdamW(trained, lr=1e-4)
    name = "qlora-30b" if packed else "lora-experts-30b" if rank else "lora-attention-30b"
    run: Iterator[Tensor] = steps(model, optimizer, torch.Size((batch, seq)), chunked=packed)
    timeline = None if args.timeline is None else args.timeline / name
    found = measure_steps(base.overspill, run, batch * seq, warm, count, timeline)
    show(name, found)
    ranks = f"rank {rank} on experts, {args.rank}" if rank else f"rank {args.rank}"
    kind = f", experts in {args.packing.upper()}, the loss in chunks" if packed else ""
    details = {
        "row": f"Qwen3-30B-A3B's shape{kind}, {ranks} on attention, {batch}×{seq} tokens a step, "
        f"{gpu_memory}",
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
    write_record(name, details, metrics, limit(base, batch * seq, found.on_gpu), args.out)
    base.overspill.close()


if __name__ == "__main__":
    main()

"""Fine-tunes a Mixture-of-Experts checkpoint in a plain PyTorch loop.

    python examples/make_tiny_checkpoint.py tiny
    python examples/plain_loop.py tiny --device cpu --lr 1e-2 --out tuned

For a model larger than the GPU, say what it may take:

    python examples/plain_loop.py allenai/OLMoE-1B-7B-0924 --data mine.jsonl \\
        --gpu-memory 12GiB --host-memory 64GiB --disk /nvme/spill --dtype bfloat16
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer

import overspill


def main() -> None:
    args = parse_arguments()
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    # The transformers model that the checkpoint holds, with its experts where the budgets allow.
    model = overspill.load(
        args.checkpoint,
        gpu_memory=args.gpu_memory,
        host_memory=args.host_memory,
        disk=args.disk,
        device=args.device,
        dtype=args.dtype,
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # A torch.optim.Optimizer for everything; the norm it clips by is over all parameters.
    optimizer = overspill.AdamW(model, lr=args.lr, weight_decay=0.01, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, args.steps)
    batches = endless_batches(args, tokenizer, model.device)

    for step in range(1, args.steps + 1):
        # Every micro-batch of a step but the last: gradients add up, nothing is updated yet.
        with optimizer.accumulate():
            for _ in range(args.accumulate - 1):
                (model(**next(batches)).loss / args.accumulate).backward()
        loss = model(**next(batches)).loss
        (loss / args.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        print(f"step {step}: loss {loss.item():.4f}, gradient norm {optimizer.total_norm:.3f}")

    # A plain checkpoint again: transformers loads it without Overspill.
    overspill.save(model, args.out)
    tokenizer.save_pretrained(args.out)
    print(f"saved to {args.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a checkpoint in a plain loop.")
    parser.add_argument("checkpoint", help="folder or repository of a checkpoint")
    parser.add_argument("--data", type=Path, help="JSONL with text (CHECKPOINT/text.jsonl)")
    parser.add_argument("--out", type=Path, default=Path("tuned"), help="folder to write")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--gpu-memory", help="such as 22GiB; left out: what the GPU has")
    parser.add_argument("--host-memory", help="such as 100GiB; left out: what is free")
    parser.add_argument("--disk", help="folder for experts that fit in neither")
    parser.add_argument("--device", help="cpu to train without a GPU")
    parser.add_argument("--dtype", help="bfloat16 or float32; left out: the checkpoint's")
    return parser.parse_args()


def endless_batches(
    args: argparse.Namespace, tokenizer: AutoTokenizer, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """All texts one after the other, again and again, cut into sequences of equal length."""
    file = args.data or Path(args.checkpoint) / "text.jsonl"
    texts = [json.loads(line)["text"] for line in file.read_text("utf-8").splitlines()]
    tokens = [t for text in texts for t in [*tokenizer(text).input_ids, tokenizer.eos_token_id]]
    size, start = args.batch * args.seq_len, 0
    tokens *= -(-size // len(tokens)) + 1  # at least a batch, wherever it begins
    while True:
        ids = torch.tensor(tokens[start : start + size], device=device).view(args.batch, -1)
        yield {"input_ids": ids, "labels": ids}
        start = (start + size) % (len(tokens) - size)


if __name__ == "__main__":
    main()

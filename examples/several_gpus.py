"""Trains on several GPUs: with a command, or in a loop of your own. With `--device cpu` as here,
two processes compute on the CPU; leave it out to use two GPUs.

    overspill train nano --gpus 2 --device cpu --steps 4 --out runs/two
    torchrun --nproc-per-node 2 -m overspill train nano --device cpu --steps 4 --out runs/same
    overspill train --resume --out runs/two --gpus 4 --steps 8

    python examples/make_tiny_checkpoint.py tiny
    overspill finetune tiny tiny/text.jsonl --gpus 2 --device cpu --steps 20 --out runs/tuned
    torchrun --nproc-per-node 2 examples/several_gpus.py tiny --device cpu --lr 1e-2 --out tuned

The ranks divide the experts of each layer. Each passes its own part of the batch to the model, and
the loss is the mean over ranks.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoTokenizer

import overspill


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl")
    mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("expert",))
    rank = mesh.get_local_rank()

    # Each rank reads its own experts. Budgets of host memory and disk are for all ranks together.
    model = overspill.load(
        args.checkpoint,
        gpu_memory=args.gpu_memory,
        host_memory=args.host_memory,
        disk=args.disk,
        dtype=args.dtype,
        mesh=mesh,
    )
    # Averages the dense gradients; the owner of an expert updates it.
    optimizer = overspill.AdamW(model, lr=args.lr, max_grad_norm=1.0)
    tokens = read_tokens(args.data or Path(args.checkpoint) / "text.jsonl", args.checkpoint)

    size = args.batch * args.seq_len
    for step in range(args.steps):
        # The batch of a step has args.batch sequences for each rank.
        start = (step * mesh.size() + rank) * size % (len(tokens) - size)
        ids = tokens[start : start + size].view(args.batch, args.seq_len).to(model.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1}: loss {mean.item() / mesh.size():.4f}")

    # On all ranks: each writes its experts. The result is a plain checkpoint.
    overspill.save(model, args.out)
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a checkpoint on several GPUs.")
    parser.add_argument("checkpoint", help="folder or repository of a checkpoint")
    parser.add_argument("--data", type=Path, help="JSONL with text (CHECKPOINT/text.jsonl)")
    parser.add_argument("--out", type=Path, default=Path("tuned"), help="folder to write")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2, help="sequences for each rank")
    parser.add_argument("--seq-len", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--gpu-memory", help="of each GPU, such as 22GiB; left out: all of it")
    parser.add_argument("--host-memory", help="such as 100GiB; left out: what is free")
    parser.add_argument("--disk", help="folder for experts that fit in neither")
    parser.add_argument("--device", default="cuda", help="cpu to train without GPUs")
    parser.add_argument("--dtype", help="bfloat16 or float32; left out: the checkpoint's")
    return parser.parse_args()


def read_tokens(file: Path, checkpoint: str) -> torch.Tensor:
    """All texts one after the other, at least four times."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = [json.loads(line)["text"] for line in file.read_text("utf-8").splitlines()]
    ids = [t for text in texts for t in [*tokenizer(text).input_ids, tokenizer.eos_token_id]]
    return torch.tensor(ids * 4)


if __name__ == "__main__":
    main()

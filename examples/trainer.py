"""Fine-tunes a Mixture-of-Experts checkpoint with transformers' Trainer.

    python examples/make_tiny_checkpoint.py tiny
    python examples/trainer.py tiny --device cpu --lr 1e-2 --out runs/trainer

Two lines differ from training without Overspill: how the model is loaded, and the argument
`optimizer_cls_and_kwargs`. Clipping, accumulation, schedulers, evaluation, checkpoints and resuming
are the Trainer's as ever.
"""

import argparse
import json
from pathlib import Path

from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import overspill


def main() -> None:
    args = parse_arguments()
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    # The transformers model that the checkpoint holds, with its experts where the budgets allow.
    model = overspill.load(
        args.checkpoint,
        gpu_memory=args.gpu_memory,
        host_memory=args.host_memory,
        disk=args.disk,
        device=args.device,
        dtype=args.dtype,
    )
    settings = TrainingArguments(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        weight_decay=0.01,
        gradient_checkpointing=True,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=args.save_every,
        save_steps=args.save_every,
        save_total_limit=2,
        report_to="none",
        use_cpu=args.device == "cpu",
    )
    examples = read_examples(args.data or Path(args.checkpoint) / "text.jsonl", tokenizer)
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=examples[:-1],
        eval_dataset=examples[-1:],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
        # Takes learning rate, betas, decay and clipping from the settings.
        optimizer_cls_and_kwargs=overspill.for_trainer(settings),
    )
    trainer.train(resume_from_checkpoint=args.resume)
    # A plain checkpoint again: transformers loads it without Overspill.
    trainer.save_model()
    print(f"saved to {args.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a checkpoint with the Trainer.")
    parser.add_argument("checkpoint", help="folder or repository of a checkpoint")
    parser.add_argument("--data", type=Path, help="JSONL with text (CHECKPOINT/text.jsonl)")
    parser.add_argument("--out", default="runs/trainer", help="folder to write")
    parser.add_argument("--resume", help="a checkpoint-N below --out to go on from")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--gpu-memory", help="such as 22GiB; left out: what the GPU has")
    parser.add_argument("--host-memory", help="such as 100GiB; left out: what is free")
    parser.add_argument("--disk", help="folder for experts that fit in neither")
    parser.add_argument("--device", help="cpu to train without a GPU")
    parser.add_argument("--dtype", help="bfloat16 or float32; left out: the checkpoint's")
    return parser.parse_args()


def read_examples(file: Path, tokenizer: AutoTokenizer) -> list[dict[str, list[int]]]:
    texts = [json.loads(line)["text"] for line in file.read_text("utf-8").splitlines()]
    return [{"input_ids": tokenizer(text).input_ids} for text in texts]


if __name__ == "__main__":
    main()

"""Child process of a peer benchmark: DeepSpeed's side, a Mixtral of transformers under ZeRO-3 with
parameters and optimizer offloaded to pinned host memory, or with everything on the GPU.

Run it with `-P`: the folder of this file holds a `deepspeed.py`, which would hide the package.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

import deepspeed
import torch
from hf_train import mixtral
from peers.measurement import MAX_NORM, Options, Work, child_options, measure
from transformers import MixtralForCausalLM
from transformers.integrations import HfDeepSpeedConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from workload import SEQ

from overspill.models.config import GPTConfig

LEARNING_RATE = 1e-4
LAYER = 205_000_000  # parameters of a layer of W1


def zero_config(mode: str) -> dict[str, Any]:
    """The DeepSpeed configuration."""
    common = {"train_micro_batch_size_per_gpu": 16, "bf16": {"enabled": True}}
    if mode == "gpu":
        # bf16 weights with fp32 master weights; with one rank, stage 1 partitions nothing.
        zero = {"stage": 1, "overlap_comm": True, "compute_grad_norm": False}
        return {**common, "gradient_clipping": 0.0, "zero_optimization": zero}
    pinned = {"device": "cpu", "pin_memory": True}
    zero = {
        "stage": 3,
        "offload_param": pinned,
        "offload_optimizer": pinned,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 2 * LAYER,
        "stage3_prefetch_bucket_size": LAYER,  # the next layer is on its way while one computes
        "stage3_max_live_parameters": 5 * LAYER,
        "stage3_max_reuse_distance": 5 * LAYER,
    }
    return {
        **common,
        "gradient_clipping": MAX_NORM,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},  # DeepSpeedCPUAdam
        "zero_optimization": zero,
    }


def build(config: GPTConfig, options: Options, settings: dict[str, Any]) -> Any:
    """A DeepSpeed engine around the model."""
    shape = mixtral(
        config.n_layers,
        hidden_size=config.d_model,
        intermediate_size=config.d_hidden,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_heads,
        num_local_experts=config.n_experts,
    )
    start = time.perf_counter()
    # While this object lives, transformers builds and initializes the model under zero.Init.
    _zero3 = HfDeepSpeedConfig(settings) if options.mode == "offload" else None
    # zero.Init chooses the device itself.
    place = contextlib.nullcontext() if options.mode == "offload" else torch.device(options.device)
    with place:
        model = MixtralForCausalLM._from_config(
            shape, dtype=torch.bfloat16, experts_implementation="grouped_mm"
        )
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = None
    if options.mode == "gpu":
        groups = parameter_groups(model.parameters())
        optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
    else:
        deepspeed.utils.set_z3_leaf_modules(model, [MixtralSparseMoeBlock])
    print(f"model in {time.perf_counter() - start:.1f} s", flush=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    release_pinned_cache()
    print(f"engine in {time.perf_counter() - start:.1f} s", flush=True)
    return engine


def parameter_groups(
    parameters: Iterable[torch.nn.Parameter], most: int = 5 * LAYER
) -> list[dict[str, Any]]:
    """Groups of about `most` elements. ZeRO flattens each group to one tensor; all parameters of W1
    in one are more than 2**31 elements, for which torch's fused kernel has not been checked."""
    groups: list[list[torch.nn.Parameter]] = [[]]
    size = 0
    for parameter in parameters:
        if groups[-1] and size + parameter.numel() > most:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.numel()
    return [{"params": group} for group in groups]


def release_pinned_cache() -> None:
    """Gives back the pinned memory that torch has cached: DeepSpeed has copied the parameters (10
    GB of W1) to another buffer, and there is little room for both beside the optimizer states."""
    release = getattr(torch.accelerator, "empty_host_cache", None)
    release = release or getattr(torch._C, "_host_emptyCache", None)
    if not torch.cuda.is_available():
        return
    if release is None:
        print("this torch cannot release cached pinned memory: 10 GB more are held", flush=True)
    else:
        release()


def steps(engine: Any, vocab: int, batch: int, device: str) -> Iterator[torch.Tensor]:
    """Endless training steps on random tokens; yields each step's loss."""
    generator = torch.Generator(device).manual_seed(0)
    while True:
        tokens = torch.randint(vocab, (batch, SEQ), device=device, generator=generator)
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        yield loss.detach()


def main() -> None:
    options = child_options()
    nccl = not options.tiny and torch.distributed.is_nccl_available()
    deepspeed.init_distributed(dist_backend="nccl" if nccl else "gloo")
    settings = zero_config(options.mode)
    engine = build(options.config, options, settings)
    for batch in options.batches:
        work = Work(options.mode, batch, clip=options.mode == "offload")
        run = steps(engine, options.config.vocab, batch, options.device)
        measure("deepspeed", work, run, options, deepspeed.__version__, settings)
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()

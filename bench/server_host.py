"""The server of benchmarks: a model with random weights and a tokenizer, in this process."""

import argparse
import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from serve import tiny_qwen, w2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import overspill
from overspill.server.run import Server, bind
from overspill.server.service import Service
from overspill.server.settings import ServerConfig

NAME = "bench"
CONTEXT = 4096


def add_flags(parser: argparse.ArgumentParser, dtype: str) -> None:
    parser.add_argument("--model", choices=["w2", "tiny"], help="default: w2 on a GPU")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default=dtype)
    parser.add_argument("--slots", type=int, help="GPU slots for experts; default: all on the GPU")
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--out", type=Path, default=None)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """One word for each token, so that texts are equal if the tokens are."""
    words = {f"▁w{number}": number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, "▁w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.save_pretrained(folder)


@contextmanager
def open_llm(args: argparse.Namespace) -> Iterator[overspill.LLM]:
    on_gpu = torch.cuda.is_available()
    tiny = (args.model or ("w2" if on_gpu else "tiny")) == "tiny"
    more = {"norm_topk_prob": True, "initializer_range": 0.2}
    config = tiny_qwen(CONTEXT, **more) if tiny else w2()
    settings = overspill.Settings(residency=False)
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), config.vocab_size)
        model = overspill.from_config(
            config, dtype=getattr(torch, args.dtype), train=False, quiet=True, settings=settings
        )
        model.config.name_or_path = folder  # the tokenizer is found there
        # no end of the text: every answer has as many tokens as are asked for
        model.generation_config.eos_token_id = None
        engine = model.overspill
        try:
            if on_gpu:
                residents = engine.n_experts if args.slots is None else 0
                engine.set_residents([residents] * engine.n_layers)
            slots = args.slots or 0
            with overspill.LLM(
                model, context=CONTEXT, max_batch=args.max_batch, slots=slots
            ) as llm:
                yield llm
        finally:
            engine.close()


def warm_up(llm: overspill.LLM, max_batch: int) -> None:
    """Compiles kernels, and captures the graphs of all sizes of batches: powers of two."""
    params, size = overspill.SamplingParams(max_tokens=8), 1
    while size <= max_batch:
        llm.generate([[request + 1] * 8 for request in range(size)], params)
        size *= 2


@contextmanager
def serving(llm: overspill.LLM, max_batch: int) -> Iterator[tuple[str, int]]:
    """The address of a server with the limits of `overspill serve`, which runs in a thread."""
    config = ServerConfig.make({"port": 0, "served_name": NAME, "max_batch": max_batch})
    started = threading.Event()
    with bind(config) as bound:
        service = Service(llm, NAME, config)
        server = Server(service, started.set)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
        thread.start()
        if not started.wait(60):
            raise RuntimeError("the server did not start within a minute")
        try:
            yield bound.getsockname()[:2]
        finally:
            server.should_exit = True
            thread.join()
            service.close()


def describe(llm: overspill.LLM, args: argparse.Namespace) -> str:
    """The model, for the row of a record."""
    config = llm.model.config
    shape = "W2" if config.vocab_size == w2().vocab_size else "a tiny model"
    where = "CPU" if llm.device.type == "cpu" else "all experts on the GPU"
    if llm.device.type != "cpu" and args.slots is not None:
        where = f"{args.slots} GPU slots for experts"
    return f"{shape}, {args.dtype}, {where}"

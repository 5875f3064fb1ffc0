"""Weights of dense parameters in host memory: the same results as on the device."""

import copy
import dataclasses
import gc
import io
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as run_checkpointed

import overspill
from overspill.core.errors import OrderError
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.moe.dense_weights import DenseBlock, buffer_bytes, dense_blocks
from overspill.moe.settings import Settings
from overspill.tiers.layout import ALIGN
from overspill.train import checkpoint
from tests.interrupts import calls_of, interrupted, spread
from tests.moe.oracle import (
    Run,
    Task,
    adamw,
    assert_follows,
    assert_same_bits,
    delays,
    loss_of,
    plain_run,
    spilled,
    threads_left,
    train,
    train_step,
    weights_of,
)
from tests.pairs import all_pairs
from tests.slow import slow_rows

WHERE = "host with 5 slots"
TASK = Task(steps=2, checkpoint=True)
DEEP = dataclasses.replace(TASK, n_layers=3, steps=3)
"""The device holds two blocks: when the third is copied, the first one has left."""


@dataclasses.dataclass(frozen=True)
class UntiedTask(Task):
    @property
    def config(self) -> GPTConfig:
        return dataclasses.replace(super().config, tie_embeddings=False)


def run_with(
    dense_weights: str, task: Task, where: str, disk: Path, settings: Settings | None = None
) -> Run:
    model = task.model()
    with spilled(model, where, disk, settings, dense_weights=dense_weights):
        return train(model, adamw(model, task), task)


@contextmanager
def on_host(model: GPTMoE, disk: Path, **options: Any) -> Iterator[Any]:
    with spilled(model, WHERE, disk, dense_weights="host", **options) as engine:
        yield engine


def dense(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.numel() > 0]


# -- results ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "dtype", "clip", "micro_batches", "recompute", "kind"),
    slow_rows(
        all_pairs(
            ["gpu", "disk, 5 resident"],
            [torch.float32, torch.bfloat16],
            [None, 0.5],
            [1, 2],
            [False, True],
            [Task, UntiedTask],
        ),
        0,
        3,
    ),
)
def test_no_bit_depends_on_where_dense_weights_are(
    where: str,
    dtype: torch.dtype,
    clip: float | None,
    micro_batches: int,
    recompute: bool,
    kind: type[Task],
    tmp_path: Path,
) -> None:
    task = kind(
        n_layers=2,
        steps=2,
        dtype=dtype,
        clip=clip,
        micro_batches=micro_batches,
        checkpoint=recompute,
    )
    runs = [run_with(at, task, where, tmp_path) for at in ("gpu", "host")]
    assert_same_bits(*runs)
    assert runs[0].norms == runs[1].norms


def test_training_follows_plain_training_if_copies_are_late(tmp_path: Path) -> None:
    task = Task(n_layers=3, checkpoint=True, moe_every=2, clip=0.5)
    run = run_with("host", task, WHERE, tmp_path, Settings(inject=delays(3, only="upload")))
    assert_follows(run, plain_run(task))


@pytest.mark.parametrize("pieces", [1, 3])
def test_gradients_are_those_of_the_plain_model(pieces: int, tmp_path: Path) -> None:
    """With pieces, attention is recomputed within the backward of its block."""
    tokens = next(TASK.batches())[0]
    plain, model = TASK.model(), TASK.model()
    plain(tokens[:, :-1], tokens[:, 1:], pieces).loss.backward()
    with on_host(model, tmp_path):
        optimizer = adamw(model, TASK)
        model(tokens[:, :-1], tokens[:, 1:], pieces).loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.numel():
                torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
        optimizer.step()


@pytest.mark.parametrize("set_to_none", slow_rows([False, True], 1))
def test_gradients_can_be_set_to_zero_or_none(set_to_none: bool, tmp_path: Path) -> None:
    task = dataclasses.replace(TASK, steps=3)  # the third loss shows the second gradient

    def losses(dense_weights: str) -> list[float]:
        model, found = TASK.model(), []
        with spilled(model, WHERE, tmp_path, dense_weights=dense_weights):
            optimizer = adamw(model, task)
            for (tokens,) in task.batches():
                loss = loss_of(model, tokens)
                loss.backward()
                found.append(loss.item())
                optimizer.step()
                optimizer.zero_grad(set_to_none)
        return found

    assert losses("host") == losses("gpu")


def test_a_gradient_that_the_user_keeps_does_not_change(tmp_path: Path) -> None:
    model = TASK.model()
    with on_host(model, tmp_path):
        optimizer = adamw(model, TASK)
        batches = [tokens for (tokens,) in TASK.batches()]
        loss_of(model, batches[0]).backward()
        kept = model.norm.weight.grad
        expected = kept.clone()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, batches[1]).backward()
        assert torch.equal(kept, expected)
        assert not torch.equal(kept, model.norm.weight.grad)


def test_gradients_of_parameters_that_are_unfrozen_later_are_in_host_memory(
    tmp_path: Path,
) -> None:
    model = TASK.model()
    for parameter in (p for p in model.parameters() if p.dim() < 3):  # all but experts
        parameter.requires_grad_(False)
    with on_host(model, tmp_path) as engine:
        model.requires_grad_(True)
        optimizer = adamw(model, TASK)
        before = engine.bytes_by_tier()["host"]
        (tokens,) = next(TASK.batches())
        loss_of(model, tokens).backward()
        size = sum(p.grad.nbytes for p in dense(model) if p.grad is not None)
        assert engine.bytes_by_tier()["host"] - before >= size > 0
        optimizer.step()


def test_frozen_parameters_have_no_gradients_and_keep_their_values(tmp_path: Path) -> None:
    model = TASK.model()
    model.blocks[1].attention.requires_grad_(False)
    before = weights_of(model)
    with on_host(model, tmp_path):
        run = train(model, adamw(model, TASK), TASK)
        assert all(p.grad is None for p in model.blocks[1].attention.parameters())
    for name in ("qkv", "out"):
        assert torch.equal(*(w[f"blocks.1.attention.{name}.weight"] for w in (run.weights, before)))
    assert not torch.equal(run.weights["norm.weight"], before["norm.weight"])


def test_other_optimizers_and_clip_grad_norm_work(tmp_path: Path) -> None:
    def run(dense_weights: str) -> dict[str, Tensor]:
        model = TASK.model()
        for moe in model.moe_layers():
            moe.w_in.requires_grad_(False)
            moe.w_out.requires_grad_(False)
        with spilled(model, WHERE, tmp_path, dense_weights=dense_weights):
            optimizer = torch.optim.SGD(dense(model), lr=0.1, momentum=0.9)
            for (tokens,) in TASK.batches():
                loss_of(model, tokens).backward()
                nn.utils.clip_grad_norm_(dense(model), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            return weights_of(model)

    assert_same_bits(Run(weights=run("host")), Run(weights=run("gpu")))


def test_generation_gives_the_tokens_of_the_plain_model(tmp_path: Path) -> None:
    model = TASK.model().eval()
    tokens = torch.randint(48, (2, 5))
    expected = model.generate(tokens, 6, temperature=0)
    with on_host(model, tmp_path), torch.inference_mode():
        assert torch.equal(model.generate(tokens, 6, temperature=0), expected)
        assert not any(p.is_inference() for p in dense(model))


def test_a_model_that_has_inferred_can_be_trained(tmp_path: Path) -> None:
    model = TASK.model()
    with on_host(model, tmp_path):
        with torch.inference_mode():
            model.generate(torch.randint(48, (2, 5)), 2)
        run = train(model, adamw(model, TASK), TASK)
    assert_same_bits(run, run_with("gpu", TASK, WHERE, tmp_path))


def test_a_model_within_a_checkpoint_of_the_user_trains(tmp_path: Path) -> None:
    tokens = next(TASK.batches())[0]
    found = []
    for reentrant in (None, False, True):
        model = dataclasses.replace(TASK, checkpoint=False).model()
        # reentrant checkpoints need an input with a gradient
        scale = torch.ones((), requires_grad=True)

        def run(scale: Tensor, model: GPTMoE = model) -> Tensor:
            return loss_of(model, tokens) * scale

        with on_host(model, tmp_path):
            optimizer = adamw(model, TASK)
            if reentrant is None:
                run(scale).backward()
            else:
                run_checkpointed(run, scale, use_reentrant=reentrant).backward()
            found.append([p.grad.clone() for p in dense(model)])
            optimizer.step()
    for grads in found[1:]:
        assert all(map(torch.equal, grads, found[0]))


# -- where they are ---------------------------------------------------------------------------


def copies_of(model: GPTMoE) -> tuple[list[bool], Callable[[], object]]:
    """Notes for each call of a Linear layer whether its weight is a copy."""
    addresses = {p.data_ptr() for p in dense(model)}
    noted: list[bool] = []
    handles = [
        module.register_forward_hook(
            lambda module, *_: noted.append(module.weight.data_ptr() not in addresses)
        )
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    return noted, lambda: [handle.remove() for handle in handles]


def test_a_pass_computes_with_copies_and_leaves_none(tmp_path: Path) -> None:
    model = TASK.model()
    with on_host(model, tmp_path):
        addresses = [p.data_ptr() for p in dense(model)]
        noted, _ = copies_of(model)
        optimizer = adamw(model, TASK)
        loss = loss_of(model, next(TASK.batches())[0])
        assert [p.data_ptr() for p in dense(model)] == addresses
        assert len(noted) == 2 * TASK.n_layers
        loss.backward()
        assert [p.data_ptr() for p in dense(model)] == addresses
        assert len(noted) > 3 * TASK.n_layers, "attention was recomputed"
        assert all(noted)
        optimizer.step()
        assert [p.data_ptr() for p in dense(model)] == addresses


def test_the_next_block_is_copied_while_one_computes(tmp_path: Path) -> None:
    model = DEEP.model()
    order: list[str] = []
    settings = Settings(inject=lambda kind: order.append(kind))
    with spilled(model, "gpu", tmp_path, settings, dense_weights="host"):
        for number, block in enumerate(model.blocks):
            block.register_forward_pre_hook(lambda *_, n=number: order.append(str(n)))
        tokens = next(DEEP.batches())[0]
        with torch.no_grad():
            loss_of(model, tokens)
            order.clear()
            loss_of(model, tokens)
    # two copies when the first block computes, one more with each of the others
    assert order == ["0", "upload", "upload", "1", "upload", "2", "upload"]


def test_a_module_on_its_own_computes_with_host_memory(tmp_path: Path) -> None:
    model = TASK.model()
    x = torch.randn(3, 4, 16)
    expected = model.blocks[0].attention.qkv(x)
    with on_host(model, tmp_path):
        noted, remove = copies_of(model)
        got = model.blocks[0].attention.qkv(x)
        remove()
        assert noted == [False]
        assert torch.equal(got, expected)
        got.sum().backward()
        assert model.blocks[0].attention.qkv.weight.grad is not None


def test_weights_that_the_user_changes_are_used(tmp_path: Path) -> None:
    tokens = next(TASK.batches())[0]
    plain, model = TASK.model(), TASK.model()
    with on_host(model, tmp_path), torch.no_grad():
        loss_of(model, tokens)
        for one in (plain, model):
            one.norm.weight.mul_(2)
            one.blocks[0].attention.qkv.weight.data.mul_(3)
            one.blocks[1].attention.out.weight.data = torch.full((16, 16), 0.1)
        torch.testing.assert_close(loss_of(model, tokens), loss_of(plain, tokens))


def test_a_module_may_change_its_weights(tmp_path: Path) -> None:
    tokens = next(TASK.batches())[0]
    plain, model = TASK.model(), TASK.model()

    def double(module: Any, *_: object) -> None:
        with torch.no_grad():
            module.weight.mul_(2)

    with on_host(model, tmp_path), torch.no_grad():
        for one in (plain, model):
            one.blocks[1].attention.qkv.register_forward_hook(double)
        for _ in range(3):
            torch.testing.assert_close(loss_of(model, tokens), loss_of(plain, tokens))
        changed = [one.blocks[1].attention.qkv.weight for one in (plain, model)]
        assert torch.equal(*changed)


def test_blocks_are_layers_head_and_embeddings() -> None:
    def names(task: Task) -> dict[str, set[str]]:
        model = task.model()
        experts = {id(p) for moe in model.moe_layers() for p in moe.expert_parameters()}
        found = {id(p): name for name, p in model.named_parameters()}
        return {
            block.name: {found[id(p)] for p in block.parameters}
            for block in dense_blocks(model, experts)
        }

    tied, untied = names(DEEP), names(UntiedTask(moe_every=2))
    assert list(tied) == ["the head", "blocks.0", "blocks.1", "blocks.2"]
    assert tied["the head"] == {"norm.weight", "embedding.weight"}
    assert untied["embeddings"] == {"embedding.weight"}
    assert untied["the head"] == {"norm.weight", "head.weight"}
    assert "blocks.0.dense.w_in.weight" in untied["blocks.0"]


def test_the_device_holds_two_blocks_and_gradients() -> None:
    def block(*sizes: int, copied: bool = True) -> DenseBlock:
        modules = [nn.Identity()] if copied else []
        return DenseBlock("", modules, [nn.Parameter(torch.empty(size)) for size in sizes])

    blocks = [block(100, 50), block(30), block(120, copied=False)]
    assert buffer_bytes(blocks, training=False) == 2 * 600
    assert buffer_bytes(blocks, training=True) == 2 * 600 + 2 * 480


def test_dense_weights_are_counted_and_described(tmp_path: Path) -> None:
    model = TASK.model()
    with spilled(model, WHERE, tmp_path) as engine:
        train_step(model, adamw(model, TASK), next(TASK.batches()))
        before = engine.bytes_by_tier()["host"]
    model = TASK.model()
    with on_host(model, tmp_path) as engine:
        planned = sum(8 * p.numel() for p in dense(model))
        placement = engine.placement
        assert (placement.dense_weights, placement.dense_states) == (planned, planned)
        size = f"({planned / 1024:.1f} KiB)"
        assert f"; dense weights and gradients in host memory {size}" in engine.describe()
        optimizer = adamw(model, TASK)
        train_step(model, optimizer, next(TASK.batches()))
        used = engine.bytes_by_tier()["host"] - before
        assert 2 * planned <= used <= 2 * planned + 4 * len(dense(model)) * ALIGN


def test_later_steps_allocate_no_host_memory(tmp_path: Path) -> None:
    model = TASK.model()
    with on_host(model, tmp_path) as engine:
        optimizer = adamw(model, TASK)
        used = []
        for batches in dataclasses.replace(TASK, steps=3).batches():
            train_step(model, optimizer, batches)
            used.append(engine.bytes_by_tier()["host"])
    assert used == used[:1] * 3


# -- checkpoints ------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), slow_rows([("host", "gpu"), ("gpu", "host")], 1))
def test_a_run_continues_wherever_its_dense_weights_were(
    before: str, after: str, tmp_path: Path
) -> None:
    """From state dicts, and from a checkpoint."""
    whole = run_with("gpu", TASK, WHERE, tmp_path)
    model = TASK.model()
    with spilled(model, WHERE, tmp_path, dense_weights=before) as engine:
        optimizer = adamw(model, TASK)
        train_step(model, optimizer, next(TASK.batches()))
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        state = checkpoint.TrainState(1, 1, "", {})
        folder = checkpoint.save(tmp_path / "saved", state, model, engine, optimizer, 1)
    for kind in ("state dicts", "a checkpoint"):
        model = TASK.model()
        with spilled(model, WHERE, tmp_path, dense_weights=after) as engine:
            optimizer = adamw(model, TASK)
            if kind == "state dicts":
                file.seek(0)
                weights, states = torch.load(file, weights_only=False)
                model.load_state_dict(weights)
                optimizer.load_state_dict(states)
            else:
                checkpoint.load(folder, model, engine, optimizer)
            rest = train(model, optimizer, TASK, first=1)
        assert_same_bits(Run(whole.losses[:1] + rest.losses, [], rest.weights), whole)


def test_checkpoints_are_byte_identical(tmp_path: Path) -> None:
    files = []
    for at in ("gpu", "host"):
        model = TASK.model()
        with spilled(model, WHERE, tmp_path, dense_weights=at) as engine:
            optimizer = adamw(model, TASK)
            train_step(model, optimizer, next(TASK.batches()))
            state = checkpoint.TrainState(1, 1, "", {})
            folder = checkpoint.save(tmp_path / at, state, model, engine, optimizer, 1)
        files.append({p.name: p.read_bytes() for p in folder.iterdir() if "json" not in p.suffix})
    assert files[0]
    assert files[0] == files[1]


# -- failures and lifetime --------------------------------------------------------------------


@pytest.mark.parametrize("at", slow_rows([1, 3, 9, 13], 0, 2))
def test_a_copy_that_fails_raises_and_the_model_goes_on(at: int, tmp_path: Path) -> None:
    """In a forward, and in a backward."""
    left = 0

    def fail(kind: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError("the copy failed")

    model = DEEP.model()
    with spilled(model, "gpu", tmp_path, Settings(inject=fail), dense_weights="host"):
        addresses = [p.data_ptr() for p in dense(model)]
        optimizer = adamw(model, DEEP)
        train_step(model, optimizer, next(DEEP.batches()))
        left = at
        with pytest.raises(OSError, match="the copy failed"):
            train(model, optimizer, DEEP, first=1)
        gc.collect()
        assert [p.data_ptr() for p in dense(model)] == addresses
        optimizer.zero_grad()
        noted, _ = copies_of(model)
        train_step(model, optimizer, next(DEEP.batches(1)))
        assert noted
        assert all(noted)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("clip", slow_rows([None, 0.5], 0))
def test_after_an_interrupt_anywhere_in_a_step_training_goes_on(
    clip: float | None, tmp_path: Path
) -> None:
    task = Task(n_layers=2, steps=2, clip=clip, checkpoint=True)
    model = task.model()
    first, second = task.batches()
    with on_host(model, tmp_path) as engine:
        optimizer = adamw(model, task)
        train_step(model, optimizer, first)
        addresses = [p.data_ptr() for p in dense(model)]
        weights, states = weights_of(model), copy.deepcopy(optimizer.state_dict())

        def step() -> None:
            train_step(model, optimizer, second)

        def restore() -> None:
            optimizer.load_state_dict(states)
            model.load_state_dict(weights)
            optimizer.zero_grad()

        restore()
        calls = calls_of(step)
        after = weights_of(model)
        restore()
        for at in spread(calls, 5):
            interrupted(step, at)
            restore()
            step()
            assert [p.data_ptr() for p in dense(model)] == addresses
            for name, weight in weights_of(model).items():
                torch.testing.assert_close(weight, after[name], rtol=1e-4, atol=1e-6)
            restore()
        engine.check_conserved()


def test_threads_that_infer_at_once_get_the_logits_of_each_alone(tmp_path: Path) -> None:
    model = TASK.model().eval()
    batches = [torch.randint(48, (2, 9)) for _ in range(3)]
    with torch.no_grad():
        expected = [model(tokens).logits for tokens in batches]
    settings = Settings(inject=delays(seed=1, longest=1e-3))
    found: dict[int, list[Tensor]] = {}
    with on_host(model, tmp_path, settings=settings):
        addresses = [p.data_ptr() for p in dense(model)]

        def infer(number: int) -> None:
            with torch.no_grad():
                found[number] = [model(batches[number]).logits for _ in range(5)]

        threads = [threading.Thread(target=infer, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [p.data_ptr() for p in dense(model)] == addresses
    for number, alone in enumerate(expected):
        assert len(found[number]) == 5
        for logits in found[number]:
            torch.testing.assert_close(logits, alone)


def test_after_close_the_weights_are_still_there(tmp_path: Path) -> None:
    model = TASK.model()
    before = weights_of(model)
    with on_host(model, tmp_path):
        pass
    for name, parameter in model.named_parameters():
        if parameter.numel():
            assert torch.equal(parameter, before[name])
    with pytest.raises(OrderError, match="the engine is closed"):
        model(torch.randint(48, (2, 5)))
    memory = model.norm.weight.clone()
    del before
    assert torch.equal(model.norm.weight, memory)


def test_a_module_without_experts_can_be_copied_and_pickled(tmp_path: Path) -> None:
    model = TASK.model()
    with on_host(model, tmp_path):
        file = io.BytesIO()
        torch.save(model.blocks[0].attention, file)
        file.seek(0)
        for twin in (copy.deepcopy(model.norm), copy.deepcopy(model.blocks[0].attention.qkv)):
            x = torch.randn(2, 16)
            before = twin(x)
            twin(x).sum().backward()
            assert torch.equal(twin(x), before)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(loaded.qkv.weight, model.blocks[0].attention.qkv.weight)
        with pytest.raises(OrderError, match=r"cannot be pickled.*overspill\.save"):
            torch.save(model, io.BytesIO())
        with pytest.raises(OrderError, match="cannot be copied"):
            copy.deepcopy(model)


def test_a_model_is_freed_without_the_garbage_collector(tmp_path: Path) -> None:
    model = TASK.model()
    overspill.offload(
        model, device="cpu", mode="host", slots=2, dense_weights="host", quiet=True,
        settings=Settings(threads=1),
    )  # fmt: skip
    optimizer = adamw(model, TASK)
    train_step(model, optimizer, next(TASK.batches()))
    gone = weakref.ref(model.norm)
    gc.collect()
    gc.disable()
    try:
        del model, optimizer
        assert gone() is None
    finally:
        gc.enable()
    gc.collect()
    assert not threads_left()


def test_an_offload_that_fails_leaves_the_weights_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TASK.model()
    twin = copy.deepcopy(model)
    before = [p.data_ptr() for p in model.parameters()]

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(GPTMoE, "to", fail)
        with pytest.raises(RuntimeError, match="no"), on_host(model, tmp_path):
            pass
    assert [p.data_ptr() for p in model.parameters()] == before
    assert "forward" not in vars(model)
    tokens = next(TASK.batches())[0]
    loss_of(model, tokens).backward()
    loss_of(twin, tokens).backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)

"""Pre-gates of a GPT-MoE against a naive implementation, and in all orders of passes."""

import copy
import functools
import gc
import threading
import weakref
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.core.errors import ConfigError, OrderError
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.models.pregate import pregate_level
from tests.moe.oracle import (
    ONE_OF_EACH,
    Task,
    adamw,
    loss_of,
    spilled,
    train_step,
    weights_of,
)
from tests.moe.pregated import naive_loss
from tests.slow import slow_rows

TASK = Task(n_layers=4, steps=2)
ADAM: dict[str, Any] = {"lr": TASK.lr, "weight_decay": TASK.weight_decay, "eps": 1e-4}


def tokens_of(step: int = 0) -> Tensor:
    return list(TASK.batches())[step][0]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@functools.cache
def naive_run(level: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of two steps, the first gradients and the last weights."""
    model = TASK.model()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses, first = [], {}
    for (tokens,) in TASK.batches():
        loss = naive_loss(model, tokens, level)
        loss.backward()
        first = first or gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first, weights_of(model)


def assert_close(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() <= theirs.keys()
    for name, value in mine.items():
        scale = float(theirs[name].abs().max())
        torch.testing.assert_close(
            value, theirs[name], rtol=1e-5, atol=1e-5 * scale + 1e-7, msg=name
        )


@pytest.mark.parametrize(
    ("recompute", "level"), slow_rows(product([False, True], [1, 2, 3]), 0, 2, 3, 4)
)
def test_training_follows_the_naive_model(level: int, recompute: bool) -> None:
    losses, first, last = naive_run(level)
    model = TASK.model()
    model.checkpoint = recompute
    assert overspill.pregate(model, level) is model
    assert pregate_level(model) == level
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step, (tokens,) in enumerate(TASK.batches()):
        loss = loss_of(model, tokens)
        assert loss.item() == pytest.approx(losses[step], rel=1e-5)
        loss.backward()
        if step == 0:
            assert first.keys() == gradients(model).keys()
            assert_close(gradients(model), first)
        optimizer.step()
        optimizer.zero_grad()
    assert_close(weights_of(model), last)


@pytest.mark.parametrize(
    ("level", "where"),
    slow_rows(
        [*zip([1, 2, 3], ONE_OF_EACH, strict=True), *zip([3, 1, 2], ONE_OF_EACH, strict=True)],
        3,
        4,
        5,
    ),
)
def test_offloaded_training_follows_the_naive_model(level: int, where: str, tmp_path: Path) -> None:
    losses, first, last = naive_run(level)
    model = TASK.model()
    model.checkpoint = level != 2
    if level == 3:
        overspill.pregate(model, level)
    with spilled(model, where, tmp_path, dense_weights="host" if level == 1 else "auto"):
        if level != 3:
            overspill.pregate(model, level)
        optimizer = adamw(model, TASK, eps=1e-4)
        for step, (tokens,) in enumerate(TASK.batches()):
            loss = loss_of(model, tokens)
            assert loss.item() == pytest.approx(losses[step], rel=1e-5)
            loss.backward()
            if step == 0:
                dense = {n: g for n, g in gradients(model).items() if not n.endswith("experts")}
                assert len(dense) == len(first) - 2 * TASK.n_layers
                assert_close(dense, first)
            optimizer.step()
            optimizer.zero_grad()
        assert_close(weights_of(model), last)


def test_dense_layers_between_are_not_counted() -> None:
    model = Task(n_layers=6, moe_every=2).model()
    expected = naive_loss(model, tokens_of(), 1)
    assert loss_of(overspill.pregate(model), tokens_of()).item() == pytest.approx(
        expected.item(), rel=1e-5
    )


def test_grouped_micro_batches_have_the_gradients_of_accumulated_ones() -> None:
    model = overspill.pregate(TASK.model())
    model.checkpoint = True
    grouped = copy.deepcopy(model)
    tokens = tokens_of()
    for row in tokens:
        (loss_of(model, row[None]) / len(tokens)).backward()
    grouped(tokens[:, :-1], tokens[:, 1:], pieces=len(tokens)).loss.backward()
    assert_close(gradients(grouped), gradients(model))


# -- orders of passes ----------------------------------------------------------------------------


def test_two_forwards_before_two_backwards() -> None:
    model = overspill.pregate(TASK.model(), 2)
    model.checkpoint = True
    apart = copy.deepcopy(model)
    for step in (0, 1):
        loss_of(apart, tokens_of(step)).backward()
    first, second = (loss_of(model, tokens_of(step)) for step in (0, 1))
    first.backward()
    second.backward()
    assert_close(gradients(model), gradients(apart))


def test_blocks_may_be_recomputed_in_any_order() -> None:
    """autograd.grad() for the weights of one block recomputes the blocks above it only."""
    model = overspill.pregate(TASK.model())
    loss_of(model, tokens_of()).backward()
    expected = gradients(model)
    model.checkpoint = True
    names = ["blocks.2.attention.out.weight", "blocks.3.moe.router.weight", "embedding.weight"]
    loss = loss_of(model, tokens_of())
    found = dict(model.named_parameters())
    for name in names:
        (got,) = torch.autograd.grad(loss, [found[name]], retain_graph=True)
        assert_close({name: got}, expected)


@pytest.mark.parametrize("part", ["layer", "block"])
def test_a_user_may_checkpoint_layers_or_their_moe_block(part: str) -> None:
    model = overspill.pregate(TASK.model())
    loss_of(model, tokens_of()).backward()
    expected = gradients(model)
    model.zero_grad()
    for block in model.blocks:
        module = block if part == "layer" else block.moe
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    loss_of(model, tokens_of()).backward()
    assert_close(gradients(model), expected)


def test_a_checkpoint_of_the_whole_model_is_another_forward() -> None:
    model = overspill.pregate(TASK.model())
    loss_of(model, tokens_of()).backward()
    expected = gradients(model)
    for reentrant in (False, True):
        model.zero_grad()
        x = tokens_of()[:, :-1], tokens_of()[:, 1:]
        weight = model.embedding.weight  # a reentrant checkpoint needs an input with a gradient
        run = functools.partial(lambda _, *x: model(*x).loss)
        checkpoint(run, weight * 1, *x, use_reentrant=reentrant).backward()
        assert_close(gradients(model), expected)


def test_a_reentrant_checkpoint_is_refused() -> None:
    model = overspill.pregate(TASK.model())
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=True)
    with pytest.raises(OrderError, match="use_reentrant=False"):
        loss_of(model, tokens_of())


def test_a_checkpoint_whose_input_is_another_tensor_is_refused() -> None:
    model = overspill.pregate(TASK.model())
    model.checkpoint = True
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(model, tokens_of())
    with pytest.raises(OrderError, match="save_on_cpu"):
        loss.backward()


def test_a_failed_forward_leaves_nothing_behind() -> None:
    model = overspill.pregate(TASK.model())
    expected = loss_of(model, tokens_of()).item()

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    handle = model.blocks[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="injected"):
        loss_of(model, tokens_of())
    handle.remove()
    with pytest.raises(OrderError, match="outside the forward"):
        model.blocks[2].moe(torch.zeros(1, 2, 16))
    assert loss_of(model, tokens_of()).item() == expected


def test_a_block_alone_is_refused() -> None:
    model = overspill.pregate(TASK.model(), 2)
    for number in range(4):
        with pytest.raises(OrderError, match=rf"blocks.{number}.moe .*call the model"):
            model.blocks[number].moe(torch.zeros(1, 2, 16))


def test_a_block_that_is_left_out_is_refused() -> None:
    model = overspill.pregate(TASK.model())
    del model.blocks[1]
    with pytest.raises(OrderError, match=r"blocks.2.moe .* cannot be left out"):
        loss_of(model, tokens_of())


def test_threads_have_their_own_passes() -> None:
    model = overspill.pregate(TASK.model())
    model.checkpoint = True
    expected = [loss_of(model, tokens_of(step)).item() for step in (0, 1)]
    found: dict[tuple[int, int], float] = {}

    def run(step: int) -> None:
        for turn in range(4):
            loss = loss_of(model, tokens_of(step))
            torch.autograd.grad(loss, [model.embedding.weight])
            found[step, turn] = loss.item()

    threads = [threading.Thread(target=run, args=(step,)) for step in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {(step, turn): expected[step] for step in (0, 1) for turn in range(4)}


def test_a_forward_inside_a_forward_has_its_own_pass() -> None:
    model = overspill.pregate(TASK.model())
    expected = loss_of(model, tokens_of()).item()
    inner: list[float] = []

    def again(*_: object) -> None:
        if not inner:
            inner.append(0.0)
            inner[0] = loss_of(model, tokens_of(1)).item()

    handle = model.blocks[2].register_forward_pre_hook(again)
    assert loss_of(model, tokens_of()).item() == expected
    handle.remove()
    assert inner == [loss_of(model, tokens_of(1)).item()]


def test_a_graph_without_backward_is_freed() -> None:
    model = overspill.pregate(TASK.model())
    for model.checkpoint in (False, True):
        held = [weakref.ref(tensor) for tensor in _inputs(model)]
        gc.collect()  # torch's checkpoints are reference cycles
        assert not [ref for ref in held if ref() is not None]


def _inputs(model: GPTMoE) -> list[Tensor]:
    """The inputs of the blocks of a forward whose result is dropped."""
    found: list[Tensor] = []
    handles = [
        block.register_forward_pre_hook(lambda _, args: found.append(args[0]))
        for block in model.blocks
    ]
    loss_of(model, tokens_of())
    for handle in handles:
        handle.remove()
    return found


def test_a_model_is_freed_with_its_last_reference() -> None:
    model = overspill.pregate(TASK.model())
    loss_of(model, tokens_of()).backward()
    ref = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert ref() is None
    finally:
        gc.enable()


# -- copies and state dicts ----------------------------------------------------------------------


def test_a_copy_has_pre_gates_of_its_own() -> None:
    model = overspill.pregate(TASK.model())
    expected = loss_of(model, tokens_of()).item()
    twin = copy.deepcopy(model)
    assert pregate_level(twin) == 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert loss_of(twin, tokens_of()).item() == expected


def test_a_state_dict_has_the_names_of_the_plain_model() -> None:
    plain, model = TASK.model(), overspill.pregate(TASK.model(), 3)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    other = overspill.pregate(GPTMoE(TASK.config, seed=5), 3)
    other.load_state_dict(model.state_dict())
    assert loss_of(other, tokens_of()).item() == loss_of(model, tokens_of()).item()


def test_bf16() -> None:
    task = Task(n_layers=4, dtype=torch.bfloat16)
    model = overspill.pregate(task.model())
    wide = overspill.pregate(TASK.model())
    wide.load_state_dict(model.state_dict())
    expected = loss_of(wide, tokens_of()).item()
    assert loss_of(model, tokens_of()).item() == pytest.approx(expected, rel=2e-2)


def test_generation_uses_the_pre_gates() -> None:
    model = overspill.pregate(TASK.model(), 2)
    tokens = tokens_of()[:1, :5]
    longer = model.generate(tokens, 3, temperature=0)
    for length in (5, 6, 7):
        logits = model(longer[:, :length]).logits
        assert longer[0, length] == logits[0, -1].argmax()


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, -1, True, 1.5, 4, 9])
def test_a_level_that_is_not_possible_is_refused(level: Any) -> None:
    model = TASK.model()
    with pytest.raises(ConfigError, match=f"level={level}"):
        overspill.pregate(model, level)
    assert type(model) is GPTMoE
    assert pregate_level(model) == 0


def test_pre_gates_are_added_once() -> None:
    model = overspill.pregate(TASK.model(), 2)
    with pytest.raises(ConfigError, match="level 2 already"):
        overspill.pregate(model)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear has no Mixture-of-Experts layer"):
        overspill.pregate(nn.Linear(2, 2))


def test_an_optimizer_without_the_pre_gates_is_refused() -> None:
    for kind in (overspill.AdamW, torch.optim.SGD):
        model = overspill.pregate(TASK.model())
        others = [p for n, p in model.named_parameters() if "router" not in n]
        optimizer = kind(others, lr=0.1)
        loss_of(model, tokens_of()).backward()
        optimizer.step()
        for _ in range(2):
            loss_of(model, tokens_of()).backward()
            with pytest.raises(ConfigError, match=r"blocks.1.moe.router.weight is a pre-gate"):
                optimizer.step()
        for moe in model.moe_layers():
            moe.router.requires_grad_(False)
        optimizer.step()


def test_another_optimizer_may_have_the_pre_gates(tmp_path: Path) -> None:
    model = overspill.pregate(TASK.model())
    with spilled(model, "host with 2 slots", tmp_path):
        routers = [p for n, p in model.named_parameters() if "router" in n]
        others = [p for n, p in model.named_parameters() if "router" not in n]
        first = overspill.AdamW(others, lr=0.1)
        second = torch.optim.SGD(routers, lr=0.1)
        before = [router.detach().clone() for router in routers]
        for _ in range(2):
            loss_of(model, tokens_of()).backward()
            first.step()
            second.step()
            first.zero_grad()
        assert first.steps_taken == 2
        assert not any(map(torch.equal, before, routers))


def test_an_optimizer_of_another_model_is_not_checked() -> None:
    loss_of(overspill.pregate(TASK.model()), tokens_of()).backward()
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()


def test_training_with_clipping_and_accumulation(tmp_path: Path) -> None:
    task = Task(n_layers=4, steps=1, micro_batches=2, clip=0.5)
    plain = overspill.pregate(task.model())
    batches = next(task.batches())
    expected = train_step(plain, adamw(plain, task, eps=1e-4), batches)
    model = overspill.pregate(task.model())
    with spilled(model, "disk, 5 resident", tmp_path):
        loss = train_step(model, adamw(model, task, eps=1e-4), batches)
        assert loss == pytest.approx(expected, rel=1e-5)
        assert_close(weights_of(model), weights_of(plain))


def uploads(monkeypatch: pytest.MonkeyPatch, hints: bool) -> int:
    """Experts that are uploaded in some forwards, also those that were not needed."""
    config = GPTConfig(
        vocab=48, n_layers=6, d_model=16, d_hidden=24, n_heads=2, n_experts=16, top_k=1
    )
    model: Any = overspill.offload(
        overspill.pregate(GPTMoE(config).eval()),
        mode="host",
        slots=24,
        device="cpu",
        quiet=True,
        progress=False,
        settings=overspill.Settings(residency=False),
    )
    engine, generator = model.overspill, torch.Generator().manual_seed(0)
    if not hints:
        monkeypatch.setattr(type(engine), "hint", lambda *args: None)
    for _ in range(6):
        with torch.no_grad():
            model(torch.randint(0, config.vocab, (1, 4), generator=generator))
        engine.flush()
    count: int = engine.recorder.counters()["upload"] // engine.layout.weight_bytes
    engine.close()
    return count


def test_a_pass_forgets_hints_of_one_that_has_failed() -> None:
    """Pre-gates of two blocks ahead: the experts of the last blocks are not known at first."""
    config = GPTConfig(
        vocab=48, n_layers=6, d_model=16, d_hidden=24, n_heads=2, n_experts=16, top_k=1
    )
    model: Any = overspill.offload(
        overspill.pregate(GPTMoE(config).eval(), 2), mode="host", slots=24, device="cpu",
        quiet=True, progress=False,
    )  # fmt: skip
    expected = model.overspill.compute.streamer.cursor.expected
    sources: list[list[str]] = []

    def note(*_: object) -> None:
        sources.append([expected(layer)[1].value for layer in range(1, 6)])

    def fail(*_: object) -> None:
        raise ValueError("injected")

    model.blocks[0].moe.register_forward_hook(note)
    handle = model.blocks[3].register_forward_hook(fail)
    with torch.no_grad():
        with pytest.raises(ValueError, match="injected"):
            model(torch.arange(4)[None])
        handle.remove()
        model(torch.arange(4)[None])
    assert sources == [["by history", "by routing", *["by history"] * 3]] * 2
    model.overspill.close()


def test_experts_that_pre_gates_have_chosen_are_uploaded_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fewer of those that are not needed are uploaded."""
    with_gates = uploads(monkeypatch, hints=True)
    assert with_gates < 0.8 * uploads(monkeypatch, hints=False)

"""GPTMoE as plain PyTorch: shapes, seeds, recomputation, grouped micro-batches."""

import dataclasses
from itertools import product

import pytest
import torch
from torch import Tensor

from overspill.core.errors import ConfigError
from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.models.rotary import rotate
from tests.slow import slow_rows

TINY = GPTConfig(
    vocab=64, n_layers=2, d_model=32, d_hidden=48, n_heads=2, n_experts=4, top_k=2, max_seq=16
)
CONFIGS = {
    "top-1 gelu": dataclasses.replace(TINY, top_k=1),
    "top-2 gated": dataclasses.replace(TINY, gated=True),
    "untied": dataclasses.replace(TINY, tie_embeddings=False),
    "every second layer": dataclasses.replace(TINY, n_layers=4, moe_every=2, gated=True),
}


def batch(n_sequences: int = 4) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(64, (n_sequences, 13))
    return tokens[:, :-1], tokens[:, 1:].clone()


def gradients(model: GPTMoE) -> dict[str, Tensor]:
    grads = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grads[name] = parameter.grad
    return grads


def assert_same_gradients(mine: GPTMoE, theirs: GPTMoE, tolerance: float) -> None:
    expected = gradients(theirs)
    for name, grad in gradients(mine).items():
        error = (grad - expected[name]).norm() / expected[name].norm().clamp(min=1e-12)
        assert error <= tolerance, f"{name}: {error}"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_gets_a_finite_gradient(name: str, dtype: torch.dtype) -> None:
    model = GPTMoE(CONFIGS[name], dtype=dtype)
    tokens, targets = batch()
    out = model(tokens, targets)
    assert out.logits is None
    assert out.loss.item() == pytest.approx(4.16, abs=0.15)  # log 64, plus 0.01 for each layer
    out.loss.backward()
    for name_, grad in gradients(model).items():
        assert grad.isfinite().all(), name_
        assert grad.any(), name_


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_as_many_as_the_config_says(name: str) -> None:
    model = GPTMoE(CONFIGS[name])
    assert sum(p.numel() for p in model.parameters()) == CONFIGS[name].total_params
    assert model.num_parameters() == CONFIGS[name].total_params
    expert = sum(p.numel() for moe in model.moe_layers() for p in (moe.w_in, moe.w_out))
    assert expert == CONFIGS[name].expert_params
    assert [moe.layer for moe in model.moe_layers()] == list(range(CONFIGS[name].n_moe_layers))


def test_logits_and_loss_agree() -> None:
    model = GPTMoE(TINY).eval()
    tokens, targets = batch()
    logits = model(tokens).logits
    assert logits.shape == (4, 12, 64)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    out = model(tokens, targets)
    torch.testing.assert_close(out.ce, expected.detach())
    torch.testing.assert_close(out.loss, out.ce + 0.01 * 2 * out.balance)


def test_tokens_do_not_see_what_follows() -> None:
    model = GPTMoE(TINY).eval()
    tokens, _ = batch(1)
    changed = tokens.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 64
    before, after = model(tokens).logits, model(changed).logits
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_attention_depends_on_distance_alone() -> None:
    model = GPTMoE(TINY)
    cos, sin = (table.view(16, 1, 1, -1) for table in model.rope(16))
    q, k = torch.randn(2, 1, 1, 1, 1, 16)
    turned_q = rotate(q.expand(1, 16, 1, 1, 16), cos, sin).view(16, 16)
    turned_k = rotate(k.expand(1, 16, 1, 1, 16), cos, sin).view(16, 16)
    scores = turned_q @ turned_k.t()
    torch.testing.assert_close(scores[5, 2], scores[12, 9])
    assert not torch.isclose(scores[5, 2], scores[5, 3])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pieces", [1, 2])
def test_recomputation_changes_no_bit(name: str, pieces: int) -> None:
    tokens, targets = batch()
    models = [GPTMoE(CONFIGS[name], checkpoint=checkpoint) for checkpoint in (True, False)]
    losses = []
    for model in models:
        loss = model(tokens, targets, pieces=pieces).loss
        loss.backward()
        losses.append(loss)
    assert torch.equal(losses[0], losses[1])
    expected = gradients(models[1])
    for key, grad in gradients(models[0]).items():
        assert torch.equal(grad, expected[key]), key


@pytest.mark.parametrize(
    ("checkpoint", "name"), slow_rows(product([False, True], CONFIGS), 1, 2, 4, 7)
)
def test_grouped_micro_batches_give_the_gradients_of_accumulated_ones(
    name: str, checkpoint: bool
) -> None:
    tokens, targets = batch(8)
    targets[0, :9] = -100  # pieces with different numbers of targets
    grouped, accumulated = (GPTMoE(CONFIGS[name], checkpoint=checkpoint) for _ in range(2))
    loss = grouped(tokens, targets, pieces=4).loss
    loss.backward()
    total = 0.0
    for i in range(4):
        part = accumulated(tokens[2 * i : 2 * i + 2], targets[2 * i : 2 * i + 2]).loss / 4
        part.backward()
        total += part.item()
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert_same_gradients(grouped, accumulated, 1e-5)


def test_one_piece_and_four_differ_only_in_the_balance_loss() -> None:
    config = dataclasses.replace(TINY, balance_coef=0.0)
    tokens, targets = batch()
    whole, grouped = GPTMoE(config), GPTMoE(config)
    whole(tokens, targets).loss.backward()
    grouped(tokens, targets, pieces=4).loss.backward()
    assert_same_gradients(grouped, whole, 1e-5)


def test_the_seed_fixes_all_weights() -> None:
    first, same, other = GPTMoE(TINY, seed=1), GPTMoE(TINY, seed=1), GPTMoE(TINY, seed=2)
    others = dict(other.named_parameters())
    for (name, mine), theirs in zip(first.named_parameters(), same.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        if mine.dim() > 1:
            assert not torch.equal(mine, others[name]), name


def test_no_two_experts_start_alike() -> None:
    experts = torch.cat([moe.w_in.flatten(1) for moe in GPTMoE(TINY).moe_layers()])
    assert len({tuple(expert[:4].tolist()) for expert in experts}) == len(experts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_meta_experts_have_no_memory_and_the_same_initial_weights(dtype: torch.dtype) -> None:
    plain = GPTMoE(TINY, seed=3, dtype=dtype)
    meta = GPTMoE(TINY, seed=3, dtype=dtype, meta_experts=True)
    assert torch.equal(plain.embedding.weight, meta.embedding.weight)
    assert torch.equal(plain.moe_layers()[1].router.weight, meta.moe_layers()[1].router.weight)
    for mine, theirs in zip(meta.moe_layers(), plain.moe_layers(), strict=True):
        assert mine.w_in.is_meta
        assert mine.w_out.is_meta
        for index in (3, 0):
            record = torch.empty(mine.shape.numel, dtype=dtype)
            mine.init_expert(index, record)
            w_in, w_out = record.split((mine.shape.in_numel, mine.shape.out_numel))
            assert torch.equal(w_in.view_as(theirs.w_in[index]), theirs.w_in[index])
            assert torch.equal(w_out.view_as(theirs.w_out[index]), theirs.w_out[index])


def test_initial_scale_of_residual_outputs_falls_with_depth() -> None:
    moe = GPTMoE(dataclasses.replace(TINY, n_layers=8)).moe_layers()[0]
    assert moe.w_in.std().item() == pytest.approx(0.02, rel=0.05)
    assert moe.w_out.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_generate_is_seeded_and_slides_over_long_contexts() -> None:
    model = GPTMoE(TINY)
    prompt, _ = batch(2)
    out = model.generate(prompt, 8, seed=5)
    assert out.shape == (2, 20)
    assert torch.equal(out[:, :12], prompt)
    assert torch.equal(out, model.generate(prompt, 8, seed=5))
    assert not torch.equal(out, model.generate(prompt, 8, seed=6))
    assert torch.equal(
        model.generate(prompt, 3, temperature=0), model.generate(prompt, 3, temperature=0, seed=9)
    )
    assert model.training


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_seq=16"):
        GPTMoE(TINY)(torch.zeros(1, 17, dtype=torch.int64))


def test_batch_that_pieces_do_not_divide_is_refused() -> None:
    tokens, targets = batch(4)
    with pytest.raises(ConfigError, match="pieces=3"):
        GPTMoE(TINY)(tokens, targets, pieces=3)

"""The chunked loss against transformers' own, gradients included."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM, MixtralForSequenceClassification
from transformers.loss.loss_utils import ForCausalLMLoss

from overspill.models.huggingface.loss import causal_lm_loss, install

VOCAB = 50
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (4 * torch.randn(3, 11, VOCAB)).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (3, 11))
    labels[0, :4] = labels[2, 10] = -100
    return logits, labels


def assert_same(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    factor: float = 1.0,
    rows: int = 1000,
    **kwargs: Any,
) -> None:
    """Loss and gradient are those of transformers; the gradient within one rounding."""
    expected = ForCausalLMLoss(logits, labels, VOCAB, **kwargs)
    chunk_bytes = rows * 2 * 4 * VOCAB
    loss = causal_lm_loss(logits, labels, VOCAB, chunk_bytes=chunk_bytes, **kwargs)
    assert loss.dtype is expected.dtype is torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0, equal_nan=True)
    (theirs,) = torch.autograd.grad(factor * expected, logits)
    (mine,) = torch.autograd.grad(factor * loss, logits)
    assert mine.dtype is logits.dtype
    rtol = max(torch.finfo(logits.dtype).eps, 1e-5)
    torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-8)


@pytest.fixture(params=[1, 7, 1000])
def rows(request: pytest.FixtureRequest) -> int:
    """Token rows in one chunk."""
    return int(request.param)


@pytest.mark.parametrize("dtype", FLOATS)
def test_mean_over_the_tokens_that_are_not_ignored(dtype: torch.dtype, rows: int) -> None:
    assert_same(*inputs(dtype), factor=3.0, rows=rows)


@pytest.mark.parametrize("items", [17, torch.tensor(17), torch.tensor(23.0)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sum_over_the_items_of_the_batch(
    dtype: torch.dtype, items: torch.Tensor | int, rows: int
) -> None:
    assert_same(*inputs(dtype), rows=rows, num_items_in_batch=items)


def test_shifted_labels_another_ignored_index_and_foreign_arguments() -> None:
    logits, labels = inputs(torch.float32)
    assert_same(logits, None, shift_labels=labels)
    assert_same(logits, labels, shift_labels=labels.flip(0))
    assert_same(logits, labels.clamp(min=0), ignore_index=0, output_router_logits=True)


@pytest.mark.parametrize("items", [None, 5, 0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_all_ignored(dtype: torch.dtype, items: int | None) -> None:
    logits, labels = inputs(dtype)
    assert_same(logits, torch.full_like(labels, -100), num_items_in_batch=items)


def test_most_bf16_gradients_are_bit_identical() -> None:
    logits, labels = inputs(torch.bfloat16)
    (theirs,) = torch.autograd.grad(ForCausalLMLoss(logits, labels, VOCAB), logits)
    (mine,) = torch.autograd.grad(causal_lm_loss(logits, labels, VOCAB), logits)
    assert (mine == theirs).float().mean() > 0.99


def test_logits_stay_what_they_were_and_backward_runs_twice() -> None:
    logits, labels = inputs(torch.bfloat16)
    before = logits.detach().clone()
    loss = causal_lm_loss(logits, labels, VOCAB)
    (first,) = torch.autograd.grad(2 * loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(2 * loss, logits)
    assert torch.equal(first, second)
    assert torch.equal(logits, before)


def test_the_loss_may_be_added_to_in_place() -> None:
    logits, labels = inputs(torch.float32)  # as models do with their balance loss
    loss = causal_lm_loss(logits, labels, VOCAB)
    loss += 1.0
    (after,) = torch.autograd.grad(loss, logits)
    (expected,) = torch.autograd.grad(causal_lm_loss(logits, labels, VOCAB), logits)
    assert torch.equal(after, expected)


@pytest.mark.parametrize("wrong", [VOCAB, -1])
def test_a_label_outside_of_the_vocabulary_is_the_same_error(wrong: int) -> None:
    logits, labels = inputs(torch.float32)
    labels[1, 3] = wrong
    for function in (ForCausalLMLoss, causal_lm_loss):
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            function(logits, labels, VOCAB)


def test_float32_memory_is_bounded_and_without_gradient_there_is_no_backward(
    rows: int,
) -> None:
    class Largest(TorchDispatchMode):
        floats = 0

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype is torch.float32:
                self.floats = max(self.floats, result.numel())
            return result

    logits, labels = inputs(torch.bfloat16)
    n_tokens = labels.numel()
    with Largest() as largest:
        causal_lm_loss(logits, labels, VOCAB, chunk_bytes=rows * 2 * 4 * VOCAB).backward()
    assert largest.floats <= max(min(rows, n_tokens) * VOCAB, n_tokens)
    assert not causal_lm_loss(logits.detach(), labels, VOCAB).requires_grad
    with torch.no_grad():
        assert not causal_lm_loss(logits, labels, VOCAB).requires_grad


def tiny(**changes: Any) -> MixtralConfig:
    return MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        pad_token_id=0,
        **changes,
    )


def test_an_installed_model_has_the_same_loss_and_gradients() -> None:
    model = MixtralForCausalLM(tiny(output_router_logits=True)).to(torch.float32)
    _, labels = inputs(torch.float32)
    tokens = labels.clamp(min=0)
    expected = model(tokens, labels=labels).loss
    theirs = torch.autograd.grad(expected, list(model.parameters()))
    install(model)
    assert model.loss_function is causal_lm_loss
    out = model(tokens, labels=labels)
    mine = torch.autograd.grad(out.loss, list(model.parameters()))
    torch.testing.assert_close(out.loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    assert out.logits.shape == (3, 11, VOCAB)


def test_other_losses_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    classifier = MixtralForSequenceClassification(tiny())
    before = classifier.loss_function
    install(classifier)
    assert classifier.loss_function is before

    def own(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(())

    model = MixtralForCausalLM(tiny())
    model.loss_function = own
    install(model)
    assert model.loss_function is own
    install(torch.nn.Sequential(model.model, torch.nn.Linear(2, 2)))
    assert "loss_type" not in caplog.text

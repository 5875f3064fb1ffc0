"""The names and places of tensors against transformers' own model."""

import dataclasses
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MixtralForCausalLM

from overspill.models.config import GPTConfig
from overspill.models.gpt import GPTMoE
from overspill.models.huggingface.from_gpt import (
    exported_config,
    exported_tensors,
    is_mixtral,
)

SHAPE = GPTConfig(
    vocab=320,
    n_layers=2,
    d_model=32,
    d_hidden=24,
    n_heads=2,
    n_experts=4,
    top_k=2,
    gated=True,
    max_seq=64,
    rope_theta=5000.0,
)


def converted(model: GPTMoE) -> dict[str, torch.Tensor]:
    source = model.state_dict()
    return {
        name: source[piece.source].reshape(-1)[piece.offset :][: piece.numel].view(piece.shape)
        for name, piece in exported_tensors(model.config).items()
    }


MIXTRAL = [
    {},
    {"tie_embeddings": False},
    {"top_k": 3},
    {"top_k": 1, "n_experts": 1},
    {"top_k": 4, "normalize_weights": False},
    {"n_heads": 4},
]
OWN = [
    {"gated": False},
    {"gated": False, "tie_embeddings": False, "n_heads": 4},
    {"gated": False, "moe_every": 2, "n_layers": 4},
    {"gated": False, "top_k": 1},
    {"moe_every": 2, "n_layers": 4},
    {"top_k": 1},
    {"normalize_weights": False},
]


def made(changes: dict[str, Any]) -> tuple[GPTMoE, Any]:
    """A GPT-MoE and the model that is exported of it."""
    torch.manual_seed(0)
    shape = dataclasses.replace(SHAPE, **changes)
    model = GPTMoE(shape, checkpoint=False)
    with torch.no_grad():
        for parameter in model.parameters():  # initial weights are too small to tell much
            parameter.add_(0.1 * torch.randn_like(parameter))
    config = AutoConfig.for_model(**exported_config(shape, "float32", 256))
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    assert kind.__name__ == config.architectures[0]
    theirs, loading = kind.from_pretrained(
        None, config=config, state_dict=converted(model), output_loading_info=True
    )
    assert not any(loading.values()), loading
    return model, theirs.train()


@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": False}, {"gated": False}, {"moe_every": 2}]
)
def test_each_element_of_the_model_is_used_once(changes: dict[str, Any]) -> None:
    model = GPTMoE(dataclasses.replace(SHAPE, **changes))
    for number, tensor in enumerate(model.parameters()):
        start = number * 20_000  # every element its own number
        tensor.data = torch.arange(start, start + tensor.numel()).float().view_as(tensor)
    elements = torch.cat([tensor.reshape(-1) for tensor in converted(model).values()])
    assert elements.numel() == elements.unique().numel() == model.num_parameters()


@pytest.mark.parametrize("changes", [*MIXTRAL, *OWN])
def test_logits_and_loss_are_those_of_the_exported_model(changes: dict[str, Any]) -> None:
    model, theirs = made(changes)
    assert (
        is_mixtral(model.config) == isinstance(theirs, MixtralForCausalLM) == (changes in MIXTRAL)
    )
    tokens = torch.randint(model.config.vocab, (2, model.config.max_seq))
    with torch.no_grad():
        expected = model(tokens).logits
        assert expected.std() > 0.1
        torch.testing.assert_close(theirs(tokens).logits, expected, rtol=1e-5, atol=1e-5)
        if changes in OWN:
            targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
            got = theirs(tokens, labels=tokens, output_router_logits=True)
            torch.testing.assert_close(got.loss, model(tokens, targets).loss, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("changes", OWN[2:4])
def test_gradients_are_those_of_the_gpt(changes: dict[str, Any]) -> None:
    model, theirs = made(changes)
    theirs.set_experts_implementation("eager")
    tokens = torch.randint(model.config.vocab, (2, 32))
    targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    model(tokens, targets).loss.backward()
    theirs(tokens, labels=tokens, output_router_logits=True).loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    expected = converted(model)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_padding_changes_neither_logits_nor_balance() -> None:
    _, theirs = made({"gated": False})
    tokens = torch.randint(5, 320, (1, 12))
    padded = torch.cat((tokens, tokens.new_full((1, 4), 256)), dim=1)
    mask = torch.ones_like(padded)
    mask[:, 12:] = 0
    with torch.no_grad():
        plain = theirs(tokens, output_router_logits=True)
        got = theirs(padded, attention_mask=mask, output_router_logits=True)
    torch.testing.assert_close(got.logits[:, :12], plain.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.aux_loss, plain.aux_loss)


def test_cached_generation_repeats_the_forward() -> None:
    _, theirs = made({"gated": False, "moe_every": 2})
    tokens = torch.randint(5, 320, (2, 7))
    out = theirs.eval().generate(
        tokens, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    for length in range(7, 16):
        with torch.no_grad():
            assert torch.equal(theirs(out[:, :length]).logits[:, -1].argmax(-1), out[:, length])


def test_the_config_says_what_the_model_is() -> None:
    config = AutoConfig.for_model(**exported_config(SHAPE, "bfloat16", None))
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert config.dtype is torch.bfloat16
    assert (config.max_position_embeddings, config.num_experts_per_tok) == (64, 2)
    assert config.tie_word_embeddings
    assert config.eos_token_id is config.pad_token_id is config.bos_token_id is None
    assert config.router_aux_loss_coef == pytest.approx(0.01 * 2 / 2)

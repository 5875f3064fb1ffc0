"""An offloaded model behaves as its users expect, or explains itself."""

import copy
import gc
import io
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.core.errors import ConfigError, OrderError
from overspill.models.huggingface.adapt import register
from tests.models.huggingface.families import make_batch, make_model
from tests.models.huggingface.oracle import assert_same_weights, budgets, offloaded
from tests.models.huggingface.test_exactness import BY_NAME

MIXTRAL = BY_NAME["mixtral"]


@pytest.fixture
def twins(tmp_path: Path) -> Any:
    plain = make_model(MIXTRAL)
    with offloaded(plain, "host", tmp_path) as twin:
        yield plain, twin


def test_numbers_of_parameters(twins: Any) -> None:
    plain, twin = twins
    assert twin.num_parameters() == plain.num_parameters()
    assert twin.num_parameters(exclude_embeddings=True) == plain.num_parameters(
        exclude_embeddings=True
    )
    for parameter in twin.parameters():
        if getattr(parameter, "is_expert_placeholder", False):
            parameter.requires_grad_(False)
    experts = sum(p.numel() for n, p in plain.named_parameters() if ".experts." in n)
    assert twin.num_parameters(only_trainable=True) == plain.num_parameters() - experts


def test_state_dict_is_that_of_the_plain_model(twins: Any) -> None:
    plain, twin = twins
    mine, theirs = twin.state_dict(), plain.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    doubled = {name: value * 2 for name, value in theirs.items()}
    twin.load_state_dict(doubled)
    assert all(torch.equal(twin.state_dict()[name], value) for name, value in doubled.items())


def test_where_it_is_it_may_be_sent(twins: Any) -> None:
    _, twin = twins
    assert twin.to("cpu") is twin
    assert twin.to(torch.float32) is twin
    assert twin.float() is twin


@pytest.mark.parametrize(
    "move", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.to("meta")]
)
def test_elsewhere_it_says_so_and_stays_as_it_was(twins: Any, move: Any) -> None:
    plain, twin = twins
    with pytest.raises(OrderError, match=r"give dtype= and device= to overspill\.load"):
        move(twin)
    batch = make_batch(MIXTRAL, plain)
    assert all(p.dtype == torch.float32 for p in twin.parameters())
    assert torch.equal(twin(**batch).logits, plain(**batch).logits)


def test_modes_and_no_grad(twins: Any) -> None:
    plain, twin = twins
    batch = make_batch(MIXTRAL, plain)
    assert not twin.eval().training
    with torch.no_grad():
        out = twin(**batch)
    assert not out.logits.requires_grad
    assert torch.equal(out.logits, plain.eval()(**batch).logits)
    assert twin.train().training
    with torch.inference_mode():
        assert torch.equal(twin(**batch).logits, out.logits)


def test_generates_what_the_plain_model_generates(twins: Any) -> None:
    plain, twin = twins
    tokens = torch.tensor([[5, 6, 7, 8]])
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(
        twin.eval().generate(tokens, **settings), plain.eval().generate(tokens, **settings)
    )


def test_parameters_are_released_when_all_experts_are_copied(tmp_path: Path) -> None:
    model = make_model(MIXTRAL)
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    size = sum(p.numel() for p in experts)
    held: list[int] = []
    overspill.offload(
        model,
        device="cpu",
        mode="host",
        slots=2,
        quiet=True,
        progress=lambda what, done, total: held.append(sum(p.numel() for p in experts)),
    )
    model.overspill.close()
    assert set(held) == {size}, "a failure would lose them"
    assert not any(p.numel() for p in experts), "an optimizer made before may refer to them"


def test_it_cannot_be_copied(twins: Any) -> None:
    with pytest.raises(OrderError, match="cannot be copied"):
        copy.deepcopy(twins[1])


def test_it_cannot_be_copied_to_several_gpus(twins: Any) -> None:
    experts = twins[1].model.layers[0].mlp.experts
    with pytest.raises(OrderError, match=r"DataParallel .* start one process per GPU"):
        experts._replicate_for_data_parallel()  # as torch.nn.parallel.replicate does


def test_it_cannot_be_offloaded_twice(twins: Any) -> None:
    with pytest.raises(overspill.OverspillError, match="offloaded already"):
        overspill.offload(twins[1], device="cpu")


def test_backward_without_an_optimizer_names_it(twins: Any) -> None:
    plain, twin = twins
    with pytest.raises(OrderError, match=r"create overspill\.AdamW"):
        twin(**make_batch(MIXTRAL, plain)).loss.backward()


def test_the_implementation_without_offload_explains_itself() -> None:
    register()
    plain = make_model(MIXTRAL)
    plain.set_experts_implementation("overspill")
    with pytest.raises(OrderError, match=r"call overspill\.offload"):
        plain(**make_batch(MIXTRAL, plain))


def test_the_engine_closes_when_the_model_is_gone(tmp_path: Path) -> None:
    model = make_model(MIXTRAL)
    overspill.offload(model, device="cpu", mode="host", slots=2, quiet=True)
    optimizer = overspill.AdamW(model)
    model(**make_batch(MIXTRAL, model)).loss.backward()
    optimizer.step()
    engine = model.overspill
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
    assert engine.lifetime.closed


def test_lora_leaves_the_experts_alone(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plain = make_model(MIXTRAL)
    batch = make_batch(MIXTRAL, plain)
    with offloaded(plain, "host", tmp_path) as twin:
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
        adapted = peft.get_peft_model(twin, config)
        optimizer = overspill.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for _ in range(4):
            loss = adapted(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        assert losses[-1] < losses[0]
        training = twin.overspill.training
        assert all(training.optimizer.steps(n) == 0 for n in range(twin.overspill.n_layers))
        for name, value in plain.state_dict().items():
            if ".experts." in name:
                mine = {
                    k.replace("base_model.model.", ""): v for k, v in adapted.state_dict().items()
                }
                assert torch.equal(mine[name], value)
        overspill.save(adapted, tmp_path / "adapter")
        assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_half_precision_is_for_inference_only(tmp_path: Path) -> None:
    plain = make_model(MIXTRAL).half()
    plain.save_pretrained(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"float16 cannot be trained.*'bfloat16'"):
        overspill.load(tmp_path / "a", **budgets("host", tmp_path))
    model = overspill.load(tmp_path / "a", train=False, **budgets("host", tmp_path))
    assert model.overspill.dtype == torch.float16
    model.overspill.close()
    model = overspill.load(tmp_path / "a", dtype="float32", **budgets("host", tmp_path))
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value.float()), name
    model.overspill.close()


@pytest.mark.parametrize("family", ["mixtral", "switch_transformers"])
def test_groups_by_dimension_decay_experts_as_in_the_plain_model(
    family: str, tmp_path: Path
) -> None:
    plain = make_model(BY_NAME[family]).train()
    batch = make_batch(BY_NAME[family], plain)
    with offloaded(plain, "host", tmp_path) as twin:
        for model, make in ((plain, torch.optim.AdamW), (twin, overspill.AdamW)):
            groups = [
                {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 9.0},
                {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
            ]
            optimizer = make(groups, lr=1e-2, eps=1e-2)
            model(**batch).loss.backward()
            optimizer.step()
        assert_same_weights(plain, twin, rtol=1e-4, atol=1e-5)


def test_values_of_a_state_dict_between_backward_and_step_are_refused(twins: Any) -> None:
    """Names and shapes are known; experts would be one update ahead of the rest."""
    plain, twin = twins
    optimizer = overspill.AdamW(twin.train(), lr=1e-3)
    twin(**make_batch(MIXTRAL, plain)).loss.backward()
    states = twin.state_dict()
    assert states.keys() == plain.state_dict().keys()
    with pytest.raises(OrderError, match=r"cannot be saved .* opt\.step\(\)"):
        torch.save(states, io.BytesIO())
    with pytest.raises(OrderError, match="cannot be saved"):
        optimizer.state_dict()
    optimizer.step()
    torch.save(states, io.BytesIO())


def test_it_cannot_be_pickled(twins: Any) -> None:
    _, twin = twins
    with pytest.raises(OrderError, match=r"cannot be pickled.*overspill\.save"):
        torch.save(twin, io.BytesIO())

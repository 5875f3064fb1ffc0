"""peft adapters of offloaded experts against the same adapters on the plain model."""

import contextlib
import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from bench.loopback import LoopbackExchange, loop_back
from overspill.core.errors import ConfigError
from overspill.models.huggingface.expert_adapters import stand_ins
from overspill.moe.state_dict import placeholders
from overspill.plan.usage import Swap
from overspill.serve.decode.module_step import can_step
from tests.models.huggingface.families import Family, make_batch, make_model
from tests.models.huggingface.oracle import ADAM, offloaded
from tests.models.huggingface.packed.cases import Pairs, load
from tests.models.huggingface.test_exactness import BY_NAME
from tests.models.huggingface.test_load import again
from tests.moe.streaming.policies import random_policy
from tests.slow import slow_rows

peft: Any = pytest.importorskip("peft")

MIXTRAL = BY_NAME["mixtral"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def adapt(model: Any, **options: Any) -> Any:
    """Adapters whose matrices are all random, on experts and on two layers of the attention."""
    given = {"r": 3, "lora_alpha": 7, "init_lora_weights": False, "target_parameters": EXPERTS}
    given["target_modules"] = ["q_proj", "o_proj"]
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, peft.LoraConfig(**given | options)).train()


def trained(model: Any) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def assert_near(mine: Any, theirs: Any, of: str) -> None:
    """Tensors by name; gradients if `of` says so."""
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        found = mine[name].grad if of == "gradients" else mine[name]
        expected = expected.grad if of == "gradients" else expected
        atol = 1e-5 * float(expected.detach().abs().max()) + 1e-8
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=atol, msg=f"{of}: {name}")


@pytest.mark.parametrize(
    ("name", "mode", "reentrant"),
    [
        ("mixtral", "disk", True),
        ("gpt_oss", "host", False),
        pytest.param("mixtral", "host", None, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "disk", False, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "disk", None, marks=pytest.mark.slow),
        pytest.param("olmoe", "gpu", None, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "host", False, marks=pytest.mark.slow),
        pytest.param("glm4_moe", "disk", None, marks=pytest.mark.slow),
        pytest.param("nemotron_h", "host", None, marks=pytest.mark.slow),
    ],
)
def test_training_equals_pefts(
    name: str, mode: str, reentrant: bool | None, tmp_path: Path
) -> None:
    """Two steps of two micro-batches, with clipping; also with recomputed activations."""
    family = BY_NAME[name]
    plain = make_model(family)
    batches = [make_batch(family, plain, seed) for seed in range(4)]
    settings = overspill.Settings(activations="keep" if name == "olmoe" else "recompute")
    targets = [*EXPERTS, "experts.up_proj"]
    with offloaded(plain, mode, tmp_path, settings) as twin:
        theirs, mine = (adapt(m, target_parameters=targets) for m in (plain, twin))
        assert sum("experts" in each for each in trained(mine)) == 8
        assert_near(trained(mine), trained(theirs), "initial adapters")
        if reentrant is not None:
            for model in (theirs, mine):
                model.enable_input_require_grads()
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        plain_adam = torch.optim.AdamW(trained(theirs).values(), **ADAM)
        adam = overspill.AdamW(trained(mine).values(), max_grad_norm=0.5, **ADAM)
        for first in (0, 2):
            for number, batch in enumerate(batches[first : first + 2]):
                expected, got = theirs(**batch).loss, mine(**batch).loss
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
                (expected / 2).backward()
                with adam.accumulate() if number == 0 else contextlib.nullcontext():
                    (got / 2).backward()
            assert_near(trained(mine), trained(theirs), "gradients")
            torch.nn.utils.clip_grad_norm_(trained(theirs).values(), 0.5)
            for optimizer in (plain_adam, adam):
                optimizer.step()
                optimizer.zero_grad()
        assert_near(trained(mine), trained(theirs), "trained adapters")
        for key, value in twin.state_dict().items():
            if ".experts." in key and "lora_" not in key:
                assert torch.equal(value, plain.state_dict()[key])
        twin.overspill.check_conserved()


@pytest.mark.parametrize(
    ("name", "mode"), slow_rows([("mxfp4", "host"), ("int4", "disk"), ("fp8-block", "host")], 1, 2)
)
def test_training_on_packed_experts_equals_pefts_on_plain_ones(
    name: str, mode: str, tmp_path: Path
) -> None:
    pair = Pairs(tmp_path)[name]
    plain = again(pair.family, pair.plain)
    batches = [make_batch(pair.family, plain, seed) for seed in range(2)]
    twin = load(pair.packed, mode=mode, packed=True, freeze_experts=True)
    with contextlib.closing(twin.overspill):
        theirs, mine = adapt(plain), adapt(twin)
        plain_adam = torch.optim.AdamW(trained(theirs).values(), **ADAM)
        adam = overspill.AdamW(trained(mine).values(), max_grad_norm=0.5, **ADAM)
        for batch in batches:
            expected, got = theirs(**batch).loss, mine(**batch).loss
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
            expected.backward()
            got.backward()
            assert_near(trained(mine), trained(theirs), "gradients")
            torch.nn.utils.clip_grad_norm_(trained(theirs).values(), 0.5)
            for optimizer in (plain_adam, adam):
                optimizer.step()
                optimizer.zero_grad()
        assert_near(trained(mine), trained(theirs), "trained adapters")


def test_exchanged_places_and_cpu_experts_change_nothing(tmp_path: Path) -> None:
    plain = make_model(MIXTRAL)
    batch = make_batch(MIXTRAL, plain)
    settings = overspill.Settings(cpu_experts=True, cpu_policy=random_policy(2), threads=1)
    twin = overspill.offload(
        copy.deepcopy(plain), mode="auto", slots=2, gpu_experts=2, device="cpu", quiet=True,
        progress=False, settings=settings,
    )  # fmt: skip
    with contextlib.closing(twin.overspill):
        theirs, mine = adapt(plain), adapt(twin)
        for swaps in ([], [Swap(0, 0, 3), Swap(1, 0, 2)]):
            twin.overspill.swap_experts(swaps)
            for model in (theirs, mine):
                model.zero_grad()
                model(**batch).loss.backward()
            assert_near(trained(mine), trained(theirs), "gradients")
        with torch.no_grad():
            torch.testing.assert_close(mine(**batch).logits, theirs(**batch).logits)


def test_rows_may_travel_in_groups_of_experts(tmp_path: Path) -> None:
    plain = make_model(MIXTRAL)
    batch = make_batch(MIXTRAL, plain)
    settings = overspill.Settings(exchange_groups=3, received_rows="keep")
    with offloaded(plain, "host", tmp_path, settings) as twin:
        loop_back(twin.overspill, LoopbackExchange("cpu"))
        theirs, mine = adapt(plain), adapt(twin)
        for model in (theirs, mine):
            model(**batch).loss.backward()
        assert_near(trained(mine), trained(theirs), "gradients")


def test_stand_ins_are_no_parameters_of_the_model(tmp_path: Path) -> None:
    plain = make_model(MIXTRAL)
    with offloaded(plain, "host", tmp_path) as twin:
        experts = twin.model.layers[0].mlp.experts
        own = stand_ins(experts)
        theirs = dict(plain.model.layers[0].mlp.experts.named_parameters(recurse=False))
        for name, parameter in theirs.items():
            assert own[name].shape == parameter.shape
            assert own[name].dtype == parameter.dtype
            assert not own[name].requires_grad
            assert own[name].untyped_storage().nbytes() == parameter.element_size()
        for recurse in (False, True):
            assert [*dict(experts.named_parameters(recurse=recurse))] == ["overspill"]
            assert len([*experts.parameters(recurse=recurse)]) == 1
        assert not any("_proj" in n for n, _ in twin.named_parameters() if "experts" in n)
        assert twin.num_parameters() == plain.num_parameters()
        assert twin.state_dict().keys() == plain.state_dict().keys()
        adapted = adapt(twin)
        assert (
            adapted.get_nb_trainable_parameters()[0]
            == adapt(plain).get_nb_trainable_parameters()[0]
        )


def test_no_adapter_of_a_whole_stack_is_formed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-ins are neither read nor written."""
    plain = make_model(MIXTRAL)
    batch = make_batch(MIXTRAL, plain)
    with offloaded(plain, "host", tmp_path) as twin:
        own = [stand_ins(layer.mlp.experts) for layer in twin.model.layers]
        mine = adapt(twin)

        def refuse(*args: object, **kwargs: object) -> None:
            raise AssertionError("B @ A of all experts was asked for")

        monkeypatch.setattr(peft.tuners.lora.layer.ParamWrapper, "get_delta_weight", refuse)
        mine(**batch).loss.backward()
        assert all(p.grad is not None for n, p in trained(mine).items() if "experts" in n)
        mine.merge_adapter()
        mine.unmerge_adapter()
        for each in own:
            for parameter in each.values():
                assert set(parameter.stride()) == {0}
                assert parameter.count_nonzero() == 0


@pytest.mark.parametrize("targets", slow_rows(["all-linear", r".*\.(q_proj|w2)", r".*\.w[123]"], 2))
def test_words_and_expressions_mean_what_they_mean_on_the_plain_model(
    targets: str, tmp_path: Path
) -> None:
    """For peft these are the linear layers of earlier transformers: experts and routers too."""
    plain = make_model(MIXTRAL)
    batch = make_batch(MIXTRAL, plain)
    with offloaded(plain, "host", tmp_path) as twin:
        options = {"target_modules": targets, "target_parameters": None}
        theirs, mine = adapt(plain, **options), adapt(twin, **options)
        for model in (theirs, mine):
            model(**batch).loss.backward()
        assert any("experts" in name for name in trained(theirs))
        assert_near(trained(mine), trained(theirs), "gradients")


@pytest.mark.parametrize(
    ("targets", "meant"),
    slow_rows([("all-linear", True), (["q", "wi"], True), (["q", "v"], False)], 1),
)
def test_experts_that_are_left_out_are_named(
    targets: Any, meant: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family = BY_NAME["switch_transformers"]
    plain = make_model(family)
    with offloaded(plain, "host", tmp_path) as twin:
        mine = adapt(twin, target_modules=targets, target_parameters=None)
        for _ in range(2):
            mine(**make_batch(family, plain))
    lines = [r.message for r in caplog.records if "has no part in the experts" in r.message]
    assert len(lines) == meant


def test_merging_and_unmerging_change_the_records(tmp_path: Path) -> None:
    for family in (MIXTRAL, BY_NAME["gpt_oss"]):
        plain = make_model(family)
        batch = make_batch(family, plain)
        with offloaded(plain, "disk", tmp_path) as twin, torch.no_grad():
            theirs, mine = adapt(plain), adapt(twin)
            adapted = mine(**batch).logits
            for step in ("merge_adapter", "unmerge_adapter", "merge_and_unload"):
                expected = getattr(theirs, step)() or theirs
                got = getattr(mine, step)() or mine
                torch.testing.assert_close(got(**batch).logits, expected(**batch).logits)
            torch.testing.assert_close(got(**batch).logits, adapted, rtol=1e-4, atol=1e-4)
            assert_near(got.state_dict(), expected.state_dict(), "merged weights")


def test_saved_adapters_are_pefts(tmp_path: Path) -> None:
    plain = make_model(MIXTRAL)
    batch = make_batch(MIXTRAL, plain)
    with offloaded(plain, "host", tmp_path) as twin, torch.no_grad():
        mine = adapt(twin)
        expected = mine(**batch).logits
        overspill.save(mine, tmp_path / "adapter")
        with mine.disable_adapter():
            torch.testing.assert_close(mine(**batch).logits, plain(**batch).logits)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path / "adapter")
    torch.testing.assert_close(loaded(**batch).logits, expected)
    with offloaded(plain, "host", tmp_path) as twin, torch.no_grad():
        again = peft.PeftModel.from_pretrained(twin, tmp_path / "adapter")
        assert torch.equal(again(**batch).logits, expected)


def test_unmerged_adapters_are_served_without_graphs(tmp_path: Path) -> None:
    family = BY_NAME["mixtral"]
    with offloaded(make_model(family).eval(), "host", tmp_path) as twin:
        held = [placeholder for _, placeholder, _ in placeholders(twin)]
        assert can_step(twin, held)
        mine = adapt(twin).eval()
        assert not can_step(twin, held)
        expected = mine.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False)
        asked = overspill.SamplingParams(max_tokens=4, temperature=0.0)
        with overspill.LLM(twin, context=64) as llm:
            assert llm.generate([[3, 4, 5]], asked)[0].token_ids == expected[0, 3:].tolist()


def test_adapters_that_are_not_computed_are_refused(tmp_path: Path) -> None:
    family: Family = BY_NAME["gpt_oss"]
    plain = make_model(family)
    batch = make_batch(family, plain)
    for options in ({"lora_dropout": 0.1}, {"use_dora": True}):
        with offloaded(plain, "host", tmp_path) as twin, pytest.raises(ValueError, match="lora"):
            adapt(twin, **options)
    with offloaded(plain, "host", tmp_path) as twin:
        mine = adapt(twin)
        mine.add_adapter("other", mine.peft_config["default"])
        mine.base_model.set_adapter(["default", "other"])
        with pytest.raises(ConfigError, match=r"several active adapters \(default, other\)"):
            mine(**batch)
    with offloaded(plain, "host", tmp_path) as twin:
        mine = adapt(twin, target_parameters=[*EXPERTS, "experts.down_proj_bias"])
        with pytest.raises(ConfigError, match=r"names down_proj_bias, the biases"):
            mine(**batch)


def test_bf16_is_nearer_to_float64_than_peft(tmp_path: Path) -> None:
    """peft rounds W + scale * B @ A, which loses small adapters."""
    narrow = make_model(MIXTRAL).to(torch.bfloat16)
    with offloaded(narrow, "host", tmp_path) as twin:
        models = {
            "exact": adapt(copy.deepcopy(narrow).double(), lora_alpha=0.02),
            "peft": adapt(narrow, lora_alpha=0.02),
            "overspill": adapt(twin, lora_alpha=0.02),
        }
        torch.manual_seed(0)
        x, dy = torch.randn(2, 64, 32, dtype=torch.bfloat16)
        ids, weights = torch.rand(64, 4).argsort(1)[:, :2], torch.rand(64, 2)
        found: dict[str, list[torch.Tensor]] = {}
        for kind, model in models.items():
            experts = model.base_model.model.model.layers[0].mlp.experts
            factors = [p for name, p in experts.named_parameters() if "lora_" in name]
            for factor, first in zip(factors, found.get("first", factors), strict=True):
                factor.data = first.data.to(factor.dtype)
            found.setdefault("first", factors)
            dtype = torch.float64 if kind == "exact" else torch.bfloat16
            own = x.to(dtype, copy=True).requires_grad_()
            y = experts(own, ids, weights.to(dtype))
            y.backward(dy.to(dtype))
            with model.disable_adapter(), torch.no_grad():
                effect = y.detach() - experts(own, ids, weights.to(dtype))
            found[kind] = [effect, y.detach(), *(leaf.grad for leaf in (own, *factors))]

    def errors(kind: str) -> list[float]:
        pairs = zip(found[kind], found["exact"], strict=True)
        return [float((mine - exact).norm() / exact.norm()) for mine, exact in pairs]

    mine, theirs = errors("overspill"), errors("peft")
    assert mine[0] < 0.6 * theirs[0]  # of the adapter alone
    assert sum(mine[1:]) < sum(theirs[1:])

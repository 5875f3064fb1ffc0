"""load → save → load: the same bits, from checkpoints with experts one by one and stacked."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import overspill
from overspill.models.fill import reader_threads
from tests.models.huggingface.families import Family, different_cases, make_batch, make_model
from tests.models.huggingface.oracle import MODES, budgets
from tests.models.huggingface.test_exactness import BY_NAME, SUPPORTED
from tests.slow import slow_names, slow_rows


def tensors(folder: Path) -> dict[str, Tensor]:
    return {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def assert_same_tensors(folder: Path, other: Path) -> None:
    first, second = tensors(folder), tensors(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def outputs(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model.eval()(**batch).logits


def again(family: Family, folder: Path) -> Any:
    """The checkpoint as transformers loads it, without Overspill."""
    import transformers

    plain = getattr(transformers, family.auto).from_pretrained(folder, dtype=torch.float32)
    plain.set_experts_implementation("eager") if family.name in EAGER else None
    return plain


# one family for each layout of experts, and those whose dense tensors are converted too
LAYOUTS = (
    "mixtral",
    "nemotron_h",
    "gpt_oss",
    "openai_privacy_filter",
    "qwen3_vl_moe",
    "qwen3_5_moe",
    "kimi_linear",
    "minimax_m3_vl_text",
    "switch_transformers",
    "nllb-moe",
)

# nothing to set: Switch and NLLB have one implementation only
EAGER = tuple(f.name for f in SUPPORTED if f.auto != "AutoModelForSeq2SeqLM")


def check(family: Family, stacked: bool, folder: Path) -> None:
    plain = make_model(family)
    batch = make_batch(family, plain)
    plain.save_pretrained(folder / "a", save_original_format=not stacked)
    eager = again(family, folder / "a")
    reference = outputs(eager, batch)
    eager.save_pretrained(folder / "theirs")
    mode = list(MODES)[SUPPORTED.index(family) % len(MODES)]
    model = overspill.load(folder / "a", dtype=torch.float32, **budgets(mode, folder / "spill"))
    try:
        assert type(model) is type(plain)
        torch.testing.assert_close(outputs(model, batch), reference, rtol=1e-6, atol=1e-6)
        overspill.save(model, folder / "b")
    finally:
        model.overspill.close()
    # the names are those that transformers gives after loading, mostly the checkpoint's
    assert_same_tensors(folder / "theirs", folder / "b")


# those named have other mixers, which are not converted
MIXERS = ("granitemoehybrid", "jamba", "lfm2_moe", "minimax", "mistral4", "qwen3_next", "zaya")


@pytest.mark.parametrize("family", different_cases(SUPPORTED, *MIXERS))
def test_load_and_save_give_the_same_bits(family: Family, tmp_path: Path) -> None:
    check(family, False, tmp_path)


@pytest.mark.parametrize("name", slow_names(LAYOUTS, "nllb-moe"))
def test_stacked_experts_are_loaded_too(name: str, tmp_path: Path) -> None:
    check(BY_NAME[name], True, tmp_path)


# other layouts are compared tensor by tensor above
@pytest.mark.parametrize("name", ["mixtral", "nemotron_h", "switch_transformers"])
def test_transformers_loads_what_is_saved(name: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    plain = make_model(family)
    batch = make_batch(family, plain)
    plain.save_pretrained(tmp_path / "theirs")
    model = overspill.offload(plain, **budgets("host", tmp_path))
    overspill.save(model, tmp_path / "mine")
    model.overspill.close()
    mine, theirs = (outputs(again(family, tmp_path / f), batch) for f in ("mine", "theirs"))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", slow_rows(["mixtral", "switch_transformers", "nemotron_h"], 0))
def test_twelve_experts_keep_their_order(name: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    config = family.build()
    field = "n_routed_experts" if name == "nemotron_h" else "num_experts"
    setattr(config, "num_local_experts" if name == "mixtral" else field, 12)
    family = dataclasses.replace(family, build=lambda: config)
    plain = make_model(family)
    plain.save_pretrained(tmp_path / "a", max_shard_size="25KB")
    model = overspill.load(tmp_path / "a", **budgets("host", tmp_path))
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    overspill.save(model, tmp_path / "b")
    model.overspill.close()
    assert_same_tensors(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("name", slow_rows(["mixtral", "gpt_oss", "switch_transformers"], 0, 2))
def test_small_shards(name: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    plain = make_model(family)
    plain.save_pretrained(tmp_path / "a", max_shard_size="20KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 3
    model = overspill.load(tmp_path / "a", **budgets("host", tmp_path))
    model.save_pretrained(tmp_path / "b", max_shard_size="30KB")
    model.overspill.close()
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 3
    assert_same_tensors(tmp_path / "a", tmp_path / "b")
    # again over what is there: nothing of the old stays
    model = overspill.load(tmp_path / "b", **budgets("host", tmp_path))
    overspill.save(model, tmp_path / "b")
    model.overspill.close()
    assert_same_tensors(tmp_path / "a", tmp_path / "b")


def test_other_dtype(tmp_path: Path) -> None:
    plain = make_model(BY_NAME["mixtral"])
    plain.save_pretrained(tmp_path / "a")
    model = overspill.load(tmp_path / "a", dtype="bfloat16", **budgets("disk", tmp_path / "spill"))
    assert model.dtype == model.overspill.dtype == torch.bfloat16
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name].to(value.dtype)), name
    overspill.save(model, tmp_path / "b")
    model.overspill.close()
    assert all(t.dtype == torch.bfloat16 for t in tensors(tmp_path / "b").values())


def test_trained_weights_are_saved(tmp_path: Path) -> None:
    family = BY_NAME["qwen3_moe"]
    plain = make_model(family)
    batch = make_batch(family, plain)
    plain.save_pretrained(tmp_path / "a")
    model = overspill.load(tmp_path / "a", **budgets("disk", tmp_path / "spill"))
    optimizer = overspill.AdamW(model, lr=1e-2)
    model(**batch).loss.backward()
    optimizer.step()
    after = outputs(model, batch)
    overspill.save(model, tmp_path / "b")
    model.overspill.close()
    assert not torch.equal(after, outputs(plain, batch))
    assert torch.equal(outputs(again(family, tmp_path / "b"), batch), after)


def test_for_inference_takes_no_memory_for_an_optimizer(tmp_path: Path) -> None:
    make_model(BY_NAME["mixtral"]).save_pretrained(tmp_path / "a")
    model = overspill.load(tmp_path / "a", train=False, **budgets("host", tmp_path))
    assert not model.training
    out = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
    assert out.shape == (1, 7)
    with pytest.raises(overspill.OverspillError, match="offloaded for inference"):
        overspill.AdamW(model)
    model.overspill.close()


def test_frozen_experts_take_no_memory_for_an_optimizer(tmp_path: Path) -> None:
    plain = make_model(BY_NAME["mixtral"])
    plain.save_pretrained(tmp_path / "a")
    model = overspill.load(tmp_path / "a", freeze_experts=True, **budgets("host", tmp_path))
    assert model.training
    before = model.overspill.bytes_by_tier()["host"]
    optimizer = overspill.AdamW(model, lr=0.1)
    batch = make_batch(BY_NAME["mixtral"], model)
    model(**batch).loss.backward()
    optimizer.step()
    assert model.overspill.bytes_by_tier()["host"] == before
    assert not torch.equal(model.lm_head.weight, plain.lm_head.weight)
    name = next(name for name in plain.state_dict() if "experts" in name)
    assert torch.equal(model.state_dict()[name] + 0, plain.state_dict()[name])
    model.overspill.close()


def test_from_config_draws_as_transformers_does(tmp_path: Path) -> None:
    config = make_model(BY_NAME["mixtral"]).config
    config.initializer_range = 0.5
    torch.manual_seed(0)
    model = overspill.from_config(config, **budgets("host", tmp_path))
    state = model.state_dict()
    experts = state["model.layers.0.mlp.experts.gate_up_proj"]
    assert experts.std() == pytest.approx(0.5, rel=0.1)
    assert len({float(expert.sum()) for expert in experts}) == len(experts)
    assert state["model.layers.0.self_attn.q_proj.weight"].std() == pytest.approx(0.5, rel=0.1)
    assert torch.equal(state["model.norm.weight"], torch.ones(config.hidden_size))
    loss = model(**make_batch(BY_NAME["mixtral"], model)).loss
    assert loss.isfinite()
    model.overspill.close()


@pytest.mark.parametrize(("record_buffers", "threads"), [(0, 8), (1, 4), (2, 2), (3, 1), (9, 1)])
def test_buffers_of_large_experts_stay_small(record_buffers: int, threads: int) -> None:
    """Threads that each hold an expert on its way to the disk, or in another dtype, are few."""
    record = 3 << 27
    assert reader_threads(record_buffers * record, most=4 * record) == threads

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import MixtralForCausalLM

import overspill
from overspill.core.errors import ConfigError
from overspill.train.finetune.config import FinetuneConfig, FinetuneModelSection
from overspill.train.finetune.lora import (
    add_lora,
    attention_layers,
    lora_targets,
    save_adapter,
)
from overspill.train.finetune.rows import collate
from overspill.train.finetune.spec import plan_finetuning
from tests.train.finetune.tiny import mixtral_config, save_switch, tiny_settings, write_pairs


def test_the_linear_layers_of_attention_are_found_and_no_others() -> None:
    model = MixtralForCausalLM(mixtral_config())
    names = attention_layers(model)
    assert len(names) == 8
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(ConfigError, match=r"no linear layers in attention.*--lora-targets"):
        attention_layers(nn.Sequential(nn.Linear(2, 2)))


def test_only_adapters_are_trained_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MixtralForCausalLM(mixtral_config())
    lora = add_lora(model, FinetuneModelSection(lora=3), seq2seq=False)
    trained = [(name, p) for name, p in lora.named_parameters() if p.requires_grad]
    assert all("lora_" in name and 3 in p.shape for name, p in trained)
    assert lora.peft_config["default"].lora_alpha == 6

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the state of the whole model was asked for")

    monkeypatch.setattr(nn.Module, "state_dict", refuse)
    save_adapter(lora, tmp_path)
    from safetensors.torch import load_file

    written = load_file(tmp_path / "adapter_model.safetensors")
    assert len(written) == len(trained) == 16
    assert sum(torch.numel(value) for value in written.values()) == sum(
        p.numel() for _, p in trained
    )


def test_an_adapter_names_its_base_as_it_is_found_from_anywhere(
    mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mixtral.parent)
    for given, named in (("mixtral", str(mixtral)), ("org/model", "org/model")):
        model = MixtralForCausalLM(mixtral_config())
        model.name_or_path = "/a/cache/of/the/hub"
        lora = add_lora(model, FinetuneModelSection(checkpoint=given, lora=3), seq2seq=False)
        assert lora.peft_config["default"].base_model_name_or_path == named
        family = lora.peft_config["default"].auto_mapping["parent_library"]
        assert family == "transformers.models.mixtral.modeling_mixtral"


def test_layers_that_cannot_have_adapters_are_named_before_weights_and_data_are_read(
    mixtral: Path, tmp_path: Path
) -> None:
    switch = save_switch(tmp_path / "switch")
    for folder, flags, error in [
        (switch, {"lora_experts": True}, "--lora-experts .* whose experts are separate modules"),
        (mixtral, {"lora_targets": "query"}, "--lora-targets query is not a linear layer"),
    ]:
        settings = tiny_settings(folder, tmp_path / "nowhere.jsonl", tmp_path / "run", lora=4)
        with pytest.raises(ConfigError, match=error):
            plan_finetuning(FinetuneConfig.make(settings | flags), lambda line: None)


def test_offloaded_experts_that_are_modules_have_no_stacks(tmp_path: Path) -> None:
    model = overspill.load(save_switch(tmp_path), device="cpu", quiet=True, progress=False)
    with pytest.raises(ConfigError, match="separate modules"):
        add_lora(model, FinetuneModelSection(lora=4, lora_experts=True), seq2seq=True)
    model.overspill.close()


def test_other_layers_than_those_of_attention_may_be_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    section = FinetuneModelSection(lora=2, lora_targets="0")
    assert lora_targets(model, section) == (["0"], [])


def test_with_adapters_every_slot_holds_an_expert(mixtral: Path, tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "a.jsonl")
    settings = tiny_settings(mixtral, data, tmp_path / "run", lora=4)
    settings |= {"mode": "host", "slots": 3}
    plan = plan_finetuning(FinetuneConfig.make(settings), lambda line: None)
    loaded = plan.load_model()
    model, engine = plan.prepare(loaded), loaded.overspill
    assert engine.placement.slots == 3
    for _ in range(2):
        model(**collate(plan.data.eval_rows, plan.pad, plan.device)).loss.backward()
    held = sum(len(engine.compute.streamer.plan.slots(layer)) for layer in range(engine.n_layers))
    assert held == 3
    engine.close()

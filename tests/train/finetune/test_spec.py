import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import NllbTokenizer

from overspill.core.errors import BudgetError, ConfigError
from overspill.models.huggingface.load import load_within
from overspill.models.huggingface.skeleton import model_class
from overspill.train.finetune.config import FinetuneConfig
from overspill.train.finetune.spec import (
    FinetuneSpec,
    choose_seq_len,
    freeze,
    load_tokenizer,
    plan_finetuning,
)
from tests.models.huggingface.refused import REFUSED
from tests.train.finetune.tiny import (
    make_tokenizer,
    mixtral_config,
    save_nllb,
    tiny_settings,
    write_pairs,
)


def _plan(checkpoint: Path, folder: Path, **changes: Any) -> FinetuneSpec:
    data = write_pairs(folder / "data.jsonl")
    settings = tiny_settings(checkpoint, data, folder / "run", **changes)
    return plan_finetuning(FinetuneConfig.make(settings), lambda line: None)


def test_sequences_are_as_long_as_the_model_allows() -> None:
    config = mixtral_config(max_position_embeddings=256)
    assert choose_seq_len(None, config) == 256
    assert choose_seq_len(256, config) == 256
    with pytest.raises(ConfigError, match=r"--seq-len 257 exceeds the 256 positions of this"):
        choose_seq_len(257, config)
    assert choose_seq_len(None, mixtral_config(max_position_embeddings=10**6)) == 1024


def test_steps_follow_from_epochs(mixtral: Path, tmp_path: Path) -> None:
    # 38 rows of 4 a step: 10 steps an epoch
    assert _plan(mixtral, tmp_path).steps == 10
    assert _plan(mixtral, tmp_path, epochs=2.5).steps == 25
    assert _plan(mixtral, tmp_path, epochs=0.01).steps == 1
    assert _plan(mixtral, tmp_path, accumulate=2).steps == 5
    assert _plan(mixtral, tmp_path, steps=7).steps == 7


def test_the_learning_rate_of_adapters_is_higher(mixtral: Path, tmp_path: Path) -> None:
    assert _plan(mixtral, tmp_path, lr=None).lr == 1e-5
    assert _plan(mixtral, tmp_path, lr=None, lora=2).lr == 1e-4
    assert _plan(mixtral, tmp_path, lr=0.5, lora=2).lr == 0.5
    assert _plan(mixtral, tmp_path, warmup=None, steps=100).warmup == 3


@pytest.mark.parametrize(
    ("changes", "frozen"),
    [
        ({}, False),
        ({"freeze_dense": True}, False),
        ({"freeze_experts": True}, True),
        ({"lora": 2}, True),
    ],
    ids=str,
)
def test_no_memory_is_planned_for_states_of_experts_that_are_not_trained(
    changes: dict[str, Any],
    frozen: bool,
    mixtral: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On several ranks too, whose models are always loaded for training."""
    load = load_within
    seen: list[Any] = []

    def training(*args: Any, train: bool, **options: Any) -> Any:
        model = load(*args, train=True, **options)
        seen.append(model.overspill.placement)
        return model

    monkeypatch.setattr("overspill.train.finetune.spec.load_within", training)
    spec = _plan(mixtral, tmp_path, **changes)
    model = spec.load_model()
    assert [placement.trains_experts for placement in seen] == [not frozen]
    model.overspill.close()


def test_a_checkpoint_without_a_tokenizer_is_one_line(mixtral: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(mixtral / name, bare)
    with pytest.raises(ConfigError, match=r"CHECKPOINT .*bare has no tokenizer; .* --tokenizer"):
        _plan(bare, tmp_path)
    assert _plan(bare, tmp_path, tokenizer=str(mixtral)).steps == 10
    (bare / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"--tokenizer .*bare: the tokenizer cannot be read \("):
        load_tokenizer(bare, "--tokenizer")


def test_languages_of_a_translation_are_those_that_are_asked_for(
    mixtral: Path, tmp_path: Path
) -> None:
    nllb = save_nllb(tmp_path / "nllb")
    words = ["<s>", "<pad>", "</s>", "<unk>", "▁", *"0123456789:"]
    NllbTokenizer(
        vocab={word: number for number, word in enumerate(words)},
        merges=[],
        extra_special_tokens=["eng_Latn", "fra_Latn", "deu_Latn"],
    ).save_pretrained(nllb)

    def plan(checkpoint: Path = nllb, **languages: str) -> FinetuneSpec:
        return _plan(checkpoint, tmp_path, **languages)

    german_to_french = plan(src_lang="deu_Latn", tgt_lang="fra_Latn")
    tokenizer = german_to_french.tokenizer
    german, french, english = (tokenizer.vocab[f"{name}_Latn"] for name in ("deu", "fra", "eng"))
    for row in german_to_french.data.train:
        assert (row.tokens[0], row.tokens[-1]) == (german, tokenizer.eos_token_id)
        assert (row.labels[0], row.labels[-1]) == (french, tokenizer.eos_token_id)
    tokenizer.save_pretrained(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved", "--tokenizer")
    assert again("1")["input_ids"][0] == german
    assert again(text_target="1")["input_ids"][0] == french
    assert plan().data.train[0].tokens[0] == english  # the tokenizer's own
    with pytest.raises(ConfigError, match=r"--tgt-lang French is none of the 3 .* such as eng_Lat"):
        plan(src_lang="deu_Latn", tgt_lang="French")
    with pytest.raises(ConfigError, match=r"--src-lang eng_Latn: the tokenizer .* no languages"):
        plan(mixtral, src_lang="eng_Latn")


def test_a_family_that_is_not_supported_is_named_before_data_is_read(tmp_path: Path) -> None:
    refused = next(family for family in REFUSED if family.name == "dbrx")
    refused.build().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"dbrx .*is not supported"):
        plan_finetuning(
            FinetuneConfig.make({"checkpoint": str(tmp_path), "data": ["/nowhere"]}),
            lambda line: pytest.fail(line),
        )


def test_what_is_not_there_is_named(mixtral: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="CHECKPOINT is missing"):
        plan_finetuning(FinetuneConfig.make({"data": ["x"]}), lambda line: None)
    with pytest.raises(ConfigError, match="DATA is missing"):
        plan_finetuning(FinetuneConfig.make({"checkpoint": str(mixtral)}), lambda line: None)


def test_balance_needs_a_model_that_has_it(mixtral: Path, tmp_path: Path) -> None:
    assert _plan(mixtral, tmp_path, balance=True).config.model.balance
    other = tmp_path / "other"
    shutil.copytree(mixtral, other)
    content = json.loads((other / "config.json").read_text())
    del content["output_router_logits"]
    (other / "config.json").write_text(json.dumps({**content, "model_type": "llama"}))
    with pytest.raises(ConfigError, match=r"--balance: llama has no load-balancing loss"):
        _plan(other, tmp_path, balance=True)


def test_placeholders_are_the_experts() -> None:
    model = torch.nn.Linear(2, 2)
    model.bias.is_expert_placeholder = True
    freeze(model, experts=True, dense=False)
    assert (model.weight.requires_grad, model.bias.requires_grad) == (True, False)
    freeze(model, experts=False, dense=True)
    assert (model.weight.requires_grad, model.bias.requires_grad) == (False, False)


def test_stages_on_a_gpu_leave_host_memory_for_activations(mixtral: Path, tmp_path: Path) -> None:
    plan = _plan(mixtral, tmp_path, stages=2, batch=3, accumulate=5, dtype="fp32")
    assert plan.budgets.host_reserved == 0  # a CPU has one memory
    budgets = dataclasses.replace(plan, device=torch.device("cuda")).budgets
    hidden = 3 * 256 * 16 * 4  # rounded up to a power of two
    assert budgets.host_reserved == 2 * 5 * 65536 >= 2 * 5 * hidden
    tight = dataclasses.replace(budgets, host_memory="600KiB", device="cpu")
    with pytest.raises(BudgetError, match=r"activations .* need 640.0 KiB.* is 600.0 KiB"):
        tight.request(torch.device("cpu"))


def test_the_size_of_a_checkpoint_is_known_before_it_is_loaded(
    mixtral: Path, tmp_path: Path
) -> None:
    spec = _plan(mixtral, tmp_path)
    with torch.device("meta"):
        total = sum(
            p.numel() for p in model_class(spec.model_config)(spec.model_config).parameters()
        )
    size = spec.model_size()
    config = spec.model_config
    experts = 3 * config.hidden_size * config.intermediate_size * config.num_local_experts
    assert size.experts == config.num_hidden_layers * experts
    assert size.dense == total - size.experts
    assert size.used == config.num_experts_per_tok / config.num_local_experts

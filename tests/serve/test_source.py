"""LoRA adapters that are served with their base model, against peft."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill import LLM
from overspill.core.errors import ConfigError
from overspill.models.budgets import Budgets
from overspill.models.huggingface.load import load_within
from overspill.serve.decode.structure import read_decoder
from tests.models.huggingface.adapters import Adapted, make_adapter, merged_by_peft
from tests.models.huggingface.families import make_model
from tests.serve.models import GREEDY, PROMPTS, family, plain_generate, tokens_of
from tests.slow import slow_rows
from tests.train.finetune.tiny import make_tokenizer

SETTINGS: dict[str, Any] = {"device": "cpu", "context": 64, "max_batch": 3}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapter(family("mixtral"), tmp_path_factory.mktemp("adapted"))


@pytest.mark.parametrize(
    "name",
    slow_rows(["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "minimax"], 0, 3, 4),
)
def test_a_served_adapter_gives_the_tokens_of_peft(name: str, tmp_path: Path) -> None:
    options = {"modules_to_save": ["lm_head"]} if name == "qwen2_moe" else {}
    made = make_adapter(family(name), tmp_path, **options)
    expected = [plain_generate(made.model, prompt) for prompt in PROMPTS]
    with LLM(made.base, adapter=made.folder, **SETTINGS) as llm:
        assert llm.adapter == made.folder
        fused = name in ("mixtral", "qwen2_moe", "gpt_oss")
        assert (read_decoder(llm.model, llm.context) is not None) is fused  # as without an adapter
        assert tokens_of(llm, PROMPTS) == expected
    with made.model.disable_adapter(), LLM(made.base, **SETTINGS) as llm:
        assert llm.adapter is None
        plain = tokens_of(llm, PROMPTS)
        assert plain == [plain_generate(made.model, prompt) for prompt in PROMPTS]
    assert plain != expected


def test_an_adapter_alone_is_served_with_the_base_that_it_names(adapted: Adapted) -> None:
    expected = [plain_generate(adapted.model, prompt) for prompt in PROMPTS]
    with LLM(adapted.folder, **SETTINGS) as llm:
        assert tokens_of(llm, PROMPTS) == expected


@pytest.mark.parametrize("where", ["gpu", "host"])
def test_weights_are_those_of_the_merged_checkpoint(where: str, tmp_path: Path) -> None:
    made = make_adapter(family("qwen3_moe"), tmp_path, torch.bfloat16)
    overspill.merge(made.folder, tmp_path / "out")
    shown = {"progress": False, "quiet": True}
    given = Budgets(device="cpu", mode="host", slots=3, dense_weights=where, **shown)
    model = load_within(made.base, given, None, train=False, adapter=made.folder)
    merged = load_within(tmp_path / "out", given, None, train=False)
    try:
        assert bool(model.overspill.placement.dense_weights) is (where == "host")
        mine, theirs = (dict(each.named_parameters()) for each in (model, merged))
        same = {name: torch.equal(mine[name], theirs[name]) for name in mine}
        assert all(same.values())
        assert len(same) > 20
    finally:
        model.overspill.close()
        merged.overspill.close()


def test_another_data_type_is_rounded_to_once(tmp_path: Path) -> None:
    """The checkpoint is float32: its weights are not rounded before the sum."""
    made = make_adapter(family("mixtral"), tmp_path)
    with LLM(made.folder, dtype=torch.bfloat16, **SETTINGS) as llm:
        served = {name: p.detach().clone() for name, p in llm.model.named_parameters()}
    for name, weight in merged_by_peft(made).items():
        if "experts" not in name:
            assert torch.equal(served[name], weight.bfloat16()), name


def test_pre_gates_of_the_base_are_served_with_the_adapter(tmp_path: Path) -> None:
    made = make_adapter(family("mixtral"), tmp_path)
    pregated: Any = overspill.pregate(make_model(family("mixtral"))).eval()
    pregated.save_pretrained(made.base)
    weights = merged_by_peft(made)
    pregated.load_state_dict(weights)
    expected = [plain_generate(pregated, prompt) for prompt in PROMPTS]
    with LLM(made.folder, mode="pre-gated", slots=2, **SETTINGS) as llm:
        assert tokens_of(llm, PROMPTS) == expected


def test_the_tokenizer_is_the_adapters_or_else_the_bases(tmp_path: Path) -> None:
    made = make_adapter(family("mixtral"), tmp_path)
    make_tokenizer("of the base").save_pretrained(made.base)
    with LLM(made.folder, **SETTINGS) as llm:
        assert llm.chat_template == "of the base"
    make_tokenizer("of the adapter").save_pretrained(made.folder)
    with LLM(made.base, adapter=made.folder, **SETTINGS) as llm:
        assert llm.chat_template == "of the adapter"


def test_adapters_in_wrong_places_are_refused(adapted: Adapted, tmp_path: Path) -> None:
    cases: list[tuple[Any, Any, str]] = [
        (adapted.base, adapted.base, "has no adapter_config.json: it is not a LoRA adapter"),
        (adapted.folder, adapted.folder, "are both LoRA adapters"),
        (adapted.base, tmp_path / "no" / "where", "where does not exist"),
    ]
    for model, adapter, message in cases:
        with pytest.raises(ConfigError, match=message):
            LLM(model, adapter=adapter, **SETTINGS)
    loaded = overspill.load(adapted.base, train=False, device="cpu", quiet=True, progress=False)
    with pytest.raises(ConfigError, match=r"adapter=.* needs a path as model"):
        LLM(loaded, adapter=adapted.folder)
    with LLM(loaded, context=64) as llm:
        assert llm.adapter is None
        assert tokens_of(llm, PROMPTS[:1], GREEDY)
    loaded.overspill.close()
    with pytest.raises(ConfigError, match=r"holds a LoRA adapter, .*overspill merge"):
        overspill.load(adapted.folder, train=False, device="cpu")


def test_a_missing_base_is_named(tmp_path: Path) -> None:
    made = make_adapter(family("mixtral"), tmp_path)
    made.base.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"base model of the adapter .*base does not.*--adapter"):
        LLM(made.folder, **SETTINGS)
    with LLM(tmp_path / "moved", adapter=made.folder, **SETTINGS) as llm:
        assert json.loads((made.folder / "adapter_config.json").read_text())["r"] == 3
        assert tokens_of(llm, PROMPTS[:1])

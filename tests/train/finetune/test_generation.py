"""Answers of the model that is being trained, against `generate` of plain transformers."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    MixtralForCausalLM,
)

import overspill
from overspill.train.finetune.encoding import target_prefix
from overspill.train.finetune.generation import Generator
from overspill.train.finetune.questions import Question, Questions
from overspill.train.finetune.rows import ids
from overspill.train.team import Team
from tests.train.finetune.tiny import (
    END,
    PAD,
    VOCAB,
    mixtral_config,
    save_mixtral,
    save_nllb,
    save_switch,
)

SEQ_LEN = 32
CAUSAL, SEQ2SEQ = AutoModelForCausalLM, AutoModelForSeq2SeqLM
FAMILIES: dict[str, Any] = {"mixtral": save_mixtral, "switch": save_switch, "nllb": save_nllb}
NO_DROPS = {"moe_token_dropout": 0.0, "encoder_layerdrop": 0.0}


def questions(start: list[int], ends: frozenset[int]) -> Questions:
    """Prompts of different lengths, with limits of different lengths."""
    generator = torch.Generator().manual_seed(1)
    prompts = (torch.randint(0, 250, (n,), generator=generator) for n in (5, 1, 9, 3, 17, 2, 8))
    most = itertools.cycle((12, 10, 11))
    items = [
        Question("f:1", ids(prompt.tolist()), ("a",), longest)
        for prompt, longest in zip(prompts, most, strict=False)
    ]
    return Questions(items, ends, start)


def generated(model: Any, question: Question, start: list[int], ends: frozenset[int]) -> list[int]:
    """The oracle: one prompt alone, without padding."""
    prompt = torch.tensor(question.prompt[None]).long()
    begins: dict[str, Tensor] = {"decoder_input_ids": torch.tensor([start])} if start else {}
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=question.most,
        eos_token_id=sorted(ends),
        pad_token_id=PAD,
        **begins,
    )[0].tolist()
    new = tokens[len(start) if start else len(question.prompt) :]
    return list(itertools.takewhile(lambda token: token not in ends, new))


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_generate(family: str, tmp_path: Path) -> None:
    """With a slot budget that evicts experts, and in batches with padding."""
    changes = NO_DROPS if family == "nllb" else {}
    auto = CAUSAL if family == "mixtral" else SEQ2SEQ
    plain = auto.from_pretrained(FAMILIES[family](tmp_path / "model"), **changes).eval()
    generator = torch.Generator().manual_seed(2)
    # else answers are one token again and again
    plain.config.tie_word_embeddings = False
    plain.lm_head.weight = torch.nn.Parameter(torch.empty(VOCAB, 16))
    for parameter in plain.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    start = [plain.config.decoder_start_token_id, 7] if family != "mixtral" else []
    # some answers end early, others at their limit
    first = [
        generated(plain, q, start, frozenset({VOCAB - 1}))
        for q in questions(start, frozenset()).items
    ]
    assert len({token for answer in first for token in answer}) > 5, "a test of constant answers"
    ends = frozenset({END, first[0][-1], first[1][2]})
    asked = questions(start, ends)
    model = copy.deepcopy(plain).train()
    overspill.offload(model, device="cpu", mode="host", slots=3, progress=False)
    plan = Generator(asked, Team(), torch.device("cpu"), PAD, 2, SEQ_LEN)
    before = torch.get_rng_state()
    found = plan.answers(model.eval())
    assert torch.equal(torch.get_rng_state(), before), "later dropout is as without answers"
    model.overspill.close()
    expected = [generated(plain, question, start, ends) for question in asked.items]
    assert found == expected
    limits = [question.most for question in asked.items]
    assert {len(answer) == most for answer, most in zip(found, limits, strict=True)} == {
        True,
        False,
    }


def test_a_pre_gated_model_answers_as_without_a_cache(tmp_path: Path) -> None:
    torch.manual_seed(3)
    plain = MixtralForCausalLM(mixtral_config(num_hidden_layers=3)).train()
    model = overspill.offload(plain, device="cpu", mode="host", slots=3, progress=False, quiet=True)
    overspill.pregate(model, level=1)
    for name, parameter in model.named_parameters():
        if "gate" in name:  # pre-gates begin as the gates of their blocks
            torch.nn.init.normal_(parameter.data)
    model.eval()
    asked = questions([], frozenset())
    found = Generator(asked, Team(), torch.device("cpu"), PAD, 2, SEQ_LEN).answers(model)
    for question, answer in zip(asked.items, found, strict=True):
        tokens = question.prompt.tolist()
        for token in answer:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            assert token == logits[0, -1].argmax()
            tokens.append(token)
    model.overspill.close()


def test_the_target_of_a_translation_begins_with_its_language(mixtral: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(mixtral)
    assert target_prefix(tokenizer) == []

    class Translates:
        def __call__(self, add_special_tokens: bool, **texts: Any) -> Any:
            bare = tokenizer(texts["text_target"], add_special_tokens=False)["input_ids"]
            around = [[250, *tokens, END] for tokens in bare]
            return {"input_ids": around if add_special_tokens else bare}

    assert target_prefix(Translates()) == [250]

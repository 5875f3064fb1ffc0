"""Answers of the model that is being trained, against `generate` of plain transformers."""

import copy
import dataclasses
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    MixtralForCausalLM,
    SwitchTransformersForConditionalGeneration,
)

import overspill
from overspill.models.checkpoint_presets import preset_config
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
    ends = frozenset({END, VOCAB - 1, first[0][-1], first[1][2]})
    asked = questions(start, ends)
    model = copy.deepcopy(plain).train()
    overspill.offload(model, device="cpu", mode="host", slots=3, progress=False)
    plan = Generator(asked, Team(), torch.device("cpu"), PAD, 2, SEQ_LEN)
    before = torch.get_rng_state()
    found = plan.answers(model.eval())
    assert torch.equal(torch.get_rng_state(), before), "later dropout is as without answers"
    model.overspill.close()
    expected = [[*itertools.takewhile(lambda token: token not in ends, each)] for each in first]
    assert found == expected
    limits = [question.most for question in asked.items]
    assert {len(answer) == most for answer, most in zip(found, limits, strict=True)} == {
        True,
        False,
    }


@pytest.mark.parametrize("family", ["mixtral", "switch"])
def test_a_pre_gated_model_answers_as_without_a_cache(family: str) -> None:
    torch.manual_seed(3)
    start = [PAD] if family == "switch" else []
    plain = (
        SwitchTransformersForConditionalGeneration(
            preset_config(
                "switch-base-8", layers=4, experts=4, vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=24,
                num_heads=2, pad_token_id=PAD, dropout_rate=0.0, tie_word_embeddings=False,
            )
        )
        if family == "switch"
        else MixtralForCausalLM(mixtral_config(num_hidden_layers=3))
    )  # fmt: skip
    model: Any = overspill.offload(
        plain.train(), device="cpu", mode="host", slots=3, progress=False, quiet=True
    )
    overspill.pregate(model, level=1)
    for name, parameter in model.named_parameters():
        if "gate" in name:  # pre-gates begin as the gates of their blocks
            torch.nn.init.normal_(parameter.data)
    model.eval()
    asked = questions(start, frozenset())
    found = Generator(asked, Team(), torch.device("cpu"), PAD, 2, SEQ_LEN).answers(model)
    for question, answer in zip(asked.items, found, strict=True):
        prompt = question.prompt.tolist()
        tokens = torch.tensor([(start or prompt) + answer[:-1]])
        inputs = {"input_ids": tokens}
        if start:
            inputs = {"input_ids": torch.tensor([prompt]), "decoder_input_ids": tokens}
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits
        assert answer == logits[0, -len(answer) :].argmax(-1).tolist()
    model.overspill.close()


class Rank(Team):
    """One of two threads that divide batches as ranks do."""

    barrier = threading.Barrier(2, timeout=60)
    said: ClassVar[list[Any]] = [None, None]
    number = 0

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.part = 2, self.number

    def _exchange(self, value: Any) -> list[Any]:
        self.said[self.number] = value
        self.barrier.wait()
        values = list(self.said)
        self.barrier.wait()
        return values

    def any(self, value: bool) -> bool:
        return any(self._exchange(value))

    def gather_parts(self, value: Any) -> list[Any]:
        return self._exchange(value)


class SecondRank(Rank):
    number = 1


def test_ranks_that_divide_the_questions_find_the_same_answers() -> None:
    """Both call the model equally often, though their answers have different lengths."""
    torch.manual_seed(3)
    model = MixtralForCausalLM(mixtral_config()).eval()
    asked = questions([], frozenset())
    asked = dataclasses.replace(asked, items=asked.items[:5])  # a rank has no question in the end
    calls: dict[str, int] = {}

    def run(team: Team) -> list[list[int]]:
        own = copy.deepcopy(model)
        name = type(team).__name__
        own.register_forward_hook(lambda *_: calls.update({name: calls.get(name, 0) + 1}))
        return Generator(asked, team, torch.device("cpu"), PAD, 1, SEQ_LEN).answers(own)

    alone = run(Team())
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, [Rank(), SecondRank()])) == [alone, alone]
    assert calls["Rank"] == calls["SecondRank"]


def test_the_target_of_a_translation_begins_with_its_language(mixtral: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(mixtral)
    assert target_prefix(tokenizer) == []

    class Translates:
        def __call__(self, add_special_tokens: bool, **texts: Any) -> Any:
            bare = tokenizer(texts["text_target"], add_special_tokens=False)["input_ids"]
            around = [[250, *tokens, END] for tokens in bare]
            return {"input_ids": around if add_special_tokens else bare}

    assert target_prefix(Translates()) == [250]

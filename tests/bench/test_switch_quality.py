"""The benchmark of pre-gates on a Switch Transformer, with a toy: its texts, calls and record."""

import gzip
import importlib
import json
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

WORDS = ("the", "Town", "film", "of", "1984", "is", "good", "it", "was", "River")


@pytest.fixture
def bench(scripts: None) -> ModuleType:
    return importlib.import_module("switch_quality")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder like that of the data, with drawn words."""
    draw = random.Random(0)

    def text(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    def question(context: str) -> dict[str, Any]:
        answers = [{"text": word, "answer_start": 0} for word in context.split()[2:4]]
        return {"id": "1", "question": f"what {text(3)}?", "answers": answers}

    contexts = [text(30) for _ in range(8)]
    articles = [{"paragraphs": [{"context": each, "qas": [question(each)]}]} for each in contexts]
    web = [{"qId": "w", "qText": text(5), "answers": ["Town", "River"]} for _ in range(4)]
    files = {
        "wikitext-2/train.txt.gz": "\n".join([" = Title = ", *(text(25) for _ in range(20))]),
        "squad/dev-v1.1.json.gz": json.dumps({"data": articles}),
        **{
            f"webquestions/{name}.json.gz": json.dumps(web)
            for name in ("trainmodel", "val", "test")
        },
    }
    for name, content in files.items():
        file = tmp_path / "data" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(content.encode()))
    return tmp_path / "data"


def test_examples_have_answers_that_can_be_found(data: Path, scripts: None) -> None:
    texts = importlib.import_module("switch_text")
    train, test = texts.squad(data)
    assert (len(train), len(test)) == (6, 2)  # of every 6th article
    for example in train + test:
        assert example["completion"] == f" {example['answers'][0]}"
        assert example["answers"][0] in example["prompt"].partition(" context: ")[2]
    assert len(test[0]["answers"]) == 2
    passages = texts.passages(data)
    assert len(passages) == 20 + 6
    assert not any(f"context: {passage}" in one["prompt"] for passage in passages for one in test)
    corrupted, cloze = list(texts.pretraining(passages, 2, seed=3))
    rebuilt = corrupted["prompt"]
    for sentinel in texts.SENTINELS:
        _, found, rest = corrupted["completion"].partition(f"{sentinel} ")
        if found:
            rebuilt = rebuilt.replace(sentinel, rest.partition(" <extra_id_")[0])
    assert rebuilt in passages
    question, _, passage = cloze["prompt"].partition(" context: ")
    assert passage in passages
    assert question.count("<extra_id_0>") == 1
    assert cloze["answers"][0] in passage
    assert texts._plain(" I @-@ 95 costs $ 1 @,@ 000 ( about ) , he 's") == (
        " I-95 costs $1,000 (about), he's"
    )


def test_the_balance_loss_is_that_of_the_paper(scripts: None) -> None:
    module = importlib.import_module("switch_balance")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = torch.nn.ModuleDict({"router": torch.nn.Module()})
            self.encoder["router"].classifier = torch.nn.Linear(3, 4)

        def forward(self, attention_mask: Any, labels: Any) -> Any:
            self.encoder["router"].classifier(states)
            return SimpleNamespace(loss=torch.tensor(1.0))

    torch.manual_seed(0)
    states, mask = torch.randn(2, 5, 3), torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
    model = Model()
    balance = module.Balance(model)
    loss = model(attention_mask=mask, labels=torch.zeros(2, 1)).loss
    probabilities = model.encoder["router"].classifier(states).softmax(-1)[mask > 0]
    shares = [(probabilities.argmax(1) == expert).sum() / 8 for expert in range(4)]
    expected = 4 * sum(share * p for share, p in zip(shares, probabilities.mean(0), strict=True))
    assert loss.item() == pytest.approx(1 + 0.01 * expected.item())
    assert balance.most_used == pytest.approx(float(max(shares)))
    assert model.eval()(attention_mask=mask, labels=None).loss == 1


def call(bench: ModuleType, patch: pytest.MonkeyPatch, data: Path, flags: str = "") -> int:
    folders = ["--data", str(data), "--work", str(data / "work"), "--out", str(data / "out")]
    patch.setattr(sys, "argv", ["bench/switch_quality.py", *folders, "--smoke", *flags.split()])
    return int(bench.main())


def check(bench: ModuleType, out: Path) -> None:
    record = json.loads((out / "switch-quality.json").read_text())
    names = {
        f"{task}_n{level}_{score}"
        for task in bench.TASKS for level in bench.LEVELS for score in ("em", "f1")
    }  # fmt: skip
    assert record["metrics"].keys() == names
    assert [row["N"] for row in record["table"]] == ["0", "1", "2", "3"]
    assert "paper" in " ".join(record["table"][0])
    assert (out / "switch-quality.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_call_continues_an_earlier_one(
    bench: ModuleType,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:  # a run begins, and is stopped after its first step
        patch.setattr(bench, "_START_S", -1e9)
        patch.setattr(bench, "_END_S", 1e9)
        assert call(bench, patch, data) == 1
    assert "not complete (pre-training, seed 0): repeat this command" in capsys.readouterr().out
    (work,) = (data / "work").iterdir()
    assert (work / "base-0" / "checkpoints" / "step-00000001").exists()
    missing = ("webquestions", 0, 1)
    lines = [
        bench.Measurement(task, 0, level, 3.0, {"em": 0.25, "f1": level / 4})
        for task in bench.TASKS for level in bench.LEVELS if (task, 0, level) != missing
    ]  # fmt: skip
    bench.write(work / "measurements.jsonl", map(vars, lines))
    assert call(bench, monkeypatch, data) == 0
    shown = capsys.readouterr().out
    assert "-- pre-training, seed 0, continued" in shown
    assert shown.count("-- webquestions, seed 0, N = 1") == 1
    check(bench, data / "out")
    found = [json.loads(line) for line in (work / "measurements.jsonl").read_text().splitlines()]
    assert len(found) == 8
    assert (found[-1]["task"], found[-1]["level"]) == ("webquestions", 1)
    assert call(bench, monkeypatch, data, "--minutes 0") == 0, "everything is there"


@pytest.mark.slow
def test_the_whole_benchmark_runs(
    bench: ModuleType, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(bench, monkeypatch, data) == 0
    check(bench, data / "out")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_models_are_tuned_at_the_same_time(
    bench: ModuleType, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "LEVELS", (0, 2))
    assert call(bench, monkeypatch, data, "--parallel 4") == 0
    record = json.loads((data / "out" / "switch-quality.json").read_text())
    assert [row["N"] for row in record["table"]] == ["0", "2"]

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from transformers import SwitchTransformersConfig

from overspill.core.errors import ConfigError
from overspill.train.finetune.classification import ChoiceRows
from overspill.train.finetune.config import FinetuneDataSection
from overspill.train.finetune.data import FinetuneData, load_data
from overspill.train.finetune.kinds import Kind
from overspill.train.finetune.rows import IGNORED
from tests.train.finetune.tiny import (
    VOCAB,
    make_tokenizer,
    mixtral_config,
    write_jsonl,
    write_labels,
    write_pairs,
)

TEMPLATE = "{% for m in messages %}{{ m.content }};{% endfor %}"


def _load(
    path: Path,
    seq_len: int = 32,
    config: Any = None,
    seed: int = 0,
    lines: int = 2,
    **settings: Any,
) -> FinetuneData:
    said: list[str] = []
    section = FinetuneDataSection(data=(str(path),), **settings)
    tokenizer, config = make_tokenizer(TEMPLATE), config or mixtral_config()
    data = load_data(section, tokenizer, seq_len, config, seed, said.append)
    assert len(said) == lines
    return data


def _texts(path: Path, count: int = 20) -> Path:
    return write_jsonl(path, [{"text": f"{n:03d}" * 5} for n in range(count)])


def _chats(path: Path) -> Path:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    return write_jsonl(path, [{"messages": turns}] * 10)


def test_text_and_chat_are_packed_unless_asked_not_to_be(tmp_path: Path) -> None:
    texts, chats = _texts(tmp_path / "a.jsonl"), _chats(tmp_path / "b.jsonl")
    packed = _load(texts, eval_split=0.0)
    assert [len(row.tokens) for row in packed.train] == [32] * 10  # 20 texts of 16 tokens
    assert all(len(row.tokens) == 16 for row in _load(texts, packing=False).train)
    assert len(_load(chats, eval_split=0.0).train) == 4  # 9 tokens each and an end: 3 fit
    assert len(_load(chats, eval_split=0.0, packing=False).train) == 10


def test_pairs_are_packed_when_asked_to_be(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "a.jsonl", 20)
    alone, packed = _load(pairs), _load(pairs, packing=True)
    assert len(alone.train) == 19
    assert len(packed.train) < 10
    assert sum(r.learned for r in packed.train) == sum(r.learned for r in alone.train)


def test_the_first_token_of_a_row_is_never_learned(tmp_path: Path) -> None:
    for packing in (True, False):
        data = _load(_texts(tmp_path / "a.jsonl"), packing=packing)
        assert all(row.labels[0] == IGNORED for row in [*data.train, *data.eval_rows])


def test_a_long_text_is_split_and_other_examples_are_refused(tmp_path: Path) -> None:
    texts = _texts(tmp_path / "a.jsonl")
    short = _load(texts, seq_len=6, packing=False, eval_split=0.0)
    assert [len(row.tokens) for row in short.train] == [6, 6, 4] * 20
    pairs = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "p" * 9, "completion": "c"}] * 2)
    with pytest.raises(ConfigError, match=r"b\.jsonl:\d: 11 tokens exceed --seq-len 8"):
        _load(pairs, seq_len=8, eval_split=0.0)
    cut = _load(pairs, seq_len=8, eval_split=0.0, truncate=True)
    assert [row.learned for row in cut.train] == [2, 2]
    with pytest.raises(ConfigError, match=r"c\.jsonl:\d: 9 tokens exceed --seq-len 4"):
        _load(_chats(tmp_path / "c.jsonl"), seq_len=4)
    with pytest.raises(ConfigError, match=r"c\.jsonl:\d: no learned token is left"):
        _load(tmp_path / "c.jsonl", seq_len=3, truncate=True)


def test_the_split_is_a_share_and_never_trained_on(tmp_path: Path) -> None:
    path = _texts(tmp_path / "a.jsonl", 100)
    data = _load(path, packing=False, eval_split=0.2)
    train = {row.where for row in data.train}
    held_out = {row.where for row in data.eval_rows}
    assert (len(train), len(held_out), train & held_out) == (80, 20, set())
    assert {row.where for row in _load(path, packing=False, eval_split=0.2).eval_rows} == held_out
    other = _load(path, packing=False, eval_split=0.2, seed=1)
    assert {row.where for row in other.eval_rows} != held_out
    assert len(_load(path, packing=False, eval_split=0.2, eval_examples=3).eval_rows) == 3
    assert not _load(path, eval_split=0.0).evaluates


def test_of_plain_text_few_sequences_are_evaluated(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{i} {'word ' * 40}\n" for i in range(300)))

    def load(file: Path, **settings: Any) -> FinetuneData:
        return _load(file, lines=3, eval_split=0.2, **settings)

    every, some = (load(path, eval_examples=n).eval_rows for n in (1000, 4))
    assert len(every) > 20
    assert [row.tokens.tolist() for row in some] == [
        every[i * len(every) // 4].tokens.tolist() for i in range(4)
    ]
    assert len(load(path, eval_data=str(path), eval_examples=4).eval_rows) > 20, "all of a file"
    long = write_jsonl(tmp_path / "b.jsonl", [{"text": "word " * 400}] * 10)
    assert len(_load(long, eval_split=0.2, eval_examples=2).eval_rows) > 20


def test_a_file_to_evaluate_on_is_not_trained_on(tmp_path: Path) -> None:
    path, other = _texts(tmp_path / "a.jsonl"), _texts(tmp_path / "b.jsonl", 3)
    data = _load(path, packing=False, eval_data=str(other))
    assert (len(data.train), len(data.eval_rows)) == (20, 3)
    assert data.digest != _load(path, packing=False).digest
    pairs = write_pairs(tmp_path / "c.jsonl")
    with pytest.raises(ConfigError, match=r"c\.jsonl:1: expected .*\"text\", found an object with"):
        _load(path, eval_data=str(pairs))


def test_the_digest_is_of_all_that_decides_the_tokens(tmp_path: Path) -> None:
    path = _texts(tmp_path / "a.jsonl")
    settings: list[dict[str, Any]] = [
        {}, {"seed": 1}, {"seq_len": 31}, {"packing": False}, {"eval_split": 0.0},
    ]  # fmt: skip
    assert _load(path).digest == _load(path).digest
    assert len({_load(path, **setting).digest for setting in settings}) == len(settings)
    words = write_labels(tmp_path / "a.tsv")
    assert _load(words, labels="a,b").digest != _load(words, labels="a,c").digest


def test_labels_of_the_evaluation_must_be_known(tmp_path: Path) -> None:
    train, dev = write_labels(tmp_path / "a.tsv"), tmp_path / "dev.tsv"
    dev.write_text("sentence\tlabel\nfine\t0\nodd\t2\n")
    with pytest.raises(ConfigError, match=r"dev\.tsv:3: expected a label from 0 to 1 .*'2'"):
        _load(train, eval_data=str(dev))
    data = _load(train, labels="a,b,c", eval_data=str(dev))
    assert [choice.label for choice in data.eval_choices] == [0, 2]
    assert all(len(choice.answers) == 3 for choice in data.eval_choices)


def test_rows_of_labels_are_not_kept(tmp_path: Path) -> None:
    """1,000 examples of 500 labels: the rows of all labels would take 300 MB."""
    path = tmp_path / "a.tsv"
    lines = [f"{n} {'word ' * 8}\t{n % 500}" for n in range(1000)]
    path.write_text("\n".join(["sentence\tlabel", *lines]))
    tracemalloc.start()
    data = _load(path, seq_len=128, eval_split=0.05)
    for tokens in data.tokens:  # as the check of the vocabulary
        assert len(tokens)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(data.train), len(ChoiceRows(data.eval_choices))) == (950, 50 * 500)
    assert peak < 16 << 20


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("text", {"labels": "a,b"}, r"--labels is for \.tsv data"),
        ("text", {"chat_template": "x"}, r"--chat-template is for data with chat"),
        ("labels", {"packing": True}, r"--packing is not supported for classification"),
        ("single", {}, r"--eval-split 0\.05 takes every example of DATA \(it has 1\)"),
    ],
)
def test_settings_that_do_not_go_with_the_data(
    tmp_path: Path, kind: str, settings: dict[str, Any], message: str
) -> None:
    path = {
        "text": _texts(tmp_path / "a.jsonl"),
        "labels": write_labels(tmp_path / "a.tsv"),
        "single": _texts(tmp_path / "b.jsonl", 1),
    }[kind]
    with pytest.raises(ConfigError, match=message):
        _load(path, **settings)


def test_an_encoder_decoder_needs_sources_and_targets(tmp_path: Path) -> None:
    config = SwitchTransformersConfig(vocab_size=VOCAB)
    for path in (_texts(tmp_path / "a.jsonl"), _chats(tmp_path / "b.jsonl")):
        with pytest.raises(
            ConfigError, match=rf"{path.name}:1: an encoder-decoder model needs a s"
        ):
            _load(path, config=config)
    pairs = write_pairs(tmp_path / "c.jsonl")
    with pytest.raises(ConfigError, match="--packing is not supported for an encoder"):
        _load(pairs, config=config, packing=True)
    row = _load(pairs, config=config, eval_split=0.0).train[0]
    content = json.loads(pairs.read_text().splitlines()[0])
    tokenizer = make_tokenizer()
    assert tokenizer.decode(row.tokens) == content["prompt"]
    assert tokenizer.decode(row.labels) == content["completion"] + "<end>"


def test_rows_of_alpaca_are_chats_if_there_is_a_template(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "a.jsonl", [{"instruction": "Add.", "output": "5"}] * 2)
    tokenizer, settings = make_tokenizer(TEMPLATE), {"eval_split": 0.0, "packing": False}
    row = _load(rows, 256, lines=3, **settings).train[0]
    assert tokenizer.decode(row.tokens) == "Add.;5;"
    section = FinetuneDataSection(data=(str(rows),), **settings)
    said: list[str] = []
    for plain, config in (
        (make_tokenizer(), mixtral_config()),
        (tokenizer, SwitchTransformersConfig(vocab_size=VOCAB)),
    ):
        data = load_data(section, plain, 256, config, 0, said.append)
        assert data.kind is Kind.PAIR
        assert tokenizer.decode(data.train[0].labels[-2:]) == "5<end>"
    assert said[0] == "data: instructions become pairs, with the prompt of Alpaca"


def test_a_foreign_tokenizer_is_told_before_the_model_crashes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"produces token 256, the model's vocabulary has 250"):
        _load(_texts(tmp_path / "a.jsonl"), config=mixtral_config(vocab_size=250))

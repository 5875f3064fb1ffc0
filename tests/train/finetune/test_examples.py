import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from overspill.core.errors import ConfigError
from overspill.train import data
from overspill.train.finetune import examples
from overspill.train.finetune.examples import read_examples
from overspill.train.finetune.kinds import Chat, Kind, Labelled, Pair, Text
from tests.train.finetune.tiny import write_jsonl

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


def test_each_kind_is_told_from_its_first_line(tmp_path: Path) -> None:
    text = write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two", "id": 7}])
    pair = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "1+1=", "completion": "2"}])
    chat = write_jsonl(tmp_path / "c.jsonl", [{"messages": TURNS}])
    table = tmp_path / "d.tsv"
    table.write_text("sentence\tlabel\nfine \t1\r\n\nbad\t0\n")
    assert read_examples([str(text)]).items == [Text(f"{text}:1", "one"), Text(f"{text}:2", "two")]
    assert read_examples([str(pair)]).items == [Pair(f"{pair}:1", "1+1=", "2")]
    assert read_examples([str(chat)]).items == [Chat(f"{chat}:1", TURNS)]
    found = read_examples([str(table)])
    assert found.kind is Kind.LABELLED
    assert found.items == [
        Labelled(f"{table}:2", "fine", "1"),
        Labelled(f"{table}:4", "bad", "0"),
    ]


def test_folders_several_files_and_gz(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    write_jsonl(folder / "b.jsonl", [{"text": "second"}])
    with gzip.open(folder / "a.jsonl.gz", "wt") as out:
        out.write('{"text": "first"}\n')
    (folder / "notes.txt").write_text("not data")
    last = write_jsonl(tmp_path / "last.jsonl", [{"text": "third"}])
    found = read_examples([str(folder), str(last)])
    assert [item.text for item in found.items if isinstance(item, Text)] == [
        "first",
        "second",
        "third",
    ]


def test_plain_text_is_divided_into_examples_of_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "_BLOCK_CHARS", 7)
    folder = tmp_path / "texts"
    (folder / ".hidden").mkdir(parents=True)
    (folder / ".hidden" / "c.txt").write_text("not read")
    (folder / "image.png").write_bytes(b"\x89PNG")
    (folder / "b.PY").write_text("one = 1\ntwo = 2\n\n\n\n\n\n\n\n\n\nlast")
    with gzip.open(folder / "a.txt.gz", "wt") as out:
        out.write("a longer first line\n")
    found = read_examples([str(folder)])
    assert found.kind is Kind.TEXT
    first, second = folder / "a.txt.gz", folder / "b.PY"
    assert found.items == [
        Text(f"{first}:1", "a longer first line\n"),
        Text(f"{second}:1", "one = 1\n"),
        Text(f"{second}:2", "two = 2\n"),
        Text(f"{second}:11", "\nlast"),
    ]
    chats = write_jsonl(tmp_path / "chats.jsonl", [{"messages": TURNS}])
    with pytest.raises(ConfigError, match=r'a\.txt\.gz:1: expected .* "messages" .*, found text$'):
        read_examples([str(chats), str(folder)])
    damaged = tmp_path / "damaged.txt.gz"
    damaged.write_bytes(first.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"--eval-data: .*damaged.txt.gz cannot be read"):
        read_examples([str(damaged)], "--eval-data")


@pytest.mark.parametrize("name", ["text.txt", "text.txt.gz"])
def test_text_that_is_not_utf_8_or_damaged_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    content = "text\n".encode("utf-16")
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(ConfigError, match=r"cannot be read .*utf-8"):
        read_examples([str(path)])
    if name.endswith(".gz"):
        packed = bytearray(gzip.compress(bytes(range(256)) * 40))
        packed[20:40] = b"\xff" * 20
        for damaged in (path, tmp_path / "a.jsonl.gz"):
            damaged.write_bytes(packed)
            with pytest.raises(ConfigError, match="cannot be read"):
                read_examples([str(damaged)])


def test_hidden_and_missing_data_of_a_folder_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / ".parts").mkdir()
    write_jsonl(tmp_path / ".parts" / "a.jsonl", [{"text": "one"}])
    assert len(read_examples([str(tmp_path)]).items) == 1
    (tmp_path / "b.jsonl").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"b\.jsonl cannot be read"):
        read_examples([str(tmp_path)])


def test_the_sources_of_python_are_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_STDLIB_BYTES", 1 << 18)
    monkeypatch.chdir(tmp_path)
    items = read_examples([data.STDLIB]).items
    assert len(items) > 3
    assert sum(len(item.text) for item in items if isinstance(item, Text)) > 1 << 16
    write_jsonl(tmp_path / "stdlib", [{"text": "one"}])
    with pytest.raises(ConfigError, match=r"write \./stdlib for that"):
        read_examples([data.STDLIB])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r':2: expected a JSON object with a string "text", found \'{\''),
        ("[1]", r':2: expected a JSON object with a string "text", found \'\[1\]\''),
        ("{}", r':2: expected .* "text", found an empty object'),
        ('{"txt": "a"}', r':2: expected .* "text", found an object with "txt"'),
        ('{"text": 3}', r':2: expected .* "text", found "text" = 3'),
        ('{"text": ""}', r':2: expected .* "text", found an empty "text"'),
        ('{"prompt": "a", "completion": "b"}', r':2: expected .* "text", found an object with'),
        ("x" * 100, r":2: expected .* found 'x{40}…'"),
        ('{"text": ' + "[" * 100_000, r":2: expected .* found '\{\"text\": \[{31}…'$"),
        ('{"text": ' + "9" * 5000 + "}", r":2: expected .* found '\{\"text\": 9{31}…'$"),
        (
            '{"text": ' + "[" * 900 + "]" * 900 + "}",
            r":2: expected .* found \"text\" = (\[{40}…|deep)",
        ),
    ],
)
def test_a_bad_line_of_text_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_examples([str(path)])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"words": 1}', ':1: expected a JSON object with "text", with "prompt" and "completion"'),
        ("nonsense", ":1: expected a JSON object, found 'nonsense'"),
        ('{"prompt": "a"}', ':1: expected .* "prompt" and "completion", found an object with'),
        ('{"prompt": "", "completion": "b"}', 'found an empty "prompt"'),
        (
            '{"messages": "Hi"}',
            ':1: expected .* "messages" of objects .*, found "messages" = \'Hi\'',
        ),
        ('{"messages": ["Hi"]}', "found message 1 = 'Hi'"),
        ('{"messages": [{"role": "user"}]}', "found message 1 without a string 'content'"),
        ('{"messages": [{"role": 1, "content": "a"}]}', "found message 1 without a string 'role'"),
        ('{"messages": [{"role": "user", "content": "a"}]}', 'role "assistant" .*, found none'),
    ],
)
def test_a_bad_first_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_examples([str(path)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "text\tlabel\na\t1\n",
            r":1: expected the header sentence<TAB>label, found 'text\\tlabel'",
        ),
        ("a\t1\n", r":1: expected the header"),
        ("sentence\tlabel\na\n", ":2: expected a sentence, a tab and a label, found 1 columns"),
        ("sentence\tlabel\na\t1\t2\n", ":2: expected .*, found 3 columns"),
        ("sentence\tlabel\na\t1\n\t1\n", ":3: expected .*, found an empty sentence"),
        ("sentence\tlabel\na\t \n", ":2: expected .*, found an empty label"),
        ("sentence\tlabel\n", "has no examples"),
    ],
)
def test_a_bad_table_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_examples([str(path)])


def test_files_of_two_kinds_are_refused(tmp_path: Path) -> None:
    text = write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    table = tmp_path / "b.tsv"
    table.write_text("sentence\tlabel\nfine\t1\n")
    with pytest.raises(ConfigError, match=r"b\.tsv:2: expected text, found a sentence, a tab"):
        read_examples([str(text), str(table)])
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: expected a sentence, a tab .* found JSON"):
        read_examples([str(table), str(text)])


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", '{"text": "one"}', {"text": "one"}),
        (
            "a.jsonl",
            '{"prompt": "a", "completion": "b"}',
            {"prompt": "a", "completion": "b", "answers": ()},
        ),
        ("a.tsv", "sentence\tlabel\nfine\t1", {"sentence": "fine", "label": "1"}),
        ("a.txt", "one", {"text": "one"}),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_may_begin_with_a_byte_order_mark(
    name: str, content: str, expected: dict[str, str], packed: bool, tmp_path: Path
) -> None:
    encoded = content.encode("utf-8-sig")
    path = tmp_path / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(encoded) if packed else encoded)
    (found,) = read_examples([str(path)]).items
    assert found.where.startswith(str(path))
    assert {key: value for key, value in vars(found).items() if key != "where"} == expected


@pytest.mark.parametrize(
    ("example", "field"),
    [
        ({"text": "a\ud800b"}, '"text"'),
        ({"prompt": "a", "completion": "\udfff"}, '"completion"'),
        ({"messages": [{"role": "assistant", "content": "\ud83d"}]}, "'content' of message 1"),
    ],
)
def test_a_lone_surrogate_is_named(tmp_path: Path, example: dict[str, Any], field: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [example])
    with pytest.raises(ConfigError, match=rf"a\.jsonl:1: {field} contains the lone surrogate U\+D"):
        read_examples([str(path)])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--eval-data /no/such does not exist"):
        read_examples(["/no/such"], "--eval-data")
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ConfigError, match=r"a\.csv: unsupported ending; .* \.jsonl"):
        read_examples([str(tmp_path / "a.csv")])
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([{"instruction": "a", "output": "b"}] * 2), encoding="utf-8-sig")
    with pytest.raises(ConfigError, match=r"rows\.json: .* line of a \.jsonl file: ") as error:
        read_examples([str(rows)])
    command = str(error.value).partition("file: python")[2]
    subprocess.run(f"{sys.executable}{command}", shell=True, check=True)
    assert len(read_examples([f"{rows}l"]).items) == 2
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(ConfigError, match="has no data file"):
        read_examples([str(tmp_path)])
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: expected UTF-8, found byte 0xff"):
        read_examples([str(tmp_path / "a.jsonl")])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:-9])
    with pytest.raises(ConfigError, match=r"b\.jsonl\.gz cannot be read"):
        read_examples([str(tmp_path / "b.jsonl.gz")])
    (tmp_path / "c.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match=r"c\.jsonl\.gz cannot be read"):
        read_examples([str(tmp_path / "c.jsonl.gz")])
    (tmp_path / "d.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match="has no examples"):
        read_examples([str(tmp_path / "d.jsonl")])

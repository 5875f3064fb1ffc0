"""The examples of bench/switch_quality.py, as lines of prompts and answers.

FOLDER/wikitext-2/train.txt.gz, squad/dev-v1.1.json.gz and webquestions/*.json.gz. SQuAD's own
training set is not there: of its development set, whole articles are held out for the test.
"""

import gzip
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

FILES = (
    "wikitext-2/train.txt.gz",
    "squad/dev-v1.1.json.gz",
    "webquestions/trainmodel.json.gz",
    "webquestions/val.json.gz",
    "webquestions/test.json.gz",
)
SENTINELS = [f"<extra_id_{number}>" for number in range(16)]
_TEST_ARTICLES = 6  # every 6th article of SQuAD is for the test
_WORDS = range(20, 180)  # of a passage
_CORRUPTED, _SPAN = 0.15, 3
_DROPPED = 0.3  # share of the words of a cloze question that are left out

Example = dict[str, Any]


def write(file: Path, examples: Iterable[Example]) -> None:
    """A .jsonl file, which an interrupted call leaves incomplete under another name only."""
    aside = file.with_suffix(".part")
    aside.write_text("".join(json.dumps(example) + "\n" for example in examples))
    aside.replace(file)


def squad(data: Path) -> tuple[list[Example], list[Example]]:
    """Questions about a passage, for training and, of other articles, for the test."""
    parts: tuple[list[Example], list[Example]] = ([], [])
    for number, article in enumerate(_read(data / FILES[1])["data"]):
        for paragraph in article["paragraphs"]:
            context = " ".join(paragraph["context"].split())
            parts[number % _TEST_ARTICLES == 0].extend(
                _example(
                    f"question: {_one_line(question['question'])} context: {context}",
                    [answer["text"] for answer in question["answers"]],
                )
                for question in paragraph["qas"]
            )
    return parts


def webquestions(data: Path) -> tuple[list[Example], list[Example]]:
    """Questions without a passage, for training and for the test."""
    train, valid, test = (
        [_example(f"question: {_one_line(each['qText'])}", each["answers"]) for each in _read(file)]
        for file in (data / name for name in FILES[2:])
    )
    return train + valid, test


def passages(data: Path) -> list[str]:
    """Paragraphs of wikitext-2, and of the articles of SQuAD that are not for the test."""
    with gzip.open(data / FILES[0], "rt", encoding="utf-8") as text:
        found = [_plain(line) for line in text if not line.lstrip().startswith("=")]
    for number, article in enumerate(_read(data / FILES[1])["data"]):
        if number % _TEST_ARTICLES:
            found += [_one_line(paragraph["context"]) for paragraph in article["paragraphs"]]
    pieces = (piece for paragraph in found for piece in _pieces(paragraph.split()))
    return [" ".join(piece) for piece in pieces]


def pretraining(texts: Sequence[str], count: int, seed: int) -> Iterator[Example]:
    """Turns of span corruption, as T5 is trained, and of cloze questions about a passage."""
    draw = random.Random(seed)
    for number in range(count):
        words = draw.choice(texts).split()
        yield _cloze(words, draw) if number % 2 else _corrupted(words, draw)


def _corrupted(words: Sequence[str], draw: random.Random) -> Example:
    """Some spans are replaced by sentinels; the target lists them."""
    count = max(1, min(len(SENTINELS), round(len(words) * _CORRUPTED / _SPAN)))
    source: list[str] = []
    target: list[str] = []
    size = len(words) // count  # a span in each of so many equal parts
    for number, sentinel in enumerate(SENTINELS[:count]):
        end = len(words) if number == count - 1 else (number + 1) * size
        part = words[number * size : end]
        at = draw.randrange(max(1, len(part) - _SPAN))
        source += [*part[:at], sentinel, *part[at + _SPAN :]]
        target += [sentinel, *part[at : at + _SPAN]]
    return {"prompt": " ".join(source), "completion": " ".join(target)}


def _cloze(words: Sequence[str], draw: random.Random) -> Example:
    """A part of the passage, without some words, is the question; a span that it lacks is the
    answer, if possible names and numbers."""
    size = min(len(words), draw.randint(8, 20))
    start = draw.randrange(len(words) - size + 1)
    part = words[start : start + size]
    named = [at for at, word in enumerate(part) if at and (word[0].isupper() or word[0].isdigit())]
    first = draw.choice(named or range(size))
    last = first + 1
    while last < size and last - first < 4 and (last in named or draw.random() < 0.2):
        last += 1
    kept = [
        SENTINELS[0] if at == first else word
        for at, word in enumerate(part)
        if at == first or (at not in range(first, last) and draw.random() > _DROPPED)
    ]
    answer = " ".join(part[first:last]).strip(".,;:()\"'") or part[first]
    return _example(f"question: {' '.join(kept)} context: {' '.join(words)}", [answer])


def _example(prompt: str, answers: Sequence[str]) -> Example:
    """The learned answer begins with a space, as its words do in a passage."""
    clean = list(dict.fromkeys(_one_line(answer) for answer in answers))
    return {"prompt": prompt, "completion": f" {clean[0]}", "answers": clean}


def _pieces(words: list[str]) -> Iterator[list[str]]:
    for at in range(0, len(words), _WORDS.stop):
        piece = words[at : at + _WORDS.stop]
        if len(piece) >= _WORDS.start:
            yield piece


def _plain(line: str) -> str:
    """A line of wikitext without the spaces of its tokens."""
    text = re.sub(r" @([-,.])@ ", r"\1", line)
    text = re.sub(r" ([.,;:!?%)\]]|'s\b|n't\b)", r"\1", text)
    return re.sub(r"([(\[$]) ", r"\1", text)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _read(file: Path) -> Any:
    with gzip.open(file, "rt", encoding="utf-8") as text:
        return json.load(text)

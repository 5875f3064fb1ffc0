"""Values computed by hand, by the rules of SQuAD's evaluation scripts and of rouge_score."""

import pytest

from overspill.train.finetune.scores import (
    best_score,
    exact_match,
    f1,
    mean_scores,
    normalize,
    rouge_l,
    rouge_n,
)


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The  Eiffel Tower!", "eiffel tower"),
        ("a theatre, an anthem", "theatre anthem"),  # articles are whole words
        ("U.S.A.", "usa"),  # punctuation goes before articles are looked for
        ("A.", ""),
        ("rock-'n'-roll", "rocknroll"),
        ("\tFive\u00a0 hundred\n", "five hundred"),
        ("Café Ñandú", "café ñandú"),
        ("“quoted”", "“quoted”"),  # ASCII punctuation only
        ("ÉCOLE", "école"),
        ("", ""),
    ],
)
def test_texts_are_normalized_as_in_squad(text: str, normalized: str) -> None:
    assert normalize(text) == normalized


@pytest.mark.parametrize(
    ("answer", "reference", "em", "f"),
    [
        ("Denver Broncos", "Denver Broncos", 1, 1),
        ("the Denver Broncos.", "denver broncos", 1, 1),
        ("Broncos", "Denver Broncos", 0, 2 / 3),  # P 1, R 1/2
        ("the big big apple", "big apple pie", 0, 2 / 3),  # words count as often as both have them
        ("Paris", "London", 0, 0),
        ("", "", 1, 1),
        ("the", "", 1, 1),  # nothing is left of it
        ("", "Paris", 0, 0),
        ("Paris", "", 0, 0),
        ("café", "cafe", 0, 0),
    ],
)
def test_exact_match_and_f1(answer: str, reference: str, em: float, f: float) -> None:
    assert (exact_match(answer, reference), f1(answer, reference)) == pytest.approx((em, f))


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        # of 6 and 6 words 5 are shared, of 5 and 5 pairs 3; the order is the same
        ("the cat sat on the mat", "The cat is on the mat.", (5 / 6, 3 / 5, 5 / 6)),
        # all words, one pair of 3 and 3, subsequence "gunman killed" or "the gunman"
        ("the gunman killed police", "police killed the gunman", (1, 1 / 3, 1 / 2)),
        ("police kill the gunman", "police killed the gunman", (3 / 4, 1 / 3, 3 / 4)),
        ("one", "one two", (2 / 3, 0, 2 / 3)),  # no pair in a single word
        ("a a b", "a b b", (2 / 3, 1 / 2, 2 / 3)),  # articles stay
        ("running", "runs", (0, 0, 0)),  # no stemmer
        ("naïve", "na ve", (1, 1, 1)),  # other letters separate words
        ("", "word", (0, 0, 0)),
        ("", "", (0, 0, 0)),
    ],
)
def test_rouge(answer: str, reference: str, expected: tuple[float, float, float]) -> None:
    found = rouge_n(1, answer, reference), rouge_n(2, answer, reference), rouge_l(answer, reference)
    assert found == pytest.approx(expected)


def test_the_best_of_several_references_counts_for_each_score_alone() -> None:
    references = ("Santa Clara", "Levi's Stadium in the Bay Area", "Levi's Stadium")
    assert best_score("em", "Levis Stadium", references) == 1
    assert best_score("f1", "stadium area", references) == pytest.approx(2 * 2 / (2 + 5))
    means = mean_scores(["f1", "rougeL"], ["x y", "z"], [["y", "q"], ["q", "z"]])
    assert list(means) == ["f1", "rougeL"]
    assert means == pytest.approx({"f1": (2 / 3 + 1) / 2, "rougeL": (2 / 3 + 1) / 2})

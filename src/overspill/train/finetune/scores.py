"""Scores of generated answers: exact match and F1 of SQuAD, ROUGE of `rouge_score`.

Each compares one answer with one reference and is between 0 and 1. Of several references the best
one counts. Imports no torch: --help reads the names of the scores.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NOT_OF_ROUGE = re.compile(r"[^a-z0-9]+")


def mean_scores(
    names: Sequence[str], answers: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, float]:
    """The mean of each score over all answers, which have one or more references each."""
    pairs = list(zip(answers, references, strict=True))
    return {
        name: sum(best_score(name, answer, given) for answer, given in pairs) / len(pairs)
        for name in names
    }


def best_score(name: str, answer: str, references: Sequence[str]) -> float:
    """The score of an answer with the reference that it fits best."""
    return max(SCORES[name](answer, reference) for reference in references)


def exact_match(answer: str, reference: str) -> float:
    """1 if both texts are the same when normalized, else 0."""
    return float(normalize(answer) == normalize(reference))


def f1(answer: str, reference: str) -> float:
    """F-measure of the words that both normalized texts have. As in SQuAD 2.0, an empty text fits
    another empty text only."""
    found, wanted = normalize(answer).split(), normalize(reference).split()
    if not found or not wanted:
        return float(found == wanted)
    return _f_measure((Counter(found) & Counter(wanted)).total(), len(found), len(wanted))


def normalize(text: str) -> str:
    """Lower case, without ASCII punctuation, English articles and repeated spaces, as SQuAD's
    evaluation script does it."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def rouge_n(n: int, answer: str, reference: str) -> float:
    """F-measure of the sequences of n words that both texts have."""
    found, wanted = (
        Counter(zip(*(words[at:] for at in range(n)), strict=False))
        for words in (_rouge_words(answer), _rouge_words(reference))
    )
    return _f_measure((found & wanted).total(), found.total(), wanted.total())


def rouge_l(answer: str, reference: str) -> float:
    """F-measure of the longest common subsequence of words."""
    found, wanted = _rouge_words(answer), _rouge_words(reference)
    return _f_measure(_common_length(found, wanted), len(found), len(wanted))


def _rouge_words(text: str) -> list[str]:
    """Words of ASCII letters and digits; everything else separates them. No stemmer."""
    return _NOT_OF_ROUGE.sub(" ", text.lower()).split()


def _common_length(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for word in one:
        diagonal = 0
        for at, match in enumerate(other, start=1):
            above = row[at]
            row[at] = diagonal + 1 if word == match else max(above, row[at - 1])
            diagonal = above
    return row[-1]


def _f_measure(shared: int, found: int, wanted: int) -> float:
    """The harmonic mean of shared / found and shared / wanted; 0 if nothing is shared."""
    return 2 * shared / (found + wanted) if shared else 0.0


SCORES: Mapping[str, Callable[[str, str], float]] = {
    "em": exact_match,
    "f1": f1,
    "rouge1": lambda answer, reference: rouge_n(1, answer, reference),
    "rouge2": lambda answer, reference: rouge_n(2, answer, reference),
    "rougeL": rouge_l,
}
"""The scores by the names that --metric takes."""

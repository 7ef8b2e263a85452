"""How much of an answer is right, between 0 and 1: one function per kind of scoring."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from difflib import SequenceMatcher

from snapstream.errors import missing_extra
from snapstream.evaluation.questions.question import LETTERS, Scoring
from snapstream.evaluation.scoring import equal, found_parts

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_LETTER = r"[A-Z](?![a-z'])"
_LETTERS = re.compile(rf"[\s(\"'*]*({_LETTER}(?:(?:\)?\s*(?:,\s*and\b|,|/|&|and\b)\s*\(?)?{_LETTER})*)")
"""One letter or several at the beginning of an output: ``B``, ``(B)``, ``BD``, ``B, D``, ``B and D``."""


def score(scoring: Scoring, output: str) -> float:
    """Score an output; code is scored by :func:`snapstream.evaluation.questions.code.run_code`."""
    return _SCORES[scoring.kind](scoring, output)


def contains(scoring: Scoring, output: str) -> float:
    """1 if one of the answers occurs, as whole words; case and spacing do not matter."""
    return float(any(_has(answer, output) for answer in scoring.answers))


def contains_all(scoring: Scoring, output: str) -> float:
    """Share of the answers that occur, as whole words."""
    return sum(_has(answer, output) for answer in scoring.answers) / len(scoring.answers)


def equals(scoring: Scoring, output: str) -> float:
    """1 if the output is one of the answers and nothing else, apart from spacing."""
    return float(any(equal(answer, output) for answer in scoring.answers))


def number(scoring: Scoring, output: str) -> float:
    """1 if the last number of the output is the last number of an answer."""
    said = _numbers(output)
    return float(bool(said) and any(_numbers(answer)[-1:] == said[-1:] for answer in scoring.answers))


def choice(scoring: Scoring, output: str) -> float:
    """1 if the letters at the beginning of the output are exactly those of the answer.

    If it begins with none, the first letter that stands alone counts; if there is none either, a choice that the output
    quotes, if it is the only one.
    """
    return float(chosen(scoring, output) == set("".join(scoring.answers)))


def chosen(scoring: Scoring, output: str) -> set[str]:
    """The letters that an output chooses."""
    allowed = LETTERS[: len(scoring.choices)] if scoring.choices else LETTERS
    begin = _LETTERS.match(output)
    letters = re.findall("[A-Z]", begin[1]) if begin else []
    if letters and set(letters) <= set(allowed):
        return set(letters)
    alone = re.search(rf"(?<![A-Za-z])[{allowed}](?![A-Za-z'])", output)
    if alone:
        return {alone[0]}
    named = [letter for letter, text in zip(allowed, scoring.choices, strict=False) if _has(text, output)]
    return set(named) if len(named) == 1 else set()


def f1(scoring: Scoring, output: str) -> float:
    """The harmonic mean of precision and recall of the answer's words, as in SQuAD; the best over all answers.

    Case, punctuation and articles do not matter. Chinese, Japanese and Korean characters count as words.
    """
    return max(_f1(_words(answer), _words(output)) for answer in scoring.answers)


def rouge_l(scoring: Scoring, output: str) -> float:
    """ROUGE-L's F-measure, by the package rouge-score with stemming; the best over all answers."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise missing_extra("ROUGE-L needs rouge-score", "eval") from error
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return max(float(scorer.score(answer, output)["rougeL"].fmeasure) for answer in scoring.answers)


def similarity(scoring: Scoring, output: str) -> float:
    """Share of characters that match the answer's in order, over the first line of code (LongBench)."""
    lines = [line for line in output.splitlines() if line.strip() and not line.lstrip().startswith(("`", "#", "//"))]
    first = lines[0].strip() if lines else ""
    return max(SequenceMatcher(None, first, answer.strip(), autojunk=False).ratio() for answer in scoring.answers)


def _has(answer: str, output: str) -> bool:
    return found_parts([answer], [], output)[0]


def _numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in _NUMBER.findall(text)]


def _words(text: str) -> list[str]:
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    words = re.findall(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\s\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+", text)
    return [word for word in words if word not in ("a", "an", "the")]


def _f1(right: list[str], said: list[str]) -> float:
    common = sum((Counter(right) & Counter(said)).values())
    if not common:
        return float(not right and not said)
    precision, recall = common / len(said), common / len(right)
    return 2 * precision * recall / (precision + recall)


_SCORES: dict[str, Callable[[Scoring, str], float]] = {
    "contains": contains,
    "contains-all": contains_all,
    "equals": equals,
    "number": number,
    "choice": choice,
    "f1": f1,
    "rouge-l": rouge_l,
    "similarity": similarity,
}

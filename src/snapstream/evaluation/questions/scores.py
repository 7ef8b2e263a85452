"""How much of an answer is right, between 0 and 1: one function per kind of scoring."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable
from difflib import SequenceMatcher
from typing import Any

from snapstream.errors import missing_extra
from snapstream.evaluation.questions.code import run_code
from snapstream.evaluation.questions.question import LETTERS, Scoring
from snapstream.evaluation.scoring import equal

_CHARACTERS = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Chinese, Japanese and Korean characters, each of which counts as a word."""
_WORD = rf"[^\W{_CHARACTERS}]"
"""A character of a word that is longer than one character."""
_NUMBER = re.compile(r"(?:(?<![\w.])-)?\d[\d,]*(?:\.\d+)?")
_LETTER = r"(?:[AI](?! (?!(?:and|or|as|because|but|for|is|since|was|would)\b)[a-z])|[B-HJ-Z])(?![a-z'])"
"""A letter that is no word: neither the article ``A`` nor the pronoun ``I``."""
_LETTERS = re.compile(rf"[\s(\"'*]*({_LETTER}(?:(?:\)?\s*(?:,\s*and\b|,|/|&|and\b)\s*\(?)?{_LETTER})*)")
"""One letter or several at the beginning of an output: ``B``, ``(B)``, ``BD``, ``B, D``, ``B and D``."""
_SENTENCE = re.compile(rf"\b(?:is|are)\b:?{_LETTERS.pattern}")
"""The same at the end of a sentence: ``The right choices are: B and D``."""


def score(scoring: Scoring, output: str) -> float:
    """Score an output."""
    return _SCORES[scoring.kind](scoring, output)


def contains(scoring: Scoring, output: str) -> float:
    """1 if one of the answers occurs, as whole words; case and spacing do not matter."""
    return float(any(_has(answer, output) for answer in scoring.answers))


def contains_all(scoring: Scoring, output: str) -> float:
    """Share of the answers that occur, as whole words."""
    return sum(_has(answer, output) for answer in scoring.answers) / len(scoring.answers)


def phrase(scoring: Scoring, output: str) -> float:
    """1 if the words of one of the answers follow each other; case, punctuation and articles do not matter."""
    said = f" {' '.join(_words(output))} "
    answers = (" ".join(_words(answer)) for answer in scoring.answers)
    return float(any(answer and f" {answer} " in said for answer in answers))


def class_(scoring: Scoring, output: str) -> float:
    """1 if the right class is the only one that occurs, spelled alike; a half if it is one of two (LongBench).

    Classes whose names are part of the right one's do not count.
    """
    occur = [one for one in scoring.choices if one in output]
    right = [answer for answer in scoring.answers if answer in occur]
    return max((1 / sum(one == answer or one not in answer for one in occur) for answer in right), default=0.0)


def equals(scoring: Scoring, output: str) -> float:
    """1 if the output is one of the answers and nothing else, apart from spacing."""
    return float(any(equal(answer, output) for answer in scoring.answers))


def number(scoring: Scoring, output: str) -> float:
    """1 if the last number of the output is the last number of an answer."""
    said = _numbers(output)
    return float(bool(said) and any(_numbers(answer)[-1:] == said[-1:] for answer in scoring.answers))


def choice(scoring: Scoring, output: str) -> float:
    """1 if the letters at the beginning of the output are exactly those of the answer.

    If it does not begin with a letter, those behind the first "is" or "are" count, or else the first letter that stands
    alone. Failing that, the output must quote exactly one choice.
    """
    return float(chosen(scoring, output) == set("".join(scoring.answers)))


def chosen(scoring: Scoring, output: str) -> set[str]:
    """The letters that an output chooses."""
    most = len(scoring.choices) or max(8, LETTERS.index(max(scoring.answers)) + 1)
    allowed = LETTERS[:most]
    for begin in (_LETTERS.match(output), _SENTENCE.search(output)):
        letters = set(re.findall("[A-Z]", begin[1])) if begin else set()
        if letters and letters <= set(allowed):
            return letters
    alone = [found[0] for found in re.finditer(rf"(?<![A-Za-z]){_LETTER}(?![A-Za-z])", output) if found[0] in allowed]
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
    scorers = require_rouge()
    # Its own tokenizer knows no letters but Latin ones.
    is_latin = all(_is_latin(letter) for answer in scoring.answers for letter in answer)
    own = None if is_latin else _Words()
    scorer = scorers.RougeScorer(["rougeL"], use_stemmer=True, tokenizer=own)
    return max(float(scorer.score(answer, output)["rougeL"].fmeasure) for answer in scoring.answers)


def require_rouge() -> Any:
    """The module of rouge-score.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        from rouge_score import rouge_scorer
    except ImportError as error:
        raise missing_extra("ROUGE-L needs rouge-score", "eval") from error
    return rouge_scorer


def _is_latin(letter: str) -> bool:
    return letter.isascii() or not letter.isalpha() or unicodedata.name(letter, "").startswith("LATIN")


class _Words:
    """A tokenizer as rouge-score wants it."""

    def tokenize(self, text: str) -> list[str]:
        return _words(text)


def similarity(scoring: Scoring, output: str) -> float:
    """Share of characters that match the answer's in order, over the first line of code (LongBench)."""
    lines = [line for line in output.splitlines() if line.strip() and not line.lstrip().startswith(("`", "#", "//"))]
    first = lines[0].strip() if lines else ""
    return max(SequenceMatcher(None, first, answer.strip(), autojunk=False).ratio() for answer in scoring.answers)


def _has(answer: str, output: str) -> bool:
    """Whether an output has an answer as whole words; a number is not part of another one, such as 9 of 2.9 or of -9.

    Scripts without spaces have no whole words. Commas between thousands do not matter, nor does how arrays are printed.
    """
    answer = answer.strip()
    if answer.startswith("["):
        return _array(answer) in _array(output)
    if re.fullmatch(r"-?\d[\d,]*(\.\d+)?", answer):
        answer, output = (re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text) for text in (answer, output))
    before = "" if re.match(f"[{_CHARACTERS}]", answer) else f"(?<!{_WORD})"
    behind = "" if re.search(f"[{_CHARACTERS}]$", answer) else f"(?!{_WORD})"
    before += r"(?<!\d[.,])(?<!(?<![\w.])-)" if answer[:1].isdigit() else ""
    behind += r"(?![.,]\d)" if answer[-1:].isdigit() else ""
    words = r"\s+".join(map(re.escape, answer.split()))
    return re.search(before + words + behind, output, re.IGNORECASE) is not None


def _array(text: str) -> str:
    """A text whose arrays are printed alike: ``[6 15]`` for ``[6, 15]``, ``[ 6. 15.]`` and ``['6', '15']``."""
    text = re.sub(r"['\",\s]+", " ", text)
    text = re.sub(r"(?<=\d)\.0*(?!\d)", "", text)
    return re.sub(r" ?([\[\]]) ?", r"\1", text)


def _numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in _NUMBER.findall(text)]


def _words(text: str) -> list[str]:
    text = "".join(letter for letter in text.lower() if not _is_punctuation(letter))
    words = re.findall(rf"[{_CHARACTERS}]|[^\s{_CHARACTERS}]+", text)
    return [word for word in words if word not in ("a", "an", "the")]


def _is_punctuation(letter: str) -> bool:
    return letter in string.punctuation or unicodedata.category(letter).startswith("P")


def _f1(right: list[str], said: list[str]) -> float:
    common = sum((Counter(right) & Counter(said)).values())
    if not common:
        return float(not right and not said)
    precision, recall = common / len(said), common / len(right)
    return 2 * precision * recall / (precision + recall)


_SCORES: dict[str, Callable[[Scoring, str], float]] = {
    "contains": contains,
    "contains-all": contains_all,
    "phrase": phrase,
    "class": class_,
    "equals": equals,
    "number": number,
    "choice": choice,
    "f1": f1,
    "rouge-l": rouge_l,
    "similarity": similarity,
    "code": run_code,
}

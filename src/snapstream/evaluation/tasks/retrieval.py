"""Retrieval task: facts hidden in a long text, asked for at its end.

A document is a run of English-like filler sentences.  At chosen depths it hides *facts* such as ``Note for falcon:
amber river.``  A question, ``Recall the note for falcon:``, ends with the very key token that precedes the answer in
the document; the right continuation is ``amber river.``

Everything is drawn from ``random.Random(seed)``: a document is a pure function of its arguments.  Keys and first value
words never occur in filler, second value words do.  Keys and first value words are unique within a document.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from snapstream.evaluation.tasks.words import (
    ADJECTIVES,
    ANIMALS,
    END,
    FILLER_WORDS,
    NOUNS,
    SHORTEST,
    sentence,
    sentence_lengths,
)

PAD_TOKEN, EOS_TOKEN, UNK_TOKEN = "<pad>", "<eos>", "<unk>"


KEYS: tuple[str, ...] = tuple(animal + ":" for animal in ANIMALS)
_HEADER = ("Here", "begins", "the", "notebook", END)
_FACT, _QUESTION = ("Note", "for"), ("Recall", "the", "note", "for")
FACT_TOKENS, QUESTION_TOKENS = len(_FACT) + 4, len(_QUESTION) + 1


@dataclass(frozen=True, slots=True)
class Fact:
    """One hidden fact.

    Attributes:
        key: The key token that introduces the fact and ends its question, such as ``falcon:``.
        answer: The value words, without the closing full stop.
        position: Token index of the first value word in the document.
        depth: ``position`` as a fraction of the document's length.
    """

    key: str
    answer: tuple[str, ...]
    position: int
    depth: float


@dataclass(frozen=True, slots=True)
class Document:
    """A text with hidden facts.

    Attributes:
        words: The document as tokens of the word-level tokenizer.
        facts: The hidden facts in the order in which they occur.
        seed: The seed that the document was drawn from.
    """

    words: tuple[str, ...]
    facts: tuple[Fact, ...]
    seed: int

    @property
    def text(self) -> str:
        """The document as readable text."""
        return detokenize(self.words)

    def fact(self, key: str) -> Fact:
        """Returns the fact that ``key`` introduces; raises KeyError if there is none."""
        return {fact.key: fact for fact in self.facts}[key]

    def question(self, key: str) -> str:
        """Returns the text to append to the document (or to an answer) to ask for ``key``."""
        return " " + detokenize(question_words(self.fact(key).key))

    def prompt(self, key: str) -> str:
        """Returns the document followed by the question for ``key``."""
        return self.text + self.question(key)

    def answer(self, key: str) -> str:
        """Returns the right continuation of ``prompt(key)``, such as ``amber river.``."""
        return detokenize((*self.fact(key).answer, END))


def detokenize(words: Sequence[str]) -> str:
    """Joins tokens into readable text: single spaces, full stops attached to the word before."""
    return " ".join(words).replace(" " + END, END)


def question_words(key: str) -> tuple[str, ...]:
    """Returns the tokens of the question for ``key``; the last of them is ``key`` itself."""
    return (*_QUESTION, key)


def fact_words(key: str, answer: Sequence[str]) -> tuple[str, ...]:
    """Returns the tokens of the sentence that states a fact."""
    return (*_FACT, key, *answer, END)


def vocabulary() -> tuple[str, ...]:
    """Returns every token of the task in a fixed order, special tokens first."""
    words = [PAD_TOKEN, EOS_TOKEN, UNK_TOKEN, END, *_HEADER, *_FACT, *_QUESTION, *KEYS, *ADJECTIVES, *NOUNS]
    return tuple(dict.fromkeys((*words, *FILLER_WORDS)))


def max_facts(num_tokens: int) -> int:
    """Returns how many facts fit into a document of ``num_tokens`` tokens."""
    room = (num_tokens - len(_HEADER) - SHORTEST) // FACT_TOKENS
    return max(0, min(room, len(KEYS), len(ADJECTIVES)))


def make_document(
    num_tokens: int, num_facts: int = 1, seed: int = 0, *, depths: Sequence[float] | None = None
) -> Document:
    """Draws a document of exactly ``num_tokens`` tokens that hides ``num_facts`` facts.

    Args:
        num_tokens: Length of the document, without any question.
        num_facts: How many facts it hides.
        seed: Seed of the random generator; equal arguments give equal documents.
        depths: Where the facts go, one fraction of the document's length each: 0 is the beginning, 1 the end.  A
            fact goes to the sentence boundary nearest to its depth.  Drawn uniformly by default.

    Raises:
        ValueError: If the facts do not fit or ``depths`` does not match ``num_facts``.
    """
    if num_tokens < len(_HEADER) + SHORTEST or not 0 <= num_facts <= max_facts(num_tokens):
        raise ValueError(f"{num_facts} facts do not fit into {num_tokens} tokens")
    if depths is not None and (len(depths) != num_facts or not all(0.0 <= depth <= 1.0 for depth in depths)):
        raise ValueError(f"expected {num_facts} depths between 0 and 1, got {depths}")
    rng = random.Random(seed)
    keys = rng.sample(KEYS, num_facts)
    firsts = rng.sample(ADJECTIVES, num_facts)
    answers = [(first, rng.choice(NOUNS)) for first in firsts]
    chosen = [rng.random() for _ in range(num_facts)] if depths is None else list(depths)
    order = sorted(range(num_facts), key=lambda index: chosen[index])

    filler = num_tokens - len(_HEADER) - num_facts * FACT_TOKENS
    words, facts = list(_HEADER), list[Fact]()
    for length in (*sentence_lengths(rng, filler), 0):
        while len(facts) < num_facts:
            index = order[len(facts)]
            target = chosen[index] * num_tokens
            if length and len(words) + FACT_TOKENS / 2 + length / 2 < target:
                break
            position = len(words) + len(_FACT) + 1
            facts.append(Fact(keys[index], answers[index], position, position / num_tokens))
            words += fact_words(keys[index], answers[index])
        if length:
            words += sentence(rng, length)
    return Document(tuple(words), tuple(facts), seed)

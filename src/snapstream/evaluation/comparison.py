"""The same questions to the same model under several cache policies, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from snapstream.config import CacheBudget, SamplingParams
from snapstream.engine import LLM
from snapstream.evaluation.tasks import Question, TaskText

ANSWER = 6
"""Maximum tokens of an answer."""


@dataclass(frozen=True)
class PolicyResult:
    """The result of one policy on a text.

    Attributes:
        policy: Its name.
        cache_entries: Entries per sequence.
        bytes_per_sequence: Keys and values of one sequence while it is decoded.
        answers: Generated text, one per question.
        correct: Whether each is the right answer.
    """

    policy: str
    cache_entries: int
    bytes_per_sequence: int
    answers: tuple[str, ...]
    correct: tuple[bool, ...]

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return sum(self.correct) / len(self.correct)


def compare_policies(
    model: str,
    made: TaskText,
    prompt_length: int,
    asked: Sequence[Question],
    budgets: dict[str, CacheBudget | None],
    *,
    slots: int,
    enforce_eager: bool,
    report: Callable[[str], None] = lambda _: None,
) -> list[PolicyResult]:
    """Ask every question under every policy; the engines differ only in their cache.

    Args:
        model: Checkpoint.
        made: The text.
        prompt_length: Maximum tokens of the text with a question.
        asked: Which of its questions to ask, one request each.
        budgets: Cache of each policy, by name; ``None`` is a full one.
        slots: Sequences decoded concurrently.
        enforce_eager: As in :class:`EngineConfig`.
        report: Called with what is being done.
    """
    prompts = [made.text + question.ask + question.lead for question in asked]
    length = prompt_length + ANSWER
    results = []
    for policy, budget in budgets.items():
        report(f"{policy}: loading")
        llm = LLM(
            model,
            budget=budget or CacheBudget.preset("full", length),
            max_model_len=length,
            slots=slots,
            enforce_eager=enforce_eager,
            report_plan=lambda _: None,
        )
        report(f"{policy}: prefilling {prompt_length} tokens, {len(asked)} times")
        answers = [out.text.strip() for out in llm.generate(prompts, SamplingParams(max_tokens=ANSWER))]
        results.append(
            PolicyResult(
                policy=policy,
                cache_entries=llm.engine.plan.cache_entries,
                bytes_per_sequence=llm.engine.plan.slots // llm.engine.plan.slot_count,
                answers=tuple(answers),
                correct=tuple(got == question.answer.strip() for got, question in zip(answers, asked, strict=True)),
            )
        )
    return results

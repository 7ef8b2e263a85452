"""The same questions to the same model under several cache policies, side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from snapstream.config import CacheBudget, EngineConfig, SamplingParams
from snapstream.engine import LLM
from snapstream.evaluation.tasks import Question, TaskText

DECODE_STEPS = 8
TIMED_LAUNCHES = 15


@dataclass(frozen=True)
class PolicyResult:
    """What one policy made of a text.

    Attributes:
        policy: Its name.
        cache_entries: Entries per sequence.
        bytes_per_sequence: Keys and values of one sequence while it is decoded.
        answers: Generated text, one per question.
        correct: Whether each is the right answer.
        tokens_per_second: Decoding speed with all slots busy: median, least and most over several launches.
    """

    policy: str
    cache_entries: int
    bytes_per_sequence: int
    answers: tuple[str, ...]
    correct: tuple[bool, ...]
    tokens_per_second: tuple[float, float, float]

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
    """Ask every question under every policy; the engines differ in nothing but their cache.

    Decoding is timed with all engines alive and in turn, so that a change in the machine's speed hits all of them.

    Args:
        model: Checkpoint.
        made: The text.
        prompt_length: Most tokens of the text with a question.
        asked: Which of its questions to ask, one request each.
        budgets: Cache of each policy, by name; ``None`` is a full one.
        slots: Sequences decoded at a time.
        enforce_eager: Do not compile.
        report: Told what is being done.
    """
    prompts = [made.text + question.ask + question.lead for question in asked]
    # Room for what the first sequences decode while the others are still being read.
    chunks = -(-prompt_length // EngineConfig.prefill_chunk)
    timed_tokens = (slots * chunks + TIMED_LAUNCHES + 1) * DECODE_STEPS
    length = prompt_length + timed_tokens
    engines: dict[str, LLM] = {}
    answers: dict[str, list[str]] = {}
    for policy, budget in budgets.items():
        report(f"{policy}: loading")
        engines[policy] = engine = LLM(
            model,
            budget=budget or CacheBudget.preset("full", length),
            max_model_len=length,
            slots=slots,
            decode_steps=DECODE_STEPS,
            enforce_eager=enforce_eager,
            report_plan=lambda _: None,
        )
        report(f"{policy}: reading {prompt_length} tokens, {len(asked)} times")
        answers[policy] = [out.text.strip() for out in engine.generate(prompts, SamplingParams(max_tokens=6))]
    speeds = _decode_speeds(engines, prompts, timed_tokens, report)
    return [
        PolicyResult(
            policy=policy,
            cache_entries=engine.budget.capacity,
            bytes_per_sequence=engine.plan.slots // engine.plan.slot_count,
            answers=tuple(answers[policy]),
            correct=tuple(got == question.answer.strip() for got, question in zip(answers[policy], asked, strict=True)),
            tokens_per_second=speeds[policy],
        )
        for policy, engine in engines.items()
    ]


def _decode_speeds(
    engines: dict[str, LLM], prompts: Sequence[str], tokens: int, report: Callable[[str], None]
) -> dict[str, tuple[float, float, float]]:
    """Tokens per second with every slot busy, for each engine in turn, several times."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for policy, engine in engines.items():
        report(f"{policy}: filling all slots to time decoding")
        for i in range(engine.config.slots):
            engine.add_request(prompts[i % len(prompts)], params, request_id=f"timed-{i}")
        while len(engine.scheduler.running) < engine.config.slots:
            engine.step()
    report("timing decoding")
    measured: dict[str, list[float]] = {policy: [] for policy in engines}
    for _ in range(TIMED_LAUNCHES):
        for policy, engine in engines.items():
            start = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - start
            measured[policy].append(engine.config.slots * engine.config.decode_steps / seconds)
    for engine in engines.values():
        engine.discard([f"timed-{i}" for i in range(engine.config.slots)])
    return {policy: (statistics.median(m), min(m), max(m)) for policy, m in measured.items()}

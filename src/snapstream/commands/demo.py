"""``snapstream demo``: finding facts in a long text under three policies."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from snapstream.assets import SHIPPED, TASK_MODEL
from snapstream.commands.options import Compiled, Json, eager, messages, parse_budget, quiet
from snapstream.config import DEFAULT_POLICY, CacheBudget
from snapstream.errors import ConfigurationError


def demo(
    model: Annotated[
        str, typer.Option("--model", "-m", help=f"A shipped model: {', '.join(SHIPPED)}.")
    ] = TASK_MODEL.name,
    tokens: Annotated[int, typer.Option(min=128, max=12000, help="Length of the text, in tokens.")] = 8000,
    facts: Annotated[int, typer.Option(min=1, max=64, help="Facts hidden in the text.")] = 16,
    questions: Annotated[int, typer.Option(min=1, max=64, help="How many of the facts to ask for.")] = 8,
    budget: Annotated[
        str, typer.Option("--budget", "-b", help="Entries of the smaller caches (512, 2k), or a share of the text.")
    ] = "1/4",
    slots: Annotated[int, typer.Option(min=1, max=16, help="Sequences decoded concurrently.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the text.")] = 0,
    compiled: Compiled = None,
    as_json: Json = False,
) -> None:
    """Ask a small shipped model for facts in a long text: full cache, StreamingLLM and SnapStream side by side."""
    from snapstream.engine.settings import load_tokenizer
    from snapstream.evaluation.comparison import compare_policies
    from snapstream.evaluation.tasks import TooShortError
    from snapstream.evaluation.tasks.needle import notes

    if model not in SHIPPED:
        raise ConfigurationError(f"the demo's text is for the shipped models ({', '.join(SHIPPED)}), not {model!r}")
    small = parse_budget(budget, DEFAULT_POLICY, lambda: tokens)
    if not isinstance(small, CacheBudget):
        raise ConfigurationError(f"budget: {budget!r}; the demo takes a number of entries (512) or a share (1/4)")
    with quiet():
        tokenizer = load_tokenizer(str(SHIPPED[model]))
    number = max(facts, questions)
    try:
        made = notes(random.Random(seed), tokens, lambda text: len(tokenizer.encode(text)), None, number)
    except TooShortError as error:
        raise ConfigurationError(f"{number} facts do not fit into {tokens} tokens ({error})") from error
    depths = {question: made.text.index(question.parts[0]) / len(made.text) for question in made.questions}
    in_order = sorted(made.questions, key=lambda question: depths[question])
    asked = [in_order[int(i * number / questions)] for i in range(questions)]
    budgets = {
        "full": None,
        "streaming": CacheBudget.preset("streaming", small.capacity),
        DEFAULT_POLICY: small,
    }
    if not as_json:
        messages.print(
            f"A text of {tokens} tokens in which {number} facts are hidden. It begins: "
            f"[italic]{made.text[:150]}…[/italic]\nA fact in it: [italic]{_sentence_with(asked[0].parts[0], made.text)}"
            f"[/italic] Its question: [italic]…{asked[0].ask}[/italic]\n",
        )
    with quiet(), messages.status("starting") as status:
        results = compare_policies(
            str(SHIPPED[model]),
            made,
            tokens,
            asked,
            budgets,
            slots=slots,
            enforce_eager=eager(compiled, "auto"),
            report=status.update,
        )
    if as_json:
        print(
            json.dumps(
                {
                    "tokens": tokens,
                    "questions": [q.ask.strip() for q in asked],
                    "policies": [asdict(r) for r in results],
                }
            )
        )
        return
    from snapstream.engine.memory.plan import gigabytes

    console = Console()
    answers = Table(title=f"Answers (the text has {tokens} tokens)", title_justify="left")
    for column in ("fact at", "asked for", *(r.policy for r in results)):
        answers.add_column(column)
    for row, question in enumerate(asked):
        marks = ("[green]" if r.correct[row] else "[red]✗ " for r in results)
        cells = (f"{mark}{r.answers[row]}" for mark, r in zip(marks, results, strict=True))
        answers.add_row(f"{depths[question]:.0%}", f"{question.ask.split()[-1]}{question.answer}", *cells)
    console.print(answers)
    summary = Table(title="What it takes", title_justify="left")
    for column in ("policy", "right answers", "cache entries", "cache memory / sequence"):
        summary.add_column(column, justify="left" if column == "policy" else "right")
    for r in results:
        right = f"{sum(r.correct)} of {len(r.correct)}"
        summary.add_row(r.policy, right, f"{r.cache_entries}", gigabytes(r.bytes_per_sequence))
    console.print(summary)
    console.print(
        "The first word of an answer comes from prefill, which is the same for every policy; the second depends on the "
        "cache. This model is too small for its caches to affect speed: docs/benchmarks.md has speeds."
    )


def _sentence_with(words: str, text: str) -> str:
    at = text.index(words)
    return text[text.rindex(".", 0, at) + 2 : text.index(".", at) + 1]

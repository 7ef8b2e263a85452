r"""How likely right answers stay in smaller caches: a fast comparison of policies and their settings.

    python -m benchmarks.answers --model MODEL.gguf --questions kv75.jsonl.gz \
        '{"policy": "snapstream"}' '{"policy": "spans"}' '{"policy": "spans", "span": 31}'

The right answer to each question is forced in every cache, and all caches share one prefill. Two numbers are reported:
how much less likely its tokens are than with a full cache (nats per token), and for how many questions the cache would
have chosen every one of them. Neither counts the first token, which comes from prefill. Questions whose answer the full
cache does not know are left out: it would choose fewer than half of the tokens. A right or wrong answer is one bit; the
probabilities of thirty tokens tell caches apart after a dozen questions. Questions come from files, or are generated
(``--tasks tracking,late-phone --lengths 4k``); a second turn is forced like the answer.

With ``--own N``, the full cache's own answer is forced instead, up to N of its tokens. That is for questions without a
short right answer, such as code, and shows what a cache loses while a long answer is written.

With ``--tails``, the question is followed by random instructions of up to 200 tokens and the marks of a random template
in place of the model's own, so that nothing depends on where a template puts the question.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from snapstream import LLM, CacheBudget, EngineConfig, SamplingParams
from snapstream.evaluation.hosts import Prompts
from snapstream.evaluation.policies import make_variants
from snapstream.evaluation.questions.files import read_questions
from snapstream.evaluation.questions.plan import HALVES, QuestionPlan
from snapstream.evaluation.tasks import Sample, find_tasks, make_sample
from snapstream.sizes import parse_tokens

MOST = 40
Cell = tuple[str, str]
"""Size and budget of a cache."""
Loss = list[tuple[float, bool]]
"""What each cell loses, in nats per token, and whether it would have chosen the answer."""
TAILS = (
    "Be brief, be exact, and copy names and numbers as they are written in the text above.",
    "Give only the answer, without any explanation, and do not repeat the question.",
    "If the text does not say it, say so. Do not use lists, headings or quotes, and add no closing remark.",
    "Use only the text; nothing you remember from elsewhere may be used, even if it seems certain.",
    "If two passages contradict each other, prefer the later one, and do not mention the other.",
    "Before you answer, read the text once more and note where it speaks of what is asked.",
    "The reader is a colleague who has little time. Write one line of plain English.",
)
ENDS = ("\nAnswer:", "\n\n### Response:\n", "\n[/INST]", "\n\nAssistant:", "\n<|user_end|>\n<|assistant_start|>\n")


def with_tail(sample: Sample) -> str:
    """The question with random instructions behind it, and the end of a random template."""
    rng = random.Random(sample.seed)
    return "\n".join([sample.prompt, *rng.sample(TAILS, rng.randint(0, len(TAILS)))]) + rng.choice(ENDS)


def answer_of(llm: LLM, sample: Sample, prompt: list[int], own: int) -> list[int]:
    """Tokens of the right answer; of several ones the first. Or up to ``own`` tokens of the full cache's answer."""
    if own:
        return list(llm.generate([prompt], SamplingParams(max_tokens=own))[0].token_ids)
    answers = [sample.answer] if sample.question is None else sample.question.scoring.answers
    return list(llm.tokenizer.encode(answers[0], add_special_tokens=False)[:MOST]) if answers else []


def force(
    llm: LLM, prompt: list[int], opening: list[int], answer: list[int], budgets: list[CacheBudget | None]
) -> list[tuple[float, list[bool]]]:
    """The answer in every cache: mean log-probability of its tokens, and which of them the cache would have chosen."""
    forced = (*opening, *answer)
    params = [
        SamplingParams(max_tokens=len(forced), forced=forced, logprobs=1, ignore_eos=True, kv_budget=budget)
        for budget in budgets
    ]
    found = []
    for output in llm.generate([prompt] * len(params), params):
        steps = (output.logprobs or ())[max(1, len(opening)) :]
        chosen = [step.logprob == max(step.top.values()) for step in steps]
        found.append((statistics.fmean(step.logprob for step in steps), chosen))
    return found


def samples_of(path: str, half: str, prompts: Prompts, longest: int, code: bool) -> Iterator[Sample]:
    """The questions of a file about texts with even or odd numbers; those whose answers are code, if they may be."""
    variants = make_variants(["full"], [], [()], ["full"])
    plan = QuestionPlan([read_questions(path)], variants, prompts, half=half, longest=longest, code=code)
    return (job.sample for group in plan for job in group)


def generated(name: str, length: int, half: str, prompts: Prompts) -> Iterator[Sample]:
    """Samples of a task, with even or odd seeds."""
    (task,) = find_tasks([name])
    for seed in itertools.count(HALVES.index(half), 2):
        yield make_sample(task, length - prompts.overhead, seed, prompts.count, chat=prompts.chat)


def sized(text: str, size: str, tokens: int) -> dict[str, Any]:
    """A budget with its capacity: a share of the tokens, or a number of entries."""
    share = Fraction(size)
    return json.loads(text) | {"capacity": int(share if share > 1 else tokens * share)}


def measure(
    llm: LLM, prompts: Prompts, samples: Iterable[Sample], cells: Sequence[Cell], *, tails: bool, own: int
) -> list[Loss]:
    """What each cell loses, and whether it would have chosen the answer, for every answer that the full cache knows."""
    found: list[Loss] = []
    for sample in samples:
        tokens = llm.tokenizer.encode(with_tail(sample)) if tails else prompts.first(sample)
        before, answer = prompts.then(sample), answer_of(llm, sample, tokens, own)
        if len(before) + len(answer) < 2:
            continue
        budgets = [CacheBudget.parse(sized(text, size, len(tokens))) for size, text in cells]
        (best, chosen), *others = force(llm, tokens, before, answer, [None, *budgets])
        if statistics.fmean(chosen) >= 0.5:
            found.append([(best - value, all(chosen)) for value, chosen in others])
            print(f"{sample.task}: {len(found)} questions", end="\r", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Print a table per file and task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("caches", nargs="+", help="budgets as JSON, without their capacity")
    parser.add_argument("--model", required=True)
    parser.add_argument("--questions", action="append", default=[], help="a file; may be repeated")
    parser.add_argument("--tasks", default="", help="generated tasks")
    parser.add_argument("--lengths", default="4k", help="their lengths in tokens")
    parser.add_argument("--sizes", default="1/4,1/8,1/16", help="shares of the prompt, or entries")
    parser.add_argument("--samples", type=int, default=20, help="questions of each file")
    parser.add_argument("--half", choices=HALVES, default="even", help="texts with even or odd numbers")
    parser.add_argument("--longest", type=int, default=9000, help="longest prompt and answer, in tokens")
    parser.add_argument("--tails", action="store_true")
    parser.add_argument("--own", type=int, default=0, metavar="TOKENS", help="force answers of the full cache instead")
    known = parser.parse_args()
    sizes = known.sizes.split(",")
    cells = [(size, text) for size in sizes for text in known.caches]
    full = CacheBudget.preset("full", known.longest)
    # As many slots as caches, so that one prefill serves them all.
    config = EngineConfig(slots=len(cells) + 1, max_model_len=known.longest, kept_queries=128, prefix_cache=0)
    llm = LLM(known.model, budget=full, config=config, report_plan=lambda _: None)
    prompts = Prompts(llm.tokenizer, chat=False if known.tails else None)
    longest = known.longest - max(MOST, known.own)
    sources = [(path, samples_of(path, known.half, prompts, longest, known.own > 0)) for path in known.questions]
    for task, length in itertools.product(filter(None, known.tasks.split(",")), known.lengths.split(",")):
        sources.append((f"{task}, {length}", generated(task, parse_tokens(length, "--lengths"), known.half, prompts)))
    for name, samples in sources:
        found = measure(llm, prompts, itertools.islice(samples, known.samples), cells, tails=known.tails, own=known.own)
        print(f"\n{Path(name).name.split('.')[0]}, {len(found)} questions:\n")
        print(f"| cache | {' | '.join(sizes)} |\n|{'---|' * (len(sizes) + 1)}")
        for text in known.caches if found else ():
            row = [[losses[cells.index((size, text))] for losses in found] for size in sizes]
            print(f"| `{text}` | {' | '.join(map(shown, row))} |", flush=True)


def shown(losses: Loss) -> str:
    """A cell of a table: mean loss, and the share of questions for which all of the answer would have been chosen."""
    nats, same = zip(*losses, strict=True)
    return f"{statistics.fmean(nats):.2f} / {100 * statistics.fmean(same):.0f} %"


if __name__ == "__main__":
    main()

"""What benchmarks that ask questions from files have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from snapstream.evaluation.hosts import Prompts
from snapstream.evaluation.policies import Variant
from snapstream.evaluation.questions.files import read_all_questions
from snapstream.evaluation.questions.plan import QuestionPlan


def question_parser(about: str | None) -> argparse.ArgumentParser:
    """A parser of the model, the questions, and where they are asked."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--questions", action="append", required=True)
    parser.add_argument("--ask", default="with,after")
    parser.add_argument("--samples", type=int, default=None, help="questions per file and place")
    return parser


def plan_of(arguments: argparse.Namespace, variants: Sequence[Variant], prompts: Prompts, longest: int) -> QuestionPlan:
    """The questions that were asked for, about sequences of at most ``longest`` tokens."""
    return QuestionPlan(
        read_all_questions(arguments.questions),
        variants,
        prompts,
        samples=arguments.samples,
        places=arguments.ask.split(","),
        longest=longest,
    )

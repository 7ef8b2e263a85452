"""Whether rules and tools survive compression: a hundred requests to thirty tools, after a long document.

    python -m benchmarks.pins MODEL [--document 6000] [--requests 100]

The system message states rules that many arguments need; the tools stand behind it; the user's message begins with a
part of a book and ends with the request. Each request is answered by a full cache and by compressed ones of a quarter
and an eighth of the prompt, with the system message and the tools pinned and without. Printed are the numbers of right
tools, and of right tools with right arguments. Answers are greedy and free: no grammar forces a call.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.agent_tasks import REQUESTS, RULES, TOOLS, Call, is_right
from snapstream import LLM, SamplingParams
from snapstream.assets import PROSE
from snapstream.config import CacheBudget
from snapstream.config.pins import Span
from snapstream.prompt_parts import find_parts, token_spans
from snapstream.serving.settings import ServerSettings
from snapstream.serving.tools.events import Said
from snapstream.serving.tools.formats import AnswerFormat, find_answers

DOCUMENTS = 5
POLICIES = ("spans", "mixed", "snapstream")
SHARES = (4, 8)
MAX_TOKENS = 120
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


@dataclass(frozen=True)
class Variant:
    """One way to answer."""

    policy: str
    share: int = 1
    pinned: bool = False

    def params(self, length: int, standing: Sequence[Span]) -> SamplingParams:
        """How a prompt of ``length`` tokens is answered."""
        budget = CacheBudget.preset(self.policy, length // self.share + (MAX_TOKENS if self.share == 1 else 0))
        pinned = replace(budget, pin=tuple(standing)) if self.pinned else budget
        return SamplingParams(max_tokens=MAX_TOKENS, kv_budget=pinned)


VARIANTS = [
    Variant("full"),
    *(Variant(policy, share, pinned) for share in SHARES for policy in POLICIES for pinned in (False, True)),
]


def prompts(llm: LLM, document: int, number: int) -> list[tuple[Call, list[int], list[Span]]]:
    """Requests in turn after one of a few documents: the right call, the prompt, and what is pinned."""
    text, made = PROSE.read_text(encoding="utf-8"), []
    size = 4 * document  # characters
    for at, (request, call) in enumerate(REQUESTS[:number]):
        start = at * DOCUMENTS // number * ((len(text) - size) // DOCUMENTS)
        part = text[start : start + size]
        messages = [
            {"role": "system", "content": RULES},
            {"role": "user", "content": f"<document>\n{part}\n</document>\n\n{request}"},
        ]
        whole = llm.chat_text(messages, None, TOOLS)
        parts = find_parts(messages, TOOLS, lambda messages, tools: llm.chat_text(messages, None, tools), whole)
        encoded = llm.engine.texts.encode(whole, special=False, offsets=True)
        made.append((call, encoded.tokens, token_spans(parts.standing, encoded.offsets)))
    return made


def check(answers: AnswerFormat, text: str, expected: Call) -> tuple[bool, bool]:
    """Whether an answer calls the right tool, and with the right arguments."""
    reader, said = answers.reader("", SCHEMAS), Said()
    for event in reader.feed(text, last=True):
        said.add(event)
    if len(said.calls) != 1:
        return False, False
    try:
        arguments = json.loads(said.calls[0].arguments)
    except ValueError:
        return False, False
    return is_right(expected, said.calls[0].name, arguments) if isinstance(arguments, dict) else (False, False)


def main() -> None:
    """Answer all requests in all ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--document", type=int, default=6000, help="tokens of the document")
    parser.add_argument("--requests", type=int, default=len(REQUESTS))
    given = parser.parse_args()
    longest = given.document + 8192
    llm = LLM(
        given.model, budget=CacheBudget.preset("full", longest), max_model_len=longest + MAX_TOKENS, slots=len(VARIANTS)
    )
    answers = find_answers(llm, ServerSettings(llm.engine.model))
    tools, calls, began = Counter[Variant](), Counter[Variant](), time.monotonic()
    for number, (expected, prompt, standing) in enumerate(prompts(llm, given.document, given.requests), 1):
        outputs = llm.generate([prompt] * len(VARIANTS), [each.params(len(prompt), standing) for each in VARIANTS])
        for variant, output in zip(VARIANTS, outputs, strict=True):
            is_tool, is_call = check(answers, output.text, expected)
            tools[variant] += is_tool
            calls[variant] += is_call
        size = sum(end - start for start, end in standing)
        print(f"{number}: {len(prompt)} tokens, {size} pinned, {time.monotonic() - began:.0f} s", flush=True)
        if number % 20 == 0 or number == given.requests:
            print_table(tools, calls, number)


def print_table(tools: Counter[Variant], calls: Counter[Variant], number: int) -> None:
    """Print the counts so far: right tools, and right calls."""
    print(f"of {number}: right tool, right call")
    print(f"  full: {tools[VARIANTS[0]]}, {calls[VARIANTS[0]]}")
    for variant in VARIANTS[1:]:
        pins = "pinned" if variant.pinned else "not pinned"
        print(f"  1/{variant.share} {variant.policy}, {pins}: {tools[variant]}, {calls[variant]}", flush=True)


if __name__ == "__main__":
    main()

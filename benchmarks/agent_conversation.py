"""Ten turns of a conversation with thirty tools: right calls, and the time to the first token.

    python -m benchmarks.agent_conversation MODEL.gguf [--budget 2048] [--conversations 5]

Each turn asks for a tool (``benchmarks/agent_tasks.py``), gets a call, because one is required, and answers it with a
part of a book, so that the conversation grows from 3,000 to 8,000 tokens. Two servers get the same turns, one after the
other: one with a prefix cache, one without. On the latter, the conversation is also continued in sessions. Every way
has a history of its own, with the calls that it made.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.agent_tasks import REQUESTS, RULES, TOOLS, Call, is_right
from benchmarks.server_load import serving
from snapstream.assets import PROSE

TURNS, RESULT, MAX_TOKENS = 10, 1800, 120  # results in characters


@dataclass
class Way:
    """One way to continue a conversation.

    Attributes:
        name: Its name.
        client: The server.
        body: What its requests have besides the conversation.
        is_session: Whether it uses a session.
        seconds: Times to the first token, by turn.
        right: Number of right calls, by turn.
        reused: Number of turns that continued an earlier one's cache.
        history: The conversation.
    """

    name: str
    client: httpx.Client
    body: dict[str, Any] = field(default_factory=dict)
    is_session: bool = False
    seconds: list[list[float]] = field(default_factory=lambda: [[] for _ in range(TURNS)])
    right: list[int] = field(default_factory=lambda: [0] * TURNS)
    reused: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)

    def turn(self, number: int, conversation: int, request: str, call: Call, result: str) -> int:
        """Ask for a call, and answer it; returns the length of the prompt."""
        self.history.append({"role": "user", "content": request})
        body = self.body | {"messages": self.history, "tools": TOOLS, "temperature": 0, "max_tokens": MAX_TOKENS}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "tool_choice": "required"}
        if self.is_session:
            body["session_id"] = f"{self.name}-{conversation}".replace(" ", "-").replace(",", "")
        answer, seconds, used = self._ask(body)
        calls = answer.get("tool_calls", [])
        self.seconds[number].append(seconds)
        self.right[number] += len(calls) == 1 and _fits(calls[0], call)
        self.reused += used["reused"] > 0
        self.history.append(answer)
        for each in calls:
            self.history.append({"role": "tool", "tool_call_id": each["id"], "content": result})
        return int(used["prompt"])

    def _ask(self, body: dict[str, Any]) -> tuple[dict[str, Any], float, dict[str, int]]:
        """The message of an answer, seconds to its first token, and what was used of a session."""
        began, first, text, calls, used = time.monotonic(), None, "", list[dict[str, Any]](), {"reused": 0}
        with self.client.stream("POST", "/v1/chat/completions", json=body) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                used["reused"] = (event.get("session") or {}).get("reused_tokens", used["reused"])
                if event.get("usage"):
                    used["prompt"] = event["usage"]["prompt_tokens"]
                for choice in event["choices"]:
                    delta = choice["delta"]
                    if delta.get("content") or delta.get("tool_calls"):
                        first = first or time.monotonic()
                    text += delta.get("content") or ""
                    for part in delta.get("tool_calls") or []:
                        if "id" in part:
                            calls.append(
                                {"id": part["id"], "type": "function", "function": {"name": "", "arguments": ""}}
                            )
                        function = part["function"]
                        calls[part["index"]]["function"]["name"] += function.get("name") or ""
                        calls[part["index"]]["function"]["arguments"] += function.get("arguments") or ""
        seconds = (first or time.monotonic()) - began
        return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {}), seconds, used


def _fits(call: dict[str, Any], expected: Call) -> bool:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return False
    return isinstance(arguments, dict) and is_right(expected, function["name"], arguments)[1]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--conversations", type=int, default=5)
    given = parser.parse_args()
    text, chosen = PROSE.read_text(encoding="utf-8"), random.Random(1).sample(REQUESTS, given.conversations * TURNS)
    with ExitStack() as stack:
        options = ("--slots", "1", "--sessions", "4", "--budget", str(given.budget), "--max-model-len", "16384")
        cached = stack.enter_context(serving(given.model, *options))
        plain = stack.enter_context(serving(given.model, *options, "--prefix-cache", "0"))
        ways = [
            Way("prefix cache", cached),
            Way("prefix cache, not pinned", cached, {"pin": False}),
            Way("session", plain, is_session=True),
            Way("session, not pinned", plain, {"pin": False}, is_session=True),
            Way("neither", plain),
        ]
        for conversation in range(given.conversations):
            for way in ways:
                way.history = [{"role": "system", "content": RULES}]
            for number in range(TURNS):
                request, call = chosen[conversation * TURNS + number]
                start = random.Random(conversation * TURNS + number).randrange(len(text) - RESULT)
                lengths = [way.turn(number, conversation, request, call, text[start : start + RESULT]) for way in ways]
                print(f"{conversation + 1}.{number + 1}: {lengths} tokens", flush=True)
            print_table(ways, conversation + 1, given.budget)


def print_table(ways: list[Way], conversations: int, budget: int) -> None:
    """Print what was found so far."""
    total = conversations * TURNS
    print(f"\n{budget} entries, {conversations} conversations")
    print("| | right calls | turns 6 to 10 | continued | first token of turn 1, s | of turns 2 to 10, s |")
    print("|---|---|---|---|---|---|")
    for way in ways:
        later = [seconds for turn in way.seconds[1:] for seconds in turn]
        cells = [
            f"{sum(way.right)} of {total}",
            f"{sum(way.right[TURNS // 2 :])} of {total // 2}",
            f"{way.reused}",
            f"{statistics.median(way.seconds[0]):.1f}",
            f"{statistics.median(later):.1f} ({min(later):.1f}-{max(later):.1f})",
        ]
        print(f"| {way.name} | {' | '.join(cells)} |", flush=True)
    print()


if __name__ == "__main__":
    main()

"""What a session saves and costs: the second turn over the compressed cache, versus prefilling everything again.

    python benchmarks/server_sessions.py

The shipped model gets a text with notes and is asked for one of them, then for another. The second question is sent
twice to the same server, with and without the session, in random order. Times are to the first text of the second
answer.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from typing import Any, NamedTuple

import httpx

from benchmarks.server_load import serving
from snapstream.assets import TASK_MODEL
from snapstream.engine.settings import load_tokenizer
from snapstream.evaluation.tasks.needle import notes

TEXTS = 40
NOTES = 12


class Answer(NamedTuple):
    """The text of a stream, the seconds to its first text, its session object, and its usage."""

    text: str
    seconds: float
    session: dict[str, Any] | None
    usage: dict[str, Any]


def timed(client: httpx.Client, path: str, body: dict[str, Any]) -> Answer:
    """Request a stream, and time its first text."""
    began, first, text, session, usage = time.monotonic(), None, "", None, {}
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", path, json=body) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            session, usage = event.get("session", session), event.get("usage") or usage
            for choice in event["choices"]:
                piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                first = first or (time.monotonic() if piece else None)
                text += piece
    assert first is not None, body
    return Answer(text, first - began, session, usage)


def main() -> None:
    """Print the table."""
    tokenizer = load_tokenizer(str(TASK_MODEL))
    print(
        "| prompt | cache | right, read anew | right, over the session | time to first text, anew / session | range |"
    )
    print("|---|---|---|---|---|---|")
    for length, budget in ((2048, 512), (2048, 256), (8192, 2048), (8192, 1024)):
        options = ("--slots", "1", "--eager", "--sessions", "1", "--prefix-cache", "0")
        with serving("--budget", str(budget), *options) as client:
            rng, ratios, right = random.Random(length), [], {"anew": 0, "session": 0}
            for number in range(TEXTS):
                made = notes(rng, length, lambda text: len(tokenizer.encode(text)), None, NOTES)
                one, other = rng.sample(made.questions, 2)
                history = [{"role": "user", "content": made.text + one.ask}]
                session = f"session-{number}"
                reply = client.post(
                    "/v1/chat/completions",
                    json={"messages": history, "max_tokens": 6, "temperature": 0, "session_id": session},
                ).json()
                history.append(reply["choices"][0]["message"])
                seconds = {}
                for kind in rng.sample(["anew", "session"], 2):
                    messages = [*history, {"role": "user", "content": other.ask.strip()}]
                    body = {"messages": messages, "max_tokens": 6, "temperature": 0}
                    body |= {"session_id": session} if kind == "session" else {}
                    answer = timed(client, "/v1/chat/completions", body)
                    assert kind == "anew" or answer.session["reused_tokens"] > 0, answer.session
                    seconds[kind] = answer.seconds
                    right[kind] += answer.text.strip().startswith(other.answer.strip())
                ratios.append(seconds["anew"] / seconds["session"])
            print(
                f"| {length} | {budget} | {right['anew']} of {TEXTS} | {right['session']} of {TEXTS} | "
                f"{statistics.median(ratios):.1f}x | {min(ratios):.1f}-{max(ratios):.1f}x |",
                flush=True,
            )


if __name__ == "__main__":
    main()

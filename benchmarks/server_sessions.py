"""What a session saves and costs: the second turn over the compressed cache, beside reading everything anew.

    python benchmarks/server_sessions.py

The shipped model reads a text with notes and is asked for one of them, then for another. The second question is put
twice to one server, in turn: with the session, and without. Times are those to the first text of the second answer.
"""

from __future__ import annotations

import json
import random
import statistics
import time

from benchmarks.server_load import serving
from snapstream.assets import TASK_MODEL
from snapstream.engine.settings import load_tokenizer
from snapstream.evaluation.tasks.needle import notes

TEXTS = 40
NOTES = 12


def second_turn(client, history, question, session):
    """The answer to a question, and the seconds to its first text."""
    body = {"messages": [*history, {"role": "user", "content": question}], "max_tokens": 6, "temperature": 0}
    body |= {"stream": True, **({"session_id": session} if session else {})}
    began, first, text = time.monotonic(), None, ""
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                piece = event["choices"][0]["delta"].get("content", "") if event["choices"] else ""
                first = first or (time.monotonic() if piece else None)
                text += piece
                if session and "session" in event:
                    assert event["session"]["reused_tokens"] > 0, event["session"]
    return text, first - began


def main() -> None:
    """Print the table."""
    tokenizer = load_tokenizer(str(TASK_MODEL))
    print(
        "| prompt | cache | right, read anew | right, over the session | time to first text, anew / session | range |"
    )
    print("|---|---|---|---|---|---|")
    for length, budget in ((2048, 512), (2048, 256), (8192, 2048), (8192, 1024)):
        with serving("--budget", str(budget), "--slots", "1", "--eager", "--sessions", "1") as client:
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
                    text, seconds[kind] = second_turn(
                        client, history, other.ask.strip(), session if kind == "session" else None
                    )
                    right[kind] += text.strip().startswith(other.answer.strip())
                ratios.append(seconds["anew"] / seconds["session"])
            print(
                f"| {length} | {budget} | {right['anew']} of {TEXTS} | {right['session']} of {TEXTS} | "
                f"{statistics.median(ratios):.1f}x | {min(ratios):.1f}-{max(ratios):.1f}x |",
                flush=True,
            )


if __name__ == "__main__":
    main()

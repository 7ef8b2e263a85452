"""Load test of a server: hundreds of concurrent requests, some aborted, some invalid; all finished answers are checked.

    python benchmarks/server_load.py            # starts `snapstream serve` on the shipped model; prints a table
    python benchmarks/server_load.py --model FILE.gguf --structured

With ``--structured``, a third of the requests ask for an answer that fits a schema, or for a call of a tool.

First, each of a number of different requests is answered alone on the idle server. Every round then sends each of them
several times, in random order, with limited concurrency. Some requests are aborted at a random moment, and some are
invalid. At the end of each round nothing may be left over: no busy slot, no sequence, no file handle, no memory.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from snapstream.assets import EXAMPLE

INVALID: list[dict[str, Any]] = [
    {"prompt": ""},
    {"prompt": "Notes", "n": 1_000_000},
    {"prompt": "Notes", "temperature": "hot"},
    {"prompt": "Notes", "max_tokens": -2},
    {"prompt": "Notes", "logit_bias": {"x": 1}},
    {"prompt": [10**6]},
    {"prompt": "word " * 40_000},
    {"prompt": "Notes", "kv_budget": 10**8},
    {"messages": []},
]


@dataclass
class Round:
    """Outcomes of the requests of one round."""

    finished: int = 0
    unequal: int = 0
    aborted: int = 0
    invalid: int = 0
    wrong: collections.Counter[str] = field(default_factory=collections.Counter)
    refused: int = 0
    most: int = 0
    seconds: float = 0.0
    tokens: int = 0


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["person", "place", "thing"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "kind", "count"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "save", "description": "Save a note.", "parameters": SCHEMA}}


def structured(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A request for a structured answer, or for a call of a tool."""
    body = {name: value for name, value in body.items() if name not in ("ignore_eos", "logprobs")} | {"max_tokens": 128}
    if rng.random() < 0.5:
        return body | {"guided_json": SCHEMA}
    messages = [{"role": "user", "content": f"{body.pop('prompt')}\n\nSave a note about this."}]
    return body | {"messages": messages, "tools": [TOOL], "tool_choice": "required"}


def make_requests(
    number: int, seed: int, text: str, most_characters: int = 16_000, *, shaped: bool = False
) -> list[dict[str, Any]]:
    """Requests of mixed lengths; half are sampled with a seed, half stream; a third may be structured."""
    rng = random.Random(seed)
    requests = []
    for index in range(number):
        length = int(20 * (most_characters / 20) ** rng.random())  # log-uniform
        start = rng.randrange(max(1, len(text) - length))
        made = {
            "prompt": text[start : start + length],
            "max_tokens": rng.choice([1, 4, 16, 64, 128]),
            "temperature": rng.choice([0, 1.0]),
            "seed": index,
            "stream": rng.random() < 0.5,
            "ignore_eos": True,
            **({"kv_budget": rng.choice([64, 128, 256])} if rng.random() < 0.3 else {}),
            **({"logprobs": 2} if rng.random() < 0.2 else {}),
        }
        requests.append(structured(made, rng) if shaped and index % 3 == 0 else made)
    return requests


def said(choice: dict[str, Any]) -> str:
    """What a choice, or a part of it, says: its text, and names and arguments of calls."""
    message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return (message.get("content") or "") + "".join(f"{call.get('name', '')}{call['arguments']}" for call in calls)


async def ask(client: httpx.AsyncClient, body: dict[str, Any], cut_after: float | None = None) -> str:
    """Return the text of an answer; after ``cut_after`` seconds, if given, the connection is closed."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if not body.get("stream"):
        reply = await asyncio.wait_for(client.post(path, json=body), cut_after)
        reply.raise_for_status()
        return said(reply.json()["choices"][0])

    async def read() -> str:
        parts = []
        async with client.stream("POST", path, json=body) as reply:
            if reply.status_code >= 400:
                await reply.aread()
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(event["error"]["message"])
                    parts.append(said(event["choices"][0]))
                elif line == "data: [DONE]":
                    return "".join(parts)
        raise RuntimeError("the stream ended early")

    return await asyncio.wait_for(read(), cut_after)


def client_of(url: str) -> httpx.AsyncClient:
    """A client that opens a new connection for each request."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=600, limits=limits)


async def run_round(
    client: httpx.AsyncClient,
    requests: list[dict[str, Any]],
    expected: list[str],
    *,
    copies: int,
    at_once: int,
    seed: int,
) -> Round:
    """Send every request ``copies`` times; of all requests, another 10 % are aborted and another 5 % are invalid."""
    rng = random.Random(seed)
    result, running, limit = Round(), 0, asyncio.Semaphore(at_once)

    async def one(index: int, kind: str) -> None:
        nonlocal running
        async with limit:
            running += 1
            result.most = max(result.most, running)
            try:
                await attempt(index, kind)
            except Exception as error:
                result.wrong[f"{kind}: {type(error).__name__} {error}"[:150]] += 1
            finally:
                running -= 1

    async def attempt(index: int, kind: str) -> None:
        body = requests[index]
        if kind == "abort":
            body = body | {"max_tokens": 2000, "ignore_eos": "guided_json" not in body and "tools" not in body}
            with contextlib.suppress(asyncio.TimeoutError, httpx.HTTPStatusError):
                await ask(client, body, rng.choice([0.001, 0.05, 0.5, 2.0]))
            result.aborted += 1
            return
        if kind == "invalid":
            bad = rng.choice(INVALID)
            path = "/v1/chat/completions" if "messages" in bad else "/v1/completions"
            while (reply := await client.post(path, json=bad)).status_code == 429:
                await asyncio.sleep(float(reply.headers["retry-after"]))
            assert reply.status_code == 400, reply.text
            result.invalid += 1
            return
        while True:
            try:
                text = await ask(client, body)
            except httpx.HTTPStatusError as error:
                if error.response.status_code != 429:
                    raise
                result.refused += 1
                await asyncio.sleep(float(error.response.headers["retry-after"]) * (0.5 + rng.random()))
                continue
            result.finished += 1
            result.unequal += text != expected[index]
            result.tokens += body["max_tokens"]
            return

    jobs = [(index, "plain") for index in range(len(requests))] * copies
    extra = len(jobs) / 0.85
    jobs += [(rng.randrange(len(requests)), "abort") for _ in range(round(extra * 0.10))]
    jobs += [(0, "invalid") for _ in range(round(extra * 0.05))]
    rng.shuffle(jobs)
    began = time.monotonic()
    await asyncio.gather(*(one(*job) for job in jobs))
    result.seconds = time.monotonic() - began
    return result


async def left_over(url: str) -> dict[str, float]:
    """The server's resources once no request is running any more."""
    end = time.monotonic() + 60
    async with client_of(url) as client:
        while True:
            text = (await client.get("/metrics")).text
            numbers = {
                line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
                for line in text.splitlines()
                if not line.startswith("#")
            }
            if numbers["snapstream_sequences_unfinished"] == 0 or time.monotonic() > end:
                names = ("snapstream_sequences_unfinished", "snapstream_slots_busy", "process_open_fds")
                found = {name: numbers[name] for name in names}
                return found | {"MiB": numbers["process_resident_memory_bytes"] / 2**20}
            await asyncio.sleep(0.2)


async def drive(url: str, *, number: int, copies: int, at_once: int, rounds: int, shaped: bool = False) -> bool:
    """Run all rounds against a server and print the table; returns whether everything was correct."""
    text = json.loads(EXAMPLE.read_text())["text"]
    requests = make_requests(number, 0, text, shaped=shaped)
    ok = True
    # A client keeps connections of some aborted requests open, so each round uses a new client.
    async with client_of(url) as client:
        began = time.monotonic()
        expected = [await ask(client, body) for body in requests]
        alone = sum(body["max_tokens"] for body in requests) / (time.monotonic() - began)
        await run_round(client, requests, expected, copies=1, at_once=at_once, seed=99)  # fills allocators and pools
    before = await left_over(url)
    print(f"before: {before['MiB']:.0f} MiB, {before['process_open_fds']:.0f} file handles\n")
    print(
        "| round | requests | most at once | finished | equal to alone | aborted | invalid, refused 400 | "
        "refused 429, sent again | tokens/s, to one at a time | sequences left | busy slots | file handles | MiB |"
    )
    print("|" + "---|" * 13)
    for index in range(rounds):
        async with client_of(url) as client:
            r = await run_round(client, requests, expected, copies=copies, at_once=at_once, seed=index)
        left = await left_over(url)
        total = r.finished + r.aborted + r.invalid + sum(r.wrong.values())
        print(
            f"| {index + 1} | {total} | {r.most} | {r.finished} | {r.finished - r.unequal} | {r.aborted} | "
            f"{r.invalid} | {r.refused} | {r.tokens / r.seconds / alone:.2f}x | "
            f"{left['snapstream_sequences_unfinished']:.0f} | {left['snapstream_slots_busy']:.0f} | "
            f"{left['process_open_fds']:.0f} | {left['MiB']:.0f} |"
        )
        for problem, times in r.wrong.items():
            print(f"WRONG, {times} times: {problem}")
        clean = not left["snapstream_sequences_unfinished"] and not left["snapstream_slots_busy"]
        ok &= clean and not r.wrong and not r.unequal and left["process_open_fds"] <= before["process_open_fds"] + 2
    return ok


@contextlib.contextmanager
def serving(*options: str) -> Iterator[httpx.Client]:
    """Run ``snapstream serve`` with these options; yields a client for it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "snapstream.cli", "serve", "--port", str(port), *options]
    with (
        subprocess.Popen(command, stderr=subprocess.DEVNULL) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client,
    ):
        try:
            for _ in range(600):
                if server.poll() is not None:
                    raise RuntimeError("the server did not start; run it by hand to see why")
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/ready").status_code == 200:
                        break
                time.sleep(0.5)
            yield client
        finally:
            server.terminate()


def main() -> None:
    """Start a server, run the load test, and stop the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=120, help="number of different requests")
    parser.add_argument("--copies", type=int, default=5, help="how often each is sent per round")
    parser.add_argument("--at-once", type=int, default=300, help="maximum number of concurrent connections")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max-queue", type=int, default=200)
    parser.add_argument(
        "--structured", action="store_true", help="a third of the requests are structured, or call tools"
    )
    parser.add_argument("--model", help="a model to serve instead of the shipped one")
    parser.add_argument("--url", help="address of a server that is already running")
    arguments = parser.parse_args()
    options = {name: getattr(arguments, name) for name in ("number", "copies", "at_once", "rounds")}
    options["shaped"] = arguments.structured
    if arguments.url:
        sys.exit(not asyncio.run(drive(arguments.url, **options)))
    options_of_server = ["--budget", "512", "--slots", str(arguments.slots), "--max-queue", str(arguments.max_queue)]
    if arguments.model:
        options_of_server += ["--model", arguments.model, "--max-model-len", "8192"]
    with serving(*options_of_server) as client:
        ok = asyncio.run(drive(str(client.base_url), **options))
    sys.exit(not ok)


if __name__ == "__main__":
    main()

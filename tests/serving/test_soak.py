"""Everything at once, for long: ``make soak``. Requests of all kinds, with errors, aborts and a full disk among them.

An answer is the one that the same request gets alone, or an error that was caused here; nothing is left behind.
"""

import asyncio
import contextlib
import errno
import json
import os
import random
import resource
import time
from collections import Counter

import httpx
import pytest

from snapstream import LLM
from snapstream.errors import CacheFileError
from tests.checkpoints import prompt
from tests.engine.test_engine import BUDGET
from tests.integrity import check_integrity
from tests.serving.servers import idle, post, running, wait_until

REQUESTS = int(os.environ.get("SNAPSTREAM_SOAK_REQUESTS", "400"))
AT_ONCE = 40
KINDS = {"plain": 8, "stream": 8, "abort": 4, "session": 4, "context": 3, "new context": 1, "invalid": 1, "many": 1}
BASE = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(
        str(checkpoint), budget=BUDGET, max_model_len=1000, slots=4, prefill_chunk=32, sessions=6, context_bytes=150_000
    )


def prompts():
    """Some begin alike, some are long, and a few are equal."""
    rng = random.Random(0)
    stems = [prompt(n, seed=n) for n in (40, 90, 200, 600)]
    return [rng.choice(stems) + prompt(rng.randrange(1, 60), seed=at) for at in range(40)]


class Soak:
    """The clients of one server."""

    def __init__(self, server):
        """Get every answer alone, while nothing fails yet."""
        self.server, self.rng, self.seen = server, random.Random(0), Counter()
        self.prompts, self.talks = prompts(), {}
        self.expected = [
            post(server, prompt=tokens, max_tokens=12, **BASE).json()["choices"][0]["text"] for tokens in self.prompts
        ]
        self.context = post(server, "/v1/contexts", text=prompt(150, seed=7)).json()["id"]
        reply = post(server, prompt=[5, 6], context_id=self.context, max_tokens=8, **BASE)
        self.of_context = reply.json()["choices"][0]["text"]

    async def one(self, client):
        (kind,) = self.rng.choices([*KINDS], [*KINDS.values()])
        self.seen[kind] += 1
        await getattr(self, "_" + kind.replace(" ", "_"))(client)

    async def _post(self, client, body, path="/v1/completions"):
        """An answer, or ``None`` if the server has refused it or failed, as it may."""
        while True:
            reply = await client.post(path, json=body)
            if reply.status_code not in (429, 409):
                break
            self.seen[f"status {reply.status_code}"] += 1
            await asyncio.sleep(0.02)
        if reply.status_code == 200:
            return reply.json()
        code = reply.json()["error"]["code"]
        self.seen[code] += 1
        assert code in ("engine_error", "contexts_full", "context_not_found"), reply.text
        return None

    async def _plain(self, client):
        at = self.rng.randrange(len(self.prompts))
        reply = await self._post(client, {"prompt": self.prompts[at], "max_tokens": 12, **BASE})
        assert reply is None or reply["choices"][0]["text"] == self.expected[at]

    async def _many(self, client):
        at = self.rng.randrange(len(self.prompts))
        reply = await self._post(client, {"prompt": self.prompts[at], "max_tokens": 12, "n": 3, **BASE})
        assert reply is None or {each["text"] for each in reply["choices"]} == {self.expected[at]}

    async def _stream(self, client):
        at = self.rng.randrange(len(self.prompts))
        body = {"prompt": self.prompts[at], "max_tokens": 12, "stream": True, **BASE}
        text = ""
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                assert reply.status_code in (429, 500), reply.text
                return
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        assert event["error"]["code"] == "engine_error"
                        return
                    text += event["choices"][0]["text"]
        assert text == self.expected[at]

    async def _abort(self, client):
        body = {"prompt": self.rng.choice(self.prompts), "max_tokens": 300, "stream": self.rng.random() < 0.5, **BASE}
        with contextlib.suppress(asyncio.TimeoutError, httpx.TransportError):
            await asyncio.wait_for(client.post("/v1/completions", json=body), self.rng.choice([0.001, 0.01, 0.05]))

    async def _session(self, client):
        name = f"s{self.rng.randrange(12)}"
        tokens = self.talks.setdefault(name, prompt(60, seed=len(self.talks)))
        reply = await self._post(client, {"prompt": tokens, "session_id": name, "max_tokens": 4, **BASE})
        if reply is not None:
            assert reply["session"]["id"] == name
            self.talks[name] = [*tokens, 7, 8, 9] if len(tokens) < 300 else prompt(60, seed=len(self.talks))

    async def _context(self, client):
        body = {"prompt": [5, 6], "context_id": self.context, "max_tokens": 8, **BASE}
        reply = await self._post(client, body)
        if reply is None:
            made = await self._post(client, {"text": prompt(150, seed=7)}, "/v1/contexts")
            self.context = self.context if made is None else made["id"]
        else:
            assert reply["choices"][0]["text"] == self.of_context

    async def _new_context(self, client):
        await self._post(client, {"text": prompt(100, seed=self.rng.randrange(50))}, "/v1/contexts")

    async def _invalid(self, client):
        bad = self.rng.choice(
            [{"prompt": ""}, {"prompt": [10**6]}, {"prompt": "w5", "n": 10**6}, {"prompt": [5] * 2000}]
        )
        assert (await client.post("/v1/completions", json=bad)).status_code == 400

    async def run(self, number):
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=60, limits=limits) as client:
            left = iter(range(number))

            async def work():
                for _ in left:
                    await self.one(client)

            await asyncio.gather(*(work() for _ in range(AT_ONCE)))


def break_things(server, rng, monkeypatch):
    """Steps fail now and then, though never three times in a row, and the disk is full for a while."""
    engine, recently = server.llm.engine, [0]
    decode, save = engine.runner.decode, engine.files.save

    def failing(batch, most):
        recently[0] += 1
        if recently[0] > 100 and rng.random() < 0.005:
            recently[0] = 0
            raise RuntimeError("on purpose")
        return decode(batch, most)

    def full(*given, **named):
        if int(time.monotonic()) % 3 == 0:
            raise CacheFileError("full") from OSError(errno.ENOSPC, "No space left on device")
        return save(*given, **named)

    monkeypatch.setattr(engine.runner, "decode", failing)
    monkeypatch.setattr(engine.files, "save", full)


def test_everything_at_once(llm, tmp_path, monkeypatch):
    settings = {
        "session_dir": tmp_path / "sessions",
        "context_dir": tmp_path / "contexts",
        "session_disk": 400_000,
        "context_disk": 400_000,
        "max_queue": 60,
    }
    rounds, memory = max(1, REQUESTS // 5000), []
    with running(llm, **settings) as server:
        soak = Soak(server)
        break_things(server, random.Random(1), monkeypatch)
        for number in range(rounds):
            began = time.monotonic()
            asyncio.run(soak.run(REQUESTS // rounds))
            wait_until(lambda: idle(server))
            check_integrity(llm.engine)
            sessions, contexts = server.parts.sessions, server.parts.contexts
            assert not sessions._running
            for store in (sessions.store, contexts.store, llm.engine.model_runner.prefixes.store):
                store.flush()
                assert store.nbytes <= store.max_bytes
                assert all(stored.users == 0 for stored in store.all())
                assert not any(stored.users for stored in store._held)
            for place in ("sessions", "contexts"):
                assert sum(path.stat().st_size for path in (tmp_path / place).iterdir()) <= 400_000
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            print(
                f"round {number + 1}: {dict(soak.seen)}, {time.monotonic() - began:.0f} s, {memory[-1] // 1024} MiB, "
                f"{len(os.listdir('/proc/self/fd'))} files open",
                flush=True,
            )
    assert memory[-1] - memory[0] < 200 * 1024

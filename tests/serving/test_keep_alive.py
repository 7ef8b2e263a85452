"""A stream says that it is alive while its prompt waits or is read, in comments that clients ignore."""

import threading
import time

import httpx
import openai
import pytest

from tests.checkpoints import prompt
from tests.serving.servers import post, running, wait_until


@pytest.fixture
def slow(llm, monkeypatch):
    """An engine that takes its time for every step."""
    step = llm.engine.step

    def slow_step():
        time.sleep(0.05)
        return step()

    monkeypatch.setattr(llm.engine, "step", slow_step)
    return llm


def comments(text):
    return [line for line in text.splitlines() if line.startswith(":")]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_while_a_prompt_is_read(slow, path):
    words = " ".join(f"w{token}" for token in prompt(640))  # twenty chunks
    body = {"prompt": words} if path == "/v1/completions" else {"messages": [{"role": "user", "content": words}]}
    with running(slow, keep_alive_seconds=0.2) as server:
        text = post(server, path, **body, max_tokens=3, stream=True).text
        reading = [line for line in comments(text) if line.startswith(": reading the prompt: ")]
        assert len(reading) >= 2
        counts = [int(line.split()[4]) for line in reading]
        assert counts == sorted(counts)
        assert all(line.endswith(" of 640 tokens") for line in reading)
        # Before the first token, and in pieces of their own, which every parser of events skips.
        assert text.index(reading[-1]) < text.rindex("data: ")
        assert all(f"{line}\n\n" in text for line in comments(text))
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            kind = client.completions if path == "/v1/completions" else client.chat.completions
            events = list(kind.create(model="tiny", **body, max_tokens=3, stream=True))
            assert events[-1].choices[0].finish_reason


def test_benchmarks_of_vllm_get_empty_lines(slow):
    """Their client strips each part that it receives, so it would take a comment and the event after it for one."""
    words = " ".join(f"w{token}" for token in prompt(640))
    with running(slow, keep_alive_seconds=0.1) as server:
        body = {"prompt": words, "max_tokens": 3, "stream": True}
        parts, buffer, found = [], "", []
        agent = {"User-Agent": "Python/3.12 aiohttp/3.13.3"}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, headers=agent, timeout=30) as reply:
            for part in reply.iter_raw():
                parts.append(part)
                buffer += part.decode().strip()
                if buffer.startswith("data: {") and buffer.endswith("}"):
                    found.append(buffer)
                    buffer = ""
        assert not any(b":" in part and not part.startswith(b"data: ") for part in parts)
        assert sum(not part.strip() for part in parts) >= 2
        assert len(found) >= 2


def test_while_it_waits(slow):
    with running(slow, keep_alive_seconds=0.1, max_queue=20) as server:
        long = {"prompt": prompt(20), "max_tokens": 200, "ignore_eos": True}
        busy = [threading.Thread(target=post, args=(server,), kwargs=long) for _ in range(3)]
        for one in busy:
            one.start()
        wait_until(lambda: sum(use is not None and use.busy for use in server.driver.snapshot.slots) == 3)
        assert ": waiting: 1 in the queue" in post(server, prompt="w5", max_tokens=2, stream=True).text
        for one in busy:
            one.join()


def test_while_tokens_are_held_back(slow):
    """What may be the beginning of a stop string is not sent yet."""
    with running(slow, keep_alive_seconds=0.1) as server:
        token = int(post(server, prompt="w5", max_tokens=1, temperature=0).json()["choices"][0]["text"].strip()[1:])
        word = server.llm.tokenizer.decode([token])
        body = {"prompt": "w5", "max_tokens": 30, "logit_bias": {str(token): 100}, "stop": [word * 100], "stream": True}
        assert ": generating" in post(server, **body, ignore_eos=True).text


def test_never_where_it_is_switched_off_or_not_needed(slow, llm):
    with running(slow, keep_alive_seconds=0) as server:
        assert not comments(post(server, prompt=prompt(640), max_tokens=3, stream=True).text)
    with running(llm, keep_alive_seconds=30) as server:
        assert not comments(post(server, prompt=prompt(640), max_tokens=3, stream=True).text)


def test_a_client_that_disconnects_meanwhile(slow):
    with running(slow, keep_alive_seconds=0.05) as server:
        with httpx.stream(
            "POST", server.url + "/v1/completions", json={"prompt": prompt(1500), "stream": True}
        ) as reply:
            next(reply.iter_raw())
        wait_until(lambda: server.driver.unfinished == 0)
        assert post(server, prompt="w5", max_tokens=1).status_code == 200


def test_the_deadline_holds(slow):
    """Reading takes at least three seconds; before it began, the error would be an ordinary answer."""
    with running(slow, keep_alive_seconds=0.05, request_timeout=2) as server:
        text = post(server, prompt=prompt(1900), stream=True).text
        assert comments(text)
        assert '"code": "timeout"' in text.strip().splitlines()[-1]

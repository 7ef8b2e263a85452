"""The router before two servers of our own: conversations go on where their beginnings have been read."""

import contextlib
import subprocess
import sys
import threading

import httpx
import pytest

pytest.importorskip("fastapi")
from tests.serving.servers import wait_until
from tests.serving.test_process import free_port, process, ready

SERVE = [sys.executable, "-m", "snapstream.cli", "serve", "--max-model-len", "4096", "--budget", "512"]
SERVE += ["--prefix-cache", "64MiB", "--sessions", "4", "--contexts", "64MiB"]
TURNS, CONVERSATIONS = 4, 6


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """Two servers, and a router before them."""
    log = tmp_path_factory.mktemp("replicas") / "log"
    with contextlib.ExitStack() as stack:
        urls, started = [], []
        for _ in range(2):
            port = free_port()
            started.append(stack.enter_context(process(log, "--port", str(port), command=SERVE)))
            urls.append(f"http://127.0.0.1:{port}")
        port = free_port()
        route = [sys.executable, "-m", "snapstream.cli", "route", "--replica", ",".join(urls), "--port", str(port)]
        stack.enter_context(process(log, "--check-seconds", "0.2", command=route))
        for url in urls:
            ready(url, 120)
        router = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_well(router) == 2, 60)
        yield router, urls, started


def is_well(url):
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url + "/health").json()["decode"]
    return 0


def served(url):
    """Requests that a server has answered."""
    lines = httpx.get(url + "/metrics").text.splitlines()
    found = (line for line in lines if line.startswith("snapstream_http_requests_total") and "chat" in line)
    return sum(float(line.split()[-1]) for line in found)


def ask(url, messages, **more):
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, **more}
    answer = httpx.post(url + "/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def opening(number):
    return {"role": "user", "content": f"Notes of day {number}. " + "The key of room 7 is in the blue box. " * 40}


def test_conversations_are_read_once(replicas):
    """Several at a time, so that both servers have something to do; every turn finds the one before in the cache."""
    router, urls, _ = replicas
    before = [served(url) for url in urls]
    cached: dict[int, list[float]] = {}
    together = threading.Barrier(CONVERSATIONS)

    def talk(number):
        messages, shares = [opening(number)], []
        together.wait(60)
        for turn in range(TURNS):
            answer = ask(router, messages)
            usage = answer["usage"]
            shares.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
            messages += [
                {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
                {"role": "user", "content": f"And what is in box {turn}? " * 10},
            ]
        cached[number] = shares

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(CONVERSATIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cached) == CONVERSATIONS
    later = [share for shares in cached.values() for share in shares[1:]]
    assert sum(share > 0.5 for share in later) >= 0.9 * len(later), cached
    counts = [served(url) - was for url, was in zip(urls, before, strict=True)]
    assert sum(counts) == CONVERSATIONS * TURNS
    assert min(counts) >= 1  # begun at once, they were shared out


def test_sessions_and_contexts(replicas):
    router, *_ = replicas
    for name in ("one", "two", "three", "four"):
        messages = [opening(len(name))]
        first = ask(router, messages, session_id=name)
        assert first["session"]["kept"]
        messages += [first["choices"][0]["message"], {"role": "user", "content": "Where is it?"}]
        second = ask(router, messages, session_id=name)
        assert second["session"]["reused_tokens"] > 100
        assert httpx.delete(f"{router}/v1/sessions/{name}").status_code == 200
    names = []
    for number in range(4):
        text = opening(50 + number)["content"]
        names.append(httpx.post(router + "/v1/contexts", json={"text": text}, timeout=60).json()["id"])
    listed = httpx.get(router + "/v1/contexts").json()["data"]
    assert {each["id"] for each in listed} >= set(names)
    for name in names:
        answer = ask(router, [{"role": "user", "content": "Where is the key?"}], context_id=name)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        assert httpx.delete(f"{router}/v1/contexts/{name}").status_code == 200


def test_other_apis(replicas):
    router, *_ = replicas
    body = {"max_tokens": 8, "messages": [{"role": "user", "content": "Notes"}], "model": "task-model"}
    assert httpx.post(router + "/v1/messages", json=body, timeout=60).json()["type"] == "message"
    del body["max_tokens"]
    counted = httpx.post(router + "/v1/messages/count_tokens", json=body, timeout=60)
    assert counted.json()["input_tokens"] > 0
    said = []
    for _ in range(4):  # whichever server has it
        more = {"previous_response_id": said[-1]} if said else {}
        answer = httpx.post(
            router + "/v1/responses", json={"input": "Notes", "max_output_tokens": 8, **more}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        said.append(answer.json()["id"])
    stream = {"input": "Notes", "max_output_tokens": 8, "stream": True, "previous_response_id": said[0]}
    answer = httpx.post(router + "/v1/responses", json=stream, timeout=60)
    assert "response.output_text.done" in answer.text


def test_one_of_two_dies(replicas):
    """Last, as it does not come back: conversations go on with the other one."""
    router, urls, started = replicas
    messages = [opening(99)]
    ask(router, messages)
    started[0].kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        started[0].wait(10)
    for _ in range(4):
        ask(router, messages)
    wait_until(lambda: is_well(router) == 1, 20)
    assert httpx.get(urls[1] + "/ready").status_code == 200

"""What brought other servers down, each as a test; and faults of our own parts."""

import json
import os
import socket
import threading
import time

import httpx
import pytest

from snapstream.engine.requests.text import OutputText
from snapstream.kernels.sampling import SamplingState
from tests.checkpoints import prompt
from tests.serving.servers import idle, post, running, wait_until

WORDS = " ".join(f"w{token}" for token in prompt(100))
LONG = " ".join(f"w{token}" for token in prompt(1500, seed=1))
FOREVER = {"ignore_eos": True, "temperature": 0}


def works(server):
    """The server answers, the same as ever."""
    wait_until(lambda: idle(server))
    first, second = (post(server, prompt=WORDS, max_tokens=20, **FOREVER) for _ in range(2))
    assert first.status_code == 200
    assert first.json()["choices"] == second.json()["choices"]
    return first.json()["choices"][0]["text"]


def raw_request(server, path="/v1/completions", **body):
    """An open connection on which a request was sent."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(server.url.removeprefix("http://").split(":"))
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


class Gate:
    """Lets the engine take one step at a time."""

    def __init__(self, llm, monkeypatch):
        self.steps, self._open, self._step = 0, threading.Semaphore(0), llm.engine.step
        self._free = self.closed = False
        monkeypatch.setattr(llm.engine, "step", self.step)

    def step(self):
        if not self._free:
            self.closed = True
            assert self._open.acquire(timeout=30)
            self.closed = False
        outputs = self._step()
        self.steps += 1
        return outputs

    def let(self, steps):
        target = self.steps + steps
        for _ in range(steps):
            self._open.release()
        wait_until(lambda: self.steps == target)

    def open(self):
        self._free = True
        self._open.release()


def failing_launches(server, monkeypatch, fails):
    """Launches raise an error as often as there is something in ``fails``, which is returned."""
    decoder = server.llm.engine.model_runner.decoder
    launch = decoder.launch

    def failing(*args, **kwargs):
        if fails and fails.pop():
            raise RuntimeError("on purpose")
        return launch(*args, **kwargs)

    monkeypatch.setattr(decoder, "launch", failing)
    return fails


# -- requests ---------------------------------------------------------------------------------------------------------


def test_a_million_answers(server):
    """vLLM, CVE-2026-34756: one request with a huge n took the server down."""
    for path, body in (
        ("/v1/completions", {"prompt": "w5"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w5"}]}),
    ):
        for n in (1_000_000, 10**30):
            began = time.monotonic()
            reply = post(server, path, n=n, **body)
            assert reply.status_code == 400
            assert time.monotonic() - began < 2
    assert "at most 128" in post(server, prompt="w5", n=1_000_000).json()["error"]["message"]
    assert post(server, prompt=["w5"] * 129).status_code == 400
    works(server)


@pytest.mark.parametrize("empty", ["", [], [""], [[]], ["w5", ""], [[5], []], None])
def test_an_empty_prompt(server, empty):
    reply = post(server, prompt=empty, max_tokens=5)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    works(server)


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": ""}], [{"role": "user"}], [{}], None])
def test_empty_messages(server, messages):
    assert post(server, "/v1/chat/completions", messages=messages).status_code == 400
    works(server)


def test_stops_and_biases_of_absurd_size(server):
    absurd = [
        {"stop": ["x"] * 100_000},
        {"stop": "x" * 1_000_000},
        {"stop": [f"{i}" for i in range(17)]},
        {"logit_bias": {str(i): 1.0 for i in range(100_000)}},
        {"logit_bias": {"5": 1e308}},
        {"logit_bias": {"9" * 1000: 1.0}},
        {"stop_token_ids": list(range(100_000))},
        {"logprobs": 10**6},
        {"top_k": 10**18},
        {"seed": 10**40},
        {"max_tokens": 10**18},
        {"kv_budget": 10**9},
    ]
    for body in absurd:
        began = time.monotonic()
        assert post(server, prompt="w5", **body).status_code == 400, body.keys()
        assert time.monotonic() - began < 5
    assert post(server, prompt="w5", stop="x" * (17 * 2**20)).status_code == 413
    works(server)


def test_a_chat_template_that_loops(llm, monkeypatch):
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}"
    with running(llm, template_timeout=0.5) as server:
        expected = works(server)
        replies = []
        with monkeypatch.context() as patched:
            patched.setattr(llm, "chat_template", loops)
            body = {"messages": [{"role": "user", "content": "w5"}]}
            threads = [
                threading.Thread(target=lambda: replies.append(post(server, "/v1/chat/completions", **body)))
                for _ in range(4)
            ]
            began = time.monotonic()
            for thread in threads:
                thread.start()
            assert works(server) == expected  # meanwhile
            for thread in threads:
                thread.join()
            assert time.monotonic() - began < 15
            assert [reply.status_code for reply in replies] == [400] * 4
            assert "took longer than 0.5 s" in replies[0].json()["error"]["message"]
            patched.setattr(llm, "chat_template", "{{ 1 // 0 }}")
            reply = post(server, "/v1/chat/completions", **body)
            assert reply.status_code == 400
            assert "rejects these messages" in reply.json()["error"]["message"]
            patched.setattr(llm, "chat_template", None)
            assert "no chat template" in post(server, "/v1/chat/completions", **body).json()["error"]["message"]
        assert works(server) == expected


# -- connections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_slot_within_one_step(server, monkeypatch, stream):
    """ATOM #1441: not streaming, it ran to max_tokens. llama.cpp #11720, #24496: the slot stayed busy."""
    gate = Gate(server.llm, monkeypatch)
    connection = raw_request(server, prompt=WORDS, max_tokens=1800, stream=stream, **FOREVER)
    gate.let(8)  # four chunks of prompt, then tokens
    wait_until(lambda: server.driver.snapshot.slots[0] is not None and server.driver.snapshot.slots[0].busy)
    wait_until(lambda: gate.closed)
    connection.close()
    wait_until(lambda: not server.driver._commands.empty())  # it has been noticed; the engine is in the next step
    gate.let(1)
    wait_until(lambda: not any(server.llm.engine.table.slots))
    gate.open()
    wait_until(lambda: idle(server))
    assert gate.steps <= 10  # and the one that reports it
    works(server)


def test_a_client_that_goes_in_the_queue_or_in_mid_prefill(server, monkeypatch):
    gate = Gate(server.llm, monkeypatch)
    reading = raw_request(server, prompt=LONG, max_tokens=5, **FOREVER)
    waiting = [raw_request(server, prompt=WORDS, max_tokens=5, **FOREVER) for _ in range(5)]
    wait_until(lambda: server.driver.unfinished == 6)
    gate.let(3)
    assert server.llm.engine.reading
    for connection in (*waiting, reading):
        connection.close()
    wait_until(lambda: server.driver._commands.qsize() == 6)  # on a busy machine, the server notices late
    gate.open()
    wait_until(lambda: idle(server))
    assert gate.steps < 3 + 5
    works(server)


def test_a_stream_dropped_while_another_prompt_is_read(server, monkeypatch):
    """llama.cpp #27604: the other one hung for good."""
    expected = post(server, prompt=LONG, max_tokens=10, **FOREVER).json()["choices"]
    gate = Gate(server.llm, monkeypatch)
    dropped = raw_request(server, prompt="w5 w6", max_tokens=1500, stream=True, **FOREVER)
    gate.let(3)
    replies = []
    thread = threading.Thread(target=lambda: replies.append(post(server, prompt=LONG, max_tokens=10, **FOREVER)))
    thread.start()
    wait_until(lambda: server.driver.unfinished == 2)
    gate.let(5)
    assert server.llm.engine.reading
    dropped.close()
    gate.open()
    thread.join(30)
    assert replies[0].json()["choices"] == expected
    works(server)


def test_three_hundred_aborted_streams(server):
    """lmdeploy #1788: it stalled."""
    expected = works(server)
    files = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    for index in range(300):
        connection = raw_request(server, prompt=WORDS, max_tokens=1500, stream=True, **FOREVER)
        if index % 3:
            assert connection.recv(100)
        if index % 5 == 0:  # a reset instead of an orderly end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
    wait_until(lambda: idle(server))
    assert works(server) == expected
    if files:
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files + 2)


def test_a_client_that_reads_one_byte_a_second(server):
    expected = works(server)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    slow.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    body = json.dumps({"prompt": "w5", "max_tokens": 1900, "stream": True, "logprobs": 20, **FOREVER}).encode()
    slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n" % len(body))
    slow.sendall(b"Content-Type: application/json\r\n\r\n" + body)
    assert slow.recv(1)
    for _ in range(3):
        assert works(server) == expected  # nobody waits for it, and its slot is free when its answer is complete
        assert slow.recv(1)
        time.sleep(1)
    assert server.driver.unfinished == 0
    slow.close()


def test_a_client_that_does_not_read_is_dropped_in_time(llm):
    with running(llm, request_timeout=1.0, flush_timeout=1.5) as server:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        body = {"prompt": "w5", "max_tokens": 1900, "stream": True, "logprobs": 20, **FOREVER}
        data = json.dumps(body).encode() + b" " * 0
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        wait_until(lambda: server.server.server_state.tasks, 5)
        wait_until(lambda: not server.server.server_state.tasks, 10)
        wait_until(lambda: not server.server.server_state.connections, 10)  # with what was buffered for it
        works(server)
        slow.close()


# -- faults -----------------------------------------------------------------------------------------------------------


def background(server, **body):
    """A request in a thread; calling the result waits for its reply."""
    replies = []
    thread = threading.Thread(target=lambda: replies.append(post(server, **body)))
    thread.start()

    def wait():
        thread.join(30)
        return replies[0]

    return wait


@pytest.mark.parametrize("place", ["sampling", "stop handling", "text"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_crash_in_one_request_is_its_own(server, monkeypatch, place, stream):
    expected = works(server)

    def crash(original, which):
        def wrapper(self, *args, **kwargs):
            if which(self, *args):
                raise ZeroDivisionError("on purpose")
            return original(self, *args, **kwargs)

        return wrapper

    if place == "sampling":
        original = SamplingState.assign
        monkeypatch.setattr(SamplingState, "assign", crash(original, lambda _, slot, params, *rest: params.seed == 66))
    else:
        name = "_cut_at_stop_string" if place == "stop handling" else "take_new"
        which = lambda text, **_: text.params.seed == 66 and len(text.tokens) > 10  # noqa: E731
        monkeypatch.setattr(OutputText, name, crash(getattr(OutputText, name), which))
    others = [background(server, prompt=WORDS, max_tokens=20, **FOREVER) for _ in range(4)]
    reply = post(server, prompt=WORDS, max_tokens=100, seed=66, stream=stream, **FOREVER)
    if stream:
        events = reply.text.strip().split("\n\n")
        error = json.loads(events[-1].removeprefix("data: "))["error"]
    else:
        assert reply.status_code == 500
        error = reply.json()["error"]
    assert error["code"] == "request_failed"
    assert "ZeroDivisionError" in error["message"]
    assert [wait().json()["choices"][0]["text"] for wait in others] == [expected] * 4
    assert works(server) == expected


@pytest.mark.parametrize("part", ["decode", "prefill"])
def test_an_engine_exception_fails_what_runs_and_nothing_else(server, monkeypatch, part):
    expected = works(server)
    launch = server.llm.engine.model_runner.decoder.launch
    fails = [True]

    def failing(*args, **kwargs):
        if fails:
            fails.pop()
            raise RuntimeError("on purpose")
        return launch(*args, **kwargs)

    if part == "decode":
        monkeypatch.setattr(server.llm.engine.model_runner.decoder, "launch", failing)
    else:
        original = server.llm.engine.table.begin

        def begin(*args):
            if fails:
                fails.pop()
                raise RuntimeError("on purpose")
            return original(*args)

        monkeypatch.setattr(server.llm.engine.table, "begin", begin)
    reply = post(server, prompt=WORDS, max_tokens=200, **FOREVER)
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "engine_error"
    assert httpx.get(server.url + "/health").status_code == 200
    assert works(server) == expected


def test_what_comes_during_a_failing_step_is_served(server, monkeypatch):
    """It was not in the engine yet, so it has not failed; and nothing is left running that nobody waits for."""
    expected = works(server)
    gate = Gate(server.llm, monkeypatch)
    failing_launches(server, monkeypatch, [True])
    first = background(server, prompt="w5", max_tokens=20, **FOREVER)
    wait_until(lambda: gate.closed)
    gate.let(1)  # its first token is handed out; the next step decodes
    wait_until(lambda: gate.closed)
    second = background(server, prompt=WORDS, max_tokens=20, **FOREVER)
    wait_until(lambda: server.driver.unfinished == 2)
    gate.open()
    assert first().status_code == 500
    assert second().json()["choices"][0]["text"] == expected
    wait_until(lambda: idle(server))
    assert not server.llm.engine.request_ids


def test_what_waits_survives_a_failing_step(server, monkeypatch):
    """Five requests and three slots: those that run fail, and the other two are answered."""
    expected = works(server)
    gate = Gate(server.llm, monkeypatch)
    fails = failing_launches(server, monkeypatch, [])
    first = [background(server, prompt=f"w{at + 5}", max_tokens=1500, **FOREVER) for at in range(3)]
    while sum(one is not None for one in server.llm.engine.table.slots) < 3 or server.llm.engine.table.readers:
        wait_until(lambda: gate.closed)
        gate.let(1)
    last = [background(server, prompt=WORDS, max_tokens=20, **FOREVER) for _ in range(2)]
    wait_until(lambda: server.driver.unfinished == 5)
    gate.let(2)
    assert len(server.llm.engine.table.waiting) == 2
    fails.append(True)
    gate.open()
    assert [wait().json()["error"]["code"] for wait in first] == ["engine_error"] * 3
    assert [wait().json()["choices"][0]["text"] for wait in last] == [expected] * 2
    assert works(server) == expected


def test_a_client_that_has_gone_when_a_step_fails_is_forgotten(server, monkeypatch):
    gate = Gate(server.llm, monkeypatch)
    fails = failing_launches(server, monkeypatch, [])
    other = background(server, prompt="w5", max_tokens=500, **FOREVER)
    gate.let(2)
    gone = raw_request(server, prompt="w6", max_tokens=500, **FOREVER)
    wait_until(lambda: server.driver.unfinished == 2)
    gate.let(2)
    wait_until(lambda: gate.closed)
    gone.close()
    wait_until(lambda: not server.driver._commands.empty())
    gate.let(1)
    fails.append(True)  # in the step that would have reported its end
    gate.open()
    assert other().status_code == 500
    wait_until(lambda: idle(server))
    works(server)


def test_a_repair_that_fails_ends_the_server(llm, monkeypatch):
    """As after an error that a CUDA device does not recover from."""

    def failing(*args, **kwargs):
        raise RuntimeError("on purpose")

    with running(llm) as server:
        with monkeypatch.context() as patched:
            patched.setattr(llm.engine.model_runner.decoder, "launch", failing)
            patched.setattr(llm.engine.runner, "clear", failing)
            assert post(server, prompt=WORDS, max_tokens=20, **FOREVER).status_code == 500
            server.thread.join(20)
        assert not server.thread.is_alive()
        assert server.server.failed


def test_requests_that_all_fail_in_prefill_end_the_server(llm, monkeypatch):
    """Each failure is taken for the request's own, until a request of the server's own fails as well."""

    def failing(*args, **kwargs):
        raise RuntimeError("on purpose")

    with running(llm) as server:
        with monkeypatch.context() as patched:
            patched.setattr(llm.engine.model_runner.prefiller, "advance", failing)
            for index in range(3):
                assert post(server, prompt=f"w{index + 5}", max_tokens=20, **FOREVER).status_code == 500
            server.thread.join(20)
        assert not server.thread.is_alive()
        assert server.server.failed


def test_many_requests_that_fail_by_themselves_do_not_end_it(server, monkeypatch):
    expected = works(server)
    original = SamplingState.assign

    def assign(self, slot, params, *rest):
        if params.seed == 66:
            raise ZeroDivisionError("on purpose")
        original(self, slot, params, *rest)

    monkeypatch.setattr(SamplingState, "assign", assign)
    wait = background(server, prompt="w5", max_tokens=1500, **FOREVER)
    for _ in range(10):
        assert post(server, prompt=WORDS, max_tokens=5, seed=66).status_code == 500
    assert wait().status_code == 200
    assert httpx.get(server.url + "/health").status_code == 200
    assert works(server) == expected


def test_an_engine_that_fails_for_good_ends_the_server(llm, monkeypatch):
    def failing(*args, **kwargs):
        raise RuntimeError("on purpose")

    with running(llm) as server:
        monkeypatch.setattr(llm.engine.model_runner.decoder, "launch", failing)
        for _ in range(3):
            assert post(server, prompt=WORDS, max_tokens=20, **FOREVER).status_code == 500
        server.thread.join(20)
        assert not server.thread.is_alive()
        assert server.server.failed
    monkeypatch.undo()


def test_stopping_finishes_what_runs(llm):
    with running(llm, drain_timeout=20) as server:
        expected = works(server)
        slow = background(server, prompt=LONG, max_tokens=400, **FOREVER)
        wait_until(lambda: server.driver.unfinished == 1)
        wait = background(server, prompt=WORDS, max_tokens=20, **FOREVER)
        wait_until(lambda: server.driver.unfinished == 2)
        server.server.should_exit = True
        assert slow().json()["usage"]["completion_tokens"] == 400
        assert wait().json()["choices"][0]["text"] == expected
        server.thread.join(20)
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")


@pytest.mark.parametrize("stream", [False, True])
def test_stopping_says_what_it_did_not_finish(llm, stream):
    with running(llm, drain_timeout=0.2) as server, httpx.Client(base_url=server.url, timeout=30) as kept:
        kept.get("/health")
        wait = background(server, prompt="w5", max_tokens=1990, stream=stream, logprobs=5, **FOREVER)
        wait_until(lambda: server.driver.unfinished == 1)
        server.server.should_exit = True
        reply = wait()
        if stream:
            error = json.loads(reply.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
        else:
            assert reply.status_code == 503
            error = reply.json()["error"]
        assert error["code"] == "unavailable"
        assert "stopping" in error["message"]


def test_no_new_work_while_stopping(server):
    server.driver.draining = True
    reply = post(server, prompt="w5")
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "5"
    assert httpx.get(server.url + "/ready").status_code == 503
    assert httpx.get(server.url + "/health").status_code == 200

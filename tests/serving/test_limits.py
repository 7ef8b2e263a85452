"""Keys, origins, sizes, times, names of requests."""

import json
import logging
import socket
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest

from snapstream import ConfigurationError, SamplingParams
from snapstream.serving import driver
from snapstream.serving.generation import Generation, Job
from snapstream.serving.prompts import LONG_TEXT
from snapstream.serving.settings import ServerSettings
from tests.serving.servers import idle, metric, post, running, wait_until


def test_api_keys(llm):
    with running(llm, api_keys=("alpha", "beta")) as server:
        for path in ("/v1/models", "/v1/cache", "/tokenize", "/nothing", "/v1/sessions/a"):
            reply = httpx.get(server.url + path)
            assert reply.status_code == 401, path
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
        for path in ("/", "/page/page.js", "/health", "/ready", "/metrics", "/openapi.json"):
            assert httpx.get(server.url + path).status_code == 200, path
        for wrong in (
            "Bearer alph",
            "Bearer alphaa",
            "Bearer",
            "alpha",
            "Basic alpha",
            "Bearer älpha".encode("latin-1"),
        ):
            assert httpx.get(server.url + "/v1/models", headers={"Authorization": wrong}).status_code == 401
        for key in ("alpha", "beta"):
            assert httpx.get(server.url + "/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_sessions_belong_to_a_key(llm):
    with running(llm, api_keys=("alpha", "beta")) as server:
        alpha, beta = ({"Authorization": f"Bearer {key}"} for key in ("alpha", "beta"))
        first = post(server, prompt="w5 w6", max_tokens=3, session_id="mine", headers=alpha).json()
        text = "w5 w6" + first["choices"][0]["text"]
        assert first["session"]["kept"]
        other = post(server, prompt=text + " w7", max_tokens=3, session_id="mine", headers=beta).json()
        assert other["session"]["reused_tokens"] == 0
        assert httpx.delete(server.url + "/v1/sessions/mine", headers=alpha).status_code == 200
        assert httpx.delete(server.url + "/v1/sessions/mine", headers=alpha).status_code == 404
        assert httpx.delete(server.url + "/v1/sessions/mine", headers=beta).status_code == 200


def test_cors(llm):
    asking = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    asking["Access-Control-Request-Headers"] = "authorization,content-type"
    with running(llm, cors_origins=("https://app.example",), api_keys=("k",)) as server:
        reply = httpx.options(server.url + "/v1/completions", headers=asking)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "https://app.example"
        # An error can be read by the page that caused it.
        reply = httpx.get(
            server.url + "/v1/nothing", headers={"Origin": "https://app.example", "Authorization": "Bearer k"}
        )
        assert reply.headers["access-control-allow-origin"] == "https://app.example"
        reply = httpx.options(server.url + "/v1/completions", headers=asking | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in reply.headers
        reply = httpx.get(server.url + "/v1/models", headers={"Origin": "https://app.example"})
        assert reply.status_code == 401
        assert reply.headers["access-control-allow-origin"] == "https://app.example"
    with running(llm) as server:
        assert "access-control-allow-origin" not in httpx.get(server.url + "/health", headers=asking).headers


def test_every_answer_has_a_name(server, caplog):
    with caplog.at_level(logging.INFO, "snapstream.access"):
        reply = post(server, prompt="w5", max_tokens=2, ignore_eos=True, headers={"X-Request-Id": "my-request.1"})
        assert reply.headers["x-request-id"] == "my-request.1"
        assert reply.json()["id"] == "cmpl-my-request.1"
        made = post(server, prompt="w5", max_tokens=-2, headers={"X-Request-Id": "no good!"})
        assert len(made.headers["x-request-id"]) == 32
        assert made.json()["error"]["request_id"] == made.headers["x-request-id"]
        for path in ("/nothing", "/v1/cache", "/"):
            assert httpx.get(server.url + path).headers["x-request-id"]
    lines = {record.fields["request_id"]: record.fields for record in caplog.records if hasattr(record, "fields")}
    assert lines["my-request.1"]["completion_tokens"] == 2
    assert lines["my-request.1"]["prompt_tokens"] == 1
    assert lines["my-request.1"]["finish"] == ["length"]
    assert lines[made.headers["x-request-id"]]["status"] == 400


def test_an_unexpected_error_can_be_read_by_the_page_that_caused_it(llm, monkeypatch):
    with running(llm, cors_origins=("*",)) as server:
        monkeypatch.setattr(server.driver, "check_room", None)
        reply = post(server, prompt="w5", headers={"Origin": "https://app.example"})
        assert reply.status_code == 500
        assert reply.headers["access-control-allow-origin"] == "*"
        assert reply.headers["x-request-id"] == reply.json()["error"]["request_id"]


def test_an_unexpected_error_has_a_name_too(server, monkeypatch):
    def failing(*args, **kwargs):
        raise KeyError("on purpose")

    monkeypatch.setattr(server.driver, "check_room", failing)
    reply = post(server, prompt="w5")
    assert reply.status_code == 500
    assert reply.json()["error"]["request_id"] == reply.headers["x-request-id"]
    assert reply.headers["x-content-type-options"] == "nosniff"
    monkeypatch.undo()
    counted = [
        line
        for line in httpx.get(server.url + "/metrics").text.splitlines()
        if "_total" in line and 'status="500"' in line
    ]
    assert counted == ['snapstream_http_requests_total{method="POST",route="/v1/completions",status="500"} 1.0']


def test_requests_that_are_being_read_are_bounded(llm, monkeypatch):
    """Each holds its body, so they count against the queue."""
    go = threading.Event()
    with running(llm, max_queue=2) as server:
        encode = server.parts.reader._encode
        monkeypatch.setattr(server.parts.reader, "_encode", lambda *given: (go.wait(20), encode(*given))[1])
        replies = []
        threads = [
            threading.Thread(target=lambda: replies.append(post(server, prompt="w5", max_tokens=2).status_code))
            for _ in range(9)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(replies) == 4)
        go.set()
        for thread in threads:
            thread.join()
        assert sorted(replies) == [200] * 5 + [429] * 4


def test_a_body_that_is_too_long(llm):
    with running(llm, max_body_bytes=1000) as server:
        reply = post(server, prompt="w5 " * 400)
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "body_too_large"

        def chunks():  # no length is announced
            for _ in range(100):
                yield b"x" * 100

        assert httpx.post(server.url + "/v1/completions", content=chunks()).status_code == 413
        assert post(server, prompt="w5", max_tokens=2).status_code == 200


def test_bodies_that_nobody_asked_for(llm):
    """Without a key nobody can make the server hold anything; what is short is ignored."""
    with running(llm, api_keys=("k",)) as server:
        for method, path in (("GET", "/health"), ("OPTIONS", "/v1/completions"), ("POST", "/metrics"), ("PUT", "/")):
            assert httpx.request(method, server.url + path, content=b"x" * 1025).status_code == 413
        key = {"Authorization": "Bearer k"}
        for method, path, status in (
            ("GET", "/health", 200),
            ("GET", "/v1/models", 200),
            ("GET", "/v1/contexts", 200),
            ("HEAD", "/ready", 200),
            ("DELETE", "/v1/sessions/a", 404),
            ("DELETE", "/v1/contexts/a", 404),
        ):
            reply = httpx.request(method, server.url + path, content=b"{}", headers=key)
            assert reply.status_code == status, (method, path, reply.text)
        assert httpx.post(server.url + "/v1/completions", content=b"x" * 10_000_000).status_code == 401


def test_a_body_that_comes_too_slowly(llm):
    with running(llm, body_timeout=0.3) as server:
        with socket.create_connection(server.url.removeprefix("http://").split(":")) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{")
            began = time.monotonic()
            reply = raw.recv(4096)
        assert b" 408 " in reply
        assert time.monotonic() - began < 5
        assert post(server, prompt="w5", max_tokens=2).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long(llm, stream):
    with running(llm, request_timeout=0.4) as server:
        reply = post(server, prompt="w5", max_tokens=1900, ignore_eos=True, temperature=0, stream=stream)
        if stream:
            last = reply.text.strip().split("\n\n")[-1]
            error = json.loads(last.removeprefix("data: "))["error"]
            assert "[DONE]" not in reply.text
        else:
            assert reply.status_code == 504
            error = reply.json()["error"]
        assert error["code"] == "timeout"
        wait_until(lambda: idle(server))


def test_a_full_queue(llm):
    with running(llm, max_queue=2) as server:
        replies = []
        body = {"prompt": "w5", "max_tokens": 600, "ignore_eos": True, "temperature": 0}
        threads = [threading.Thread(target=lambda: replies.append(post(server, **body))) for _ in range(5)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.driver.unfinished == 5)
        refused = post(server, **body)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert httpx.get(server.url + "/health").status_code == 200
        for thread in threads:
            thread.join()
        assert [reply.status_code for reply in replies] == [200] * 5
        assert len({reply.json()["choices"][0]["text"] for reply in replies}) == 1
        assert post(server, **(body | {"max_tokens": 2})).status_code == 200
        # What can never fit is not told to come back.
        never = post(server, **(body | {"n": 6}))
        assert never.status_code == 400
        assert "slots and queue together hold 5" in never.json()["error"]["message"]


def test_when_to_come_back_follows_how_often_a_sequence_ends(llm, monkeypatch):
    now = 0.0
    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: now))
    one = driver.EngineDriver(llm, max_queue=500, listener=Mock(), on_death=Mock())

    def arrive(number, started=None):
        for _ in range(number):
            generation = Generation(next(one._names), Job([5], SamplingParams()), Mock())
            generation.started = started
            one._live[generation.name] = (Mock(), generation)

    def end_of_each_started(seconds):
        nonlocal now
        for name in [name for name, (_, generation) in one._live.items() if generation.started is not None]:
            now += seconds
            one._forget(name)

    arrive(200)
    arrive(200, started=0.0)  # all at once, as those do that share a prompt
    end_of_each_started(0.2)
    assert one._retry_after() == 20
    now += 3600  # with nothing to do, but for one
    arrive(1, started=now)
    end_of_each_started(0.2)
    assert one._retry_after() == 20
    arrive(300)
    assert one._retry_after() == 50
    arrive(300)
    assert one._retry_after() == 60  # a client should not wait for longer


def test_tokenize(server):
    reply = post(server, "/tokenize", prompt="w5 w6 w7", return_token_strs=True).json()
    assert reply == {"tokens": [5, 6, 7], "count": 3, "max_model_len": 2000, "token_strs": ["w5", "w6", "w7"]}
    reply = post(
        server, "/tokenize", messages=[{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]
    )
    assert reply.json()["tokens"] == [5, 6]
    assert post(server, "/detokenize", tokens=[5, 6]).json() == {"prompt": "w5w6"}
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "w5", "messages": [{"role": "user", "content": "w5"}]}),
        ("/detokenize", {"tokens": [96]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["a"]}),
    ):
        assert post(server, path, **body).status_code == 400, body


def test_what_operators_see(server):
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    assert httpx.get(server.url + "/ready").json() == {"status": "ready"}
    post(server, prompt=" ".join(["w5"] * 100), max_tokens=30, ignore_eos=True, temperature=0)
    assert metric(server, "snapstream_prompt_tokens_total") == 100
    assert metric(server, "snapstream_generation_tokens_total") == 30
    assert metric(server, "snapstream_prompts_compressed_total") == 1
    assert metric(server, "snapstream_tokens_kept_total") == 48
    assert metric(server, "snapstream_tokens_dropped_total") == 52
    assert metric(server, "snapstream_time_to_first_token_seconds_count") == 1
    assert metric(server, "snapstream_time_per_output_token_seconds_count") == 1
    assert metric(server, "snapstream_slots_busy") == 0
    assert metric(server, "snapstream_slots") == 3
    plan = server.llm.engine.plan
    assert metric(server, "snapstream_memory_planned_bytes") == plan.total
    state = httpx.get(server.url + "/v1/cache").json()
    assert state["capacity"] == 48
    assert [slot["busy"] for slot in state["slots"]] == [False] * 3
    used = next(slot for slot in state["slots"] if slot["limit"])
    assert used["seen"] == 130
    assert used["held"] == 48
    assert used["bytes_full"] == 130 * plan.bytes_per_token
    assert len(used["kept"]) == 64


def test_cache_while_running(server):
    with httpx.stream(
        "POST",
        server.url + "/v1/completions",
        json={"prompt": "w5", "max_tokens": 1500, "ignore_eos": True, "stream": True},
    ) as reply:
        lines = reply.iter_lines()  # a lost iterator would close the connection
        next(lines)
        state = httpx.get(server.url + "/v1/cache").json()
        assert [slot["busy"] for slot in state["slots"]].count(True) == 1
        assert metric(server, "snapstream_slots_busy") == 1
    wait_until(lambda: idle(server))


def test_health_tells_a_hanging_engine(server, monkeypatch):
    monkeypatch.setattr(server.driver, "step_started", time.monotonic() - 301)
    reply = httpx.get(server.url + "/health")
    assert reply.status_code == 503
    assert "more than 300 s" in reply.json()["status"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"model_name": ""},
        {"api_keys": ("",)},
        {"api_keys": (" a",)},
        {"max_queue": -1},
        {"max_choices": 0},
        {"request_timeout": 0},
        {"session_ttl": float("nan")},
        {"drain_timeout": float("inf")},
    ],
)
def test_wrong_settings(wrong):
    with pytest.raises(ConfigurationError, match="server:"):
        ServerSettings(**({"model_name": "a"} | wrong))


def test_short_texts_do_not_wait_for_long_ones(llm, monkeypatch):
    """Long ones are tokenized one at a time, so that memory and processor are not theirs alone."""
    go, running_now, most = threading.Event(), [], []
    with running(llm) as server:
        encode = server.parts.reader._encode

        def slow(text, *arguments):
            if len(text) <= LONG_TEXT:
                return encode(text, *arguments)
            running_now.append(1)
            most.append(len(running_now))
            go.wait(20)
            running_now.pop()
            return encode(text, *arguments)

        monkeypatch.setattr(server.parts.reader, "_encode", slow)
        long = {"messages": [{"role": "user", "content": "w5 " * 30_000}]}
        replies = []
        paths = [("/v1/completions", {"prompt": "w5 " * 30_000}), ("/v1/chat/completions", long), ("/tokenize", long)]
        threads = [
            threading.Thread(target=lambda path=path, body=body: replies.append(post(server, path, **body).status_code))
            for path, body in paths * 2
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: most)
        assert post(server, prompt="w5", max_tokens=2).status_code == 200
        chat = {"messages": [{"role": "user", "content": "w5"}], "max_tokens": 2}
        assert post(server, "/v1/chat/completions", **chat).status_code == 200
        go.set()
        for thread in threads:
            thread.join()
        assert max(most) == 1
        assert replies == [400] * 6  # they are too long anyway

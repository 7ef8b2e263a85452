"""Conversations over HTTP: what is reused, what is read anew, and why."""

import json
import os
import socket
import threading
import time
from types import SimpleNamespace

import anyio
import httpx
import pytest

from snapstream import ConfigurationError
from snapstream.assets import EXAMPLE
from snapstream.cache import SequenceStore
from snapstream.serving.app import create_app
from snapstream.serving.prompts import Prompt
from snapstream.serving.sessions import Session, SessionBusyError, SessionStore
from snapstream.serving.settings import ServerSettings
from tests.checkpoints import prompt
from tests.serving.servers import idle, metric, post, running, wait_until

LONG = json.loads(EXAMPLE.read_text())["text"][:4000].rsplit(".", 1)[0] + "."
TINY = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "logit_bias": {"0": -100, "1": -100, "2": -100}}
BODY = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "logit_bias": {"0": -100, "1": -100}}


@pytest.fixture
def server(task_llm):
    with running(task_llm, model_name="task-model") as one:
        yield one


def chat(server, messages, **more):
    return post(server, "/v1/chat/completions", messages=messages, **(BODY | more)).json()


def say(text):
    return {"role": "user", "content": text}


def answer(reply):
    return {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}


def test_a_next_turn_reads_only_what_is_new(server):
    first = chat(server, [say(LONG)], session_id="a")
    assert first["session"] == {
        "id": "a",
        "kept": True,
        "reused_tokens": 0,
        "read_tokens": first["usage"]["prompt_tokens"],
        "reason": "there is no such session: it is new, has expired, or was evicted",
    }
    turns = [say(LONG), answer(first), say("The guard visited the flag.")]
    second = chat(server, turns, session_id="a", return_kept_tokens=True)
    known = first["usage"]["prompt_tokens"] + 19  # the last token of the answer had not been read
    assert second["session"]["reused_tokens"] == known
    assert second["session"]["reason"] is None
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == known
    cache = second["choices"][0]["cache"]
    assert cache["prompt_tokens"] == known + second["session"]["read_tokens"]
    positions = cache["kept"]["positions"][0][0]
    assert positions == sorted(set(positions))
    assert positions[-1] == cache["prompt_tokens"] - 1
    assert metric(server, "snapstream_reused_tokens_total") == known
    assert metric(server, "snapstream_sessions") == 1
    assert 0 < metric(server, "snapstream_session_bytes") <= server.llm.engine.plan.sessions


def test_the_shipped_model_answers_over_a_session(task_llm, example):
    with running(task_llm, model_name="task-model") as server:
        body = {"max_tokens": 8, "temperature": 0, "session_id": "x", "logit_bias": {}, "ignore_eos": False}
        turns = [say(example["text"] + " " + example["question"])]
        first = chat(server, turns, **body)
        assert first["choices"][0]["message"]["content"] == " broad vase."
        turns += [answer(first), say(example["question"])]  # what was asked before is in the cache
        second = chat(server, turns, **body)
        assert second["session"]["reused_tokens"] > 2990
        assert second["session"]["read_tokens"] == 5
        assert second["choices"][0]["message"]["content"] == " broad vase."


def test_token_ids(llm):
    with running(llm) as server:
        go_on_from_token_ids(server)


def go_on_from_token_ids(server):
    ids = prompt(120)
    first = post(server, prompt=ids, session_id="ids", **TINY).json()
    made = server.llm.tokenizer.convert_tokens_to_ids(
        ["w" + word for word in first["choices"][0]["text"].split("w")[1:]]
    )
    second = post(server, prompt=ids + made + [7, 8], session_id="ids", **TINY).json()
    assert second["session"]["reused_tokens"] == 139
    assert second["session"]["read_tokens"] == 3  # the last token of the answer had not been read
    other = post(server, prompt=[9, *ids], session_id="ids", **TINY).json()
    assert other["session"]["reused_tokens"] == 0
    assert "does not begin with the earlier turns" in other["session"]["reason"]


def test_what_does_not_fit_is_read_anew(server):
    plain = chat(server, [say(LONG), say("The writer.")])
    first = chat(server, [say(LONG)], session_id="b")
    changed = chat(server, [say(LONG), say("The writer.")], session_id="b")
    assert changed["session"]["reused_tokens"] == 0
    assert "does not begin with the earlier turns" in changed["session"]["reason"]
    assert answer(changed) == answer(plain)

    def known():
        (stored,) = server.parts.sessions.store.all()
        return stored.about["text"]

    for text, reason in ((known, "nothing new"), (lambda: known() + "zz and", "inside a token")):
        same = post(server, prompt=text(), session_id="b", **BODY).json()
        assert same["session"]["reused_tokens"] == 0
        assert same["session"]["read_tokens"] > 700
        assert reason in same["session"]["reason"]
    as_ids = post(server, prompt=[5, 6], session_id="b", **BODY).json()
    assert "token ids" in as_ids["session"]["reason"]
    assert first["session"]["kept"]


def test_an_interrupted_turn_can_be_tried_again(server):
    first = chat(server, [say(LONG)], session_id="c")
    turns = [say(LONG), answer(first), say("The guard visited the flag.")]
    with httpx.stream(
        "POST",
        server.url + "/v1/chat/completions",
        json={"messages": turns, "session_id": "c", "stream": True, **(BODY | {"max_tokens": 1500})},
    ) as reply:
        lines = reply.iter_lines()  # a lost iterator would close the connection
        next(lines)
        busy = post(server, "/v1/chat/completions", messages=turns, session_id="c", **BODY)
        assert busy.status_code == 409
        assert busy.json()["error"]["code"] == "session_busy"
    wait_until(lambda: idle(server))
    again = chat(server, turns, session_id="c")
    assert again["session"]["reused_tokens"] == first["usage"]["prompt_tokens"] + 19
    events = httpx.post(
        server.url + "/v1/chat/completions", json={"messages": turns, "session_id": "c", "stream": True, **BODY}
    ).text
    assert '"session": {"id": "c"' in events


def test_the_least_used_session_goes_first_and_time_ends_them(llm):
    with running(llm, session_ttl=0.5) as server:
        for name in ("a", "b", "c"):
            chat(server, [say(LONG)], session_id=name)
        assert server.parts.sessions.store.loaded == 2
        assert httpx.delete(server.url + "/v1/sessions/a").status_code == 404
        assert httpx.delete(server.url + "/v1/sessions/b").status_code == 200
        wait_until(lambda: server.parts.sessions.store.loaded == 0)


def test_a_session_that_is_deleted_during_its_turn_is_not_kept(server):
    with httpx.stream(
        "POST", server.url + "/v1/completions", json={"prompt": LONG, "session_id": "d", "stream": True, **BODY}
    ) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert httpx.delete(server.url + "/v1/sessions/d").status_code == 200
        list(lines)
    assert server.parts.sessions.store.loaded == 0
    assert httpx.delete(server.url + "/v1/sessions/d").status_code == 404


def test_a_slow_reader_leaves_its_session_when_it_is_decoded(server):
    """Not when the client has fetched the end; until then the cache would be held outside of the bound."""
    body = json.dumps({"prompt": LONG, "session_id": "e", "stream": True, **BODY, "max_tokens": 200, "logprobs": 20})
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    slow.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    wait_until(lambda: server.parts.sessions.store.loaded == 1 and server.driver.unfinished == 0)
    slow.close()


def test_a_session_is_one_prompt_and_one_answer(server, llm):
    for body in ({"n": 2, "prompt": "w5"}, {"prompt": ["w5", "w6"]}):
        for field in ({"session_id": "a"}, {"telemetry": True}, {"return_kept_tokens": True}):
            reply = post(server, **field, **body)
            assert reply.status_code == 400
            assert "needs a single prompt and a single answer" in reply.json()["error"]["message"]
    assert post(server, prompt="w5", session_id="a b").status_code == 400
    assert server.parts.sessions.store.loaded == 0


class Saved(SimpleNamespace):
    """A sequence of 10 bytes."""

    tokens, entries, nbytes = (1, 2), 2, 10


def test_store():
    async def work():
        now = [0.0]
        sessions = SessionStore(SequenceStore(20, seconds=10, clock=lambda: now[0]))
        one, two, three = (("", name) for name in "abc")
        session = Session(Saved(), "text")
        assert await sessions.begin(one) is None
        with pytest.raises(SessionBusyError):
            await sessions.begin(one)
        sessions.end(one, session)
        now[0] = 9
        assert await sessions.begin(one) == session
        sessions.end(one, None)  # failed: what was there stays, and is no younger for it
        now[0] = 11
        assert await sessions.begin(one) is None
        sessions.end(one, session)
        await sessions.begin(two)
        sessions.end(two, session)
        await sessions.begin(one)
        sessions.end(one, session)
        await sessions.begin(three)
        sessions.end(three, session)
        assert (sessions.delete(one), sessions.delete(two), sessions.delete(three)) == (True, False, True)

    anyio.run(work)


def test_a_running_session_counts():
    async def work():
        sessions = SessionStore(SequenceStore(10))
        session = Session(Saved(), "text")
        await sessions.begin(("", "a"))
        assert sessions.end(("", "a"), session)
        assert await sessions.begin(("", "a")) == session
        await sessions.begin(("", "b"))
        assert not sessions.end(("", "b"), session)  # the one there is room for is in use
        assert sessions.store.loaded == 1
        assert sessions.end(("", "a"), None)
        assert sessions.store.loaded == 1

    anyio.run(work)


@pytest.mark.parametrize(
    ("border", "words", "offsets", "rest"),
    [
        ("Paris.", ["Paris", ".", "\u0120So"], [0, 5, 7], [2]),  # the space is the token's, left out of its offsets
        ("Paris.", ["Paris", ".", "\u0120So"], [0, 5, 6], [2]),  # or not
        ("Paris.", ["Paris", ". ", "So"], [0, 5, 7], "inside a token"),  # the space is the token's before
        ("Paris", ["Paris", ".", "\u0120So"], [0, 5, 7], [1, 2]),
        ("Par", ["Paris", ".", "\u0120So"], [0, 5, 7], "inside a token"),
        ("Paris. So", ["Paris", ".", "\u0120So"], [0, 5, 7], "nothing new"),
        ("Rome.", ["Paris", ".", "\u0120So"], [0, 5, 7], "does not begin with"),
    ],
)
def test_where_the_new_text_begins(border, words, offsets, rest):
    prompt = Prompt([0, 1, 2], "Paris. So", offsets, lambda token: words[token])
    got = Session(None, border).rest_of(prompt)
    assert rest in got if isinstance(rest, str) else got == rest


def test_lines_are_not_lost_between_turns():
    """A token of several line ends that began in the earlier text: nothing of it may go missing."""
    words = ["A", ".\u010a\u010a", "Q"]
    prompt = Prompt([0, 1, 2], "A.\n\nQ", [0, 1, 4], lambda token: words[token])
    assert "inside a token" in Session(None, "A.").rest_of(prompt)
    apart = Prompt([0, 1, 2, 3], "A.\n\nQ", [0, 1, 2, 4], lambda token: ["A", ".", "\u010a\u010a", "Q"][token])
    assert Session(None, "A.").rest_of(apart) == [2, 3]


def test_many_sessions_at_once(server):
    answers = {}

    def talk(name, words):
        turns = [say(f"{LONG} {words}")]
        for turn in range(3):
            reply = chat(server, turns, session_id=name)
            turns += [answer(reply), say(f"The porter {words} {turn}.")]
        answers[name] = turns

    names = [f"s{i}" for i in range(6)]  # more than are kept
    threads = [
        threading.Thread(target=talk, args=(name, ["red", "green", "blue", "grey", "pink", "white"][i]))
        for i, name in enumerate(names)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(answers[name]) == 7 for name in names)
    assert server.parts.sessions.store.loaded == 4
    assert not server.parts.sessions._running
    wait_until(lambda: idle(server))


def turn(server, ids, name, **more):
    return post(server, prompt=ids, session_id=name, **(TINY | more)).json()


def tokens_of(server, reply):
    words = ["w" + word for word in reply["choices"][0]["text"].split("w")[1:]]
    return server.llm.tokenizer.convert_tokens_to_ids(words)


def test_sessions_without_room_go_to_the_disk_and_come_back(llm, tmp_path):
    """The same answers as with room for all; conversations are as many as the disk holds."""
    limit = llm.engine.config.sessions
    names = [f"s{index}" for index in range(limit + 3)]
    with running(llm) as server:
        want = {}
        for index, name in enumerate(names):
            first = turn(server, prompt(100, seed=index), name)
            ids = prompt(100, seed=index) + tokens_of(server, first) + [7, 8, 9]
            want[name] = turn(server, ids, name)["choices"][0]["text"]
            assert httpx.delete(f"{server.url}/v1/sessions/{name}").status_code == 200
    with running(llm, session_dir=tmp_path / "sessions") as server:
        asked = {}
        for index, name in enumerate(names):
            first = turn(server, prompt(100, seed=index), name)
            assert first["session"]["kept"]
            asked[name] = prompt(100, seed=index) + tokens_of(server, first) + [7, 8, 9]
        assert server.parts.sessions.store.loaded == limit
        for name in names:
            second = turn(server, asked[name], name)
            assert second["session"]["reused_tokens"] == 119, second["session"]
            assert second["choices"][0]["text"] == want[name]
            assert server.parts.sessions.store.loaded <= limit
        assert metric(server, "snapstream_session_bytes") <= llm.engine.plan.sessions


def test_a_restart_goes_on_with_what_is_on_the_disk(llm, tmp_path):
    ids = prompt(100)
    with running(llm, session_dir=tmp_path, api_keys=("one", "two")) as server:
        headers = {"Authorization": "Bearer one"}
        first = turn(server, ids, "mine", headers=headers)
        more = ids + tokens_of(server, first) + [7, 8, 9]
    files = list(tmp_path.iterdir())
    assert len(files) == 1
    assert b"mine" not in files[0].name.encode() + files[0].read_bytes()
    assert files[0].stat().st_mode & 0o777 == 0o600
    with running(llm, session_dir=tmp_path, api_keys=("one", "two")) as server:
        other = turn(server, more, "mine", headers={"Authorization": "Bearer two"})
        assert other["session"]["reused_tokens"] == 0
        second = turn(server, more, "mine", headers=headers)
        assert second["session"]["reused_tokens"] == 119
        assert httpx.delete(f"{server.url}/v1/sessions/mine", headers=headers).status_code == 200
        assert httpx.delete(f"{server.url}/v1/sessions/mine", headers=headers).status_code == 404
    with running(llm, session_dir=tmp_path, api_keys=("one", "two")) as server:
        assert turn(server, more, "mine", headers=headers)["session"]["reused_tokens"] == 0


def test_damaged_old_and_too_many_files_are_dropped(llm, tmp_path):
    ids = prompt(100)
    with running(llm, session_dir=tmp_path) as server:
        more = {}
        for name in ("a", "b"):
            first = turn(server, ids, name)
            more[name] = ids + tokens_of(server, first) + [7, 8, 9]
    (tmp_path / ".x.session.safetensors.abc").write_bytes(b"half")  # of a process that was killed while it wrote
    files = sorted(tmp_path.glob("*.session.safetensors"))
    assert len(files) == 2
    size = files[0].stat().st_size
    for path in files:
        path.write_bytes(path.read_bytes()[:-3])
    with running(llm, session_dir=tmp_path) as server:
        assert not (tmp_path / ".x.session.safetensors.abc").exists()
        again = turn(server, more["a"], "a")
        assert again["session"]["reused_tokens"] == 0
        assert again["session"]["kept"]
    old = time.time() - 700
    for path in tmp_path.glob("*.session.safetensors"):
        os.utime(path, (old, old))
    with running(llm, session_dir=tmp_path, session_ttl=600):
        assert not list(tmp_path.glob("*.session.safetensors"))
    with running(llm, session_dir=tmp_path, session_disk=3 * size) as server:
        for index in range(llm.engine.config.sessions + 5):
            turn(server, prompt(100, seed=index), f"n{index}")
    kept = list(tmp_path.glob("*.session.safetensors"))
    assert 1 <= len(kept) <= 3
    assert sum(path.stat().st_size for path in kept) <= 3 * size


def test_a_session_directory_that_cannot_work_is_refused(llm, tmp_path):
    (tmp_path / "file").write_text("")
    settings = ServerSettings(model_name="tiny", session_dir=tmp_path / "file" / "x")
    with pytest.raises(ConfigurationError, match="cannot be created"):
        create_app(llm, settings)
    none = SimpleNamespace(
        engine=SimpleNamespace(
            config=SimpleNamespace(slots=1), plan=SimpleNamespace(sessions=0, contexts=0), files=None
        )
    )
    with pytest.raises(ConfigurationError, match="needs sessions"):
        create_app(none, ServerSettings(model_name="tiny", session_dir=tmp_path))

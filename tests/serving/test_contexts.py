"""Contexts over HTTP: read once, asked many times, by whom, within what, and from a disk."""

import json
import threading
from types import SimpleNamespace

import anyio
import httpx
import pytest

from snapstream import CacheFileError, ConfigurationError, SamplingParams
from snapstream.cache import SequenceDirectory, SequenceStore
from snapstream.engine import Context
from snapstream.serving.app import create_app
from snapstream.serving.contexts import ContextStore
from snapstream.serving.errors import ApiError
from snapstream.serving.settings import ServerSettings
from tests.checkpoints import prompt
from tests.engine.test_engine import make
from tests.serving.servers import idle, metric, post, running, wait_until

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
ANSWER = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
WORDS = " ".join(f"w{token}" for token in prompt(100))


def read(server, status=200, **body):
    reply = post(server, "/v1/contexts", **({"text": WORDS, "chat": False} | body))
    assert reply.status_code == status, reply.text
    return reply.json()


def ask(server, context, prompt="w5 w6 w7", status=200, headers=None, **more):
    reply = post(server, prompt=prompt, context_id=context, headers=headers, **(ANSWER | more))
    assert reply.status_code == status, reply.text
    return reply.json()


def listed(server, headers=None):
    return [one["id"] for one in httpx.get(f"{server.url}/v1/contexts", headers=headers).json()["data"]]


def test_a_context_is_read_once_and_asked_many_times(server, checkpoint):
    made = read(server, name="words")
    assert made["id"].startswith("ctx-")
    assert {k: made[k] for k in ("object", "name", "tokens", "entries", "chat", "on_disk")} == {
        "object": "context",
        "name": "words",
        "tokens": 100,
        "entries": 48,
        "chat": False,
        "on_disk": False,
    }
    texts = {ask(server, made["id"])["choices"][0]["text"] for _ in range(3)}
    twin = make(checkpoint, sessions=1)  # the server's own engine answers to the server alone
    assert texts == {twin.generate("w5 w6 w7", PARAMS, context=twin.read(WORDS, chat=False))[0].text}
    reply = ask(server, made["id"], prompt=["w5 w6 w7", "w8"], n=2)
    assert [choice["text"] for choice in reply["choices"][:2]] == [*texts] * 2
    assert reply["usage"]["prompt_tokens"] == 2 * 100 + 3 + 1
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 200
    with httpx.stream(
        "POST",
        server.url + "/v1/completions",
        json={"prompt": "w5 w6 w7", "context_id": made["id"], "stream": True, **ANSWER},
    ) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert {"".join(event["choices"][0]["text"] for event in events)} == texts
    assert ask(server, made["id"], prompt=[5, 6, 7])["choices"][0]["text"] in texts
    assert metric(server, "snapstream_contexts") == 1
    assert metric(server, "snapstream_context_bytes") == made["bytes"] < server.llm.engine.plan.contexts
    state = httpx.get(server.url + "/v1/cache").json()
    assert (state["contexts"], state["context_bytes"], state["context_limit"]) == (1, made["bytes"], 60_000)
    assert httpx.get(f"{server.url}/v1/contexts/{made['id']}").json() == made
    assert httpx.delete(f"{server.url}/v1/contexts/{made['id']}").json() == {"id": made["id"], "deleted": True}
    assert listed(server) == []
    assert "it was deleted or evicted; create it again" in ask(server, made["id"], status=404)["error"]["message"]


def test_a_conversation_about_a_text(task_llm, example):
    with running(task_llm) as server:
        made = post(server, "/v1/contexts", text=example["text"], kv_budget=400).json()
        assert (made["chat"], made["entries"]) == (True, 400)
        body = {"max_tokens": 8, "temperature": 0}
        turns = [{"role": "user", "content": example["question"]}]
        first = post(server, "/v1/chat/completions", context_id=made["id"], messages=turns, **body).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == made["tokens"]
        assert first["choices"][0]["message"]["content"].strip()
        turns += [first["choices"][0]["message"], {"role": "user", "content": "Recall the note for camel:"}]
        second = post(server, "/v1/chat/completions", context_id=made["id"], messages=turns, **body).json()
        assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]
        full = post(server, "/v1/contexts", text=example["text"], kv_budget=400, system="Be brief.").json()
        turns = [{"role": "system", "content": "Be long."}, *turns]
        reply = post(server, "/v1/chat/completions", context_id=full["id"], messages=turns, **body)
        assert reply.status_code == 400
        assert "another system message" in reply.json()["error"]["message"]
        assert ask(server, made["id"], status=400)["error"]["message"].startswith("this context begins a conversation")


def test_keys(llm):
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    with running(llm, api_keys=("one", "two")) as server:
        made = post(server, "/v1/contexts", text=WORDS, chat=False, headers=one).json()
        assert listed(server, one) == [made["id"]]
        assert listed(server, two) == []
        assert httpx.get(f"{server.url}/v1/contexts").status_code == 401
        for method in ("GET", "DELETE"):
            reply = httpx.request(method, f"{server.url}/v1/contexts/{made['id']}", headers=two)
            assert reply.status_code == 404
        ask(server, made["id"], headers=two, status=404)
        ask(server, made["id"], headers=one)


def test_bad_requests(server):
    made = read(server)
    for body, message in (
        ({"text": ""}, "text"),
        ({"text": "  "}, "text is empty"),
        ({"text": WORDS * 30}, "at most 1999 fit"),
        ({"text": [5, 6], "chat": True}, "token ids are used unchanged"),
        ({"text": [5, 10**6]}, "not in the model's vocabulary"),
        ({"text": "w5", "chat": False, "system": "x"}, "needs the model's chat template"),
        ({"text": "w5", "kv_budget": 5}, "kv_budget"),
        ({"text": "w5", "temperature": 1}, "it belongs to /v1/completions"),
    ):
        assert message in read(server, status=400, **body)["error"]["message"]
    assert read(server, status=404, model="other")["error"]["code"] == "model_not_found"
    for more, message in (
        ({"session_id": "a"}, "give only one of them"),
        ({"echo": True, "logprobs": 1}, "leave out context_id"),
        ({"prompt": ""}, "at least one token"),
    ):
        assert message in ask(server, made["id"], status=400, **more)["error"]["message"]
    ask(server, "ctx-0", status=404)
    ask(server, "../x", status=400)
    assert server.parts.contexts.store.get(made["id"]).users == 0


def test_the_one_asked_longest_ago_makes_room(server):
    first, second = read(server)["id"], read(server)["id"]
    ask(server, first)
    third = read(server)["id"]
    assert listed(server) == [first, third]
    assert second not in listed(server)
    assert metric(server, "snapstream_context_bytes") <= server.llm.engine.plan.contexts


def test_without_contexts(task_llm, checkpoint):
    with running(make(checkpoint)) as server:
        assert "--contexts" in read(server, status=400)["error"]["message"]
        assert "--contexts" in ask(server, "ctx-1", status=400)["error"]["message"]
        assert listed(server) == []


def test_a_client_that_goes_while_its_text_is_read(server):
    body = json.dumps({"text": [5] * 1900, "chat": False})
    with pytest.raises(httpx.TimeoutException):
        httpx.post(
            server.url + "/v1/contexts", content=body, headers={"Content-Type": "application/json"}, timeout=0.02
        )
    wait_until(lambda: idle(server))
    assert len(server.parts.contexts.store) <= 1  # it may have been fast enough
    assert post(server, prompt="w5", **ANSWER).status_code == 200


def test_many_ask_at_once_while_others_are_read_and_deleted(server):
    made = read(server)["id"]
    expected, problems, stop = ask(server, made)["choices"], [], threading.Event()

    def asks():
        while not stop.is_set():
            reply = post(server, prompt="w5 w6 w7", context_id=made, **ANSWER)
            if reply.status_code != 200 or reply.json()["choices"] != expected:
                problems.append(reply.text)

    threads = [threading.Thread(target=asks) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(10):  # there is room for two, and one of them is being asked
        other = post(server, "/v1/contexts", text=WORDS, chat=False)
        assert other.status_code in (200, 503)
        if other.status_code == 200:
            httpx.delete(f"{server.url}/v1/contexts/{other.json()['id']}")
    stop.set()
    for thread in threads:
        thread.join()
    assert not problems
    wait_until(lambda: idle(server))
    assert server.parts.contexts.store.get(made).users == 0


def test_files_come_back_when_there_is_room_and_after_a_restart(llm, tmp_path):
    keys = {"api_keys": ("one", "two"), "context_dir": tmp_path / "contexts"}
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    with running(llm, **keys) as server:
        made = []
        for number in range(4):  # twice as many as fit into memory
            body = {"text": prompt(100, seed=number), "name": f"n{number}"}
            made.append(post(server, "/v1/contexts", headers=one, **body).json())
            assert made[-1]["on_disk"]
        ids = [one["id"] for one in made]
        texts = [ask(server, name, headers=one)["choices"][0]["text"] for name in ids]
        assert len(set(texts)) == 4
        assert metric(server, "snapstream_context_bytes") <= llm.engine.plan.contexts
        assert listed(server, one) == ids
    files = list((tmp_path / "contexts").iterdir())
    assert len(files) == 4
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert not any(b"Bearer" in path.read_bytes() or b'"one"' in path.read_bytes() for path in files)
    with running(llm, **keys) as server:
        assert listed(server, two) == []
        assert listed(server, one) == ids
        assert httpx.get(f"{server.url}/v1/contexts/{ids[2]}", headers=one).json() == made[2]
        assert [ask(server, name, headers=one)["choices"][0]["text"] for name in ids] == texts
        assert httpx.delete(f"{server.url}/v1/contexts/{ids[0]}", headers=one).status_code == 200
    assert len(list((tmp_path / "contexts").iterdir())) == 3


def test_damaged_files_files_of_others_and_what_was_being_written(llm, tmp_path, task_llm):
    with running(task_llm, context_dir=tmp_path) as server:
        read(server)
    of_another = next(iter(tmp_path.iterdir()))
    with running(llm, context_dir=tmp_path) as server:
        assert listed(server) == []
        first, second = read(server)["id"], read(server)["id"]
        assert len(listed(server)) == 2
    (tmp_path / f".{first}.context.safetensors.abc").write_bytes(b"half")  # of a process that was killed
    (tmp_path / "ctx-zero.context.safetensors").write_bytes(b"")
    path = tmp_path / f"{first}.context.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with running(llm, context_dir=tmp_path) as server:
        assert not list(tmp_path.glob(".*"))
        assert sorted(listed(server)) == sorted([first, second])  # what it holds is looked at when it is asked
        assert "damaged" in ask(server, first, status=404)["error"]["message"]
        assert listed(server) == [second]
        ask(server, second)
    assert of_another.exists()


def test_a_full_disk_loses_no_context(llm, tmp_path, monkeypatch):
    with running(llm, context_dir=tmp_path) as server:

        def full(*_, **__):
            raise CacheFileError("x could not be written: No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(llm.engine.files, "save", full)
            made = read(server)
        assert not made["on_disk"]
        ask(server, made["id"])
        assert not list(tmp_path.iterdir())


def test_the_disk_is_bounded(llm, tmp_path):
    with running(llm, context_dir=tmp_path) as server:
        read(server)
        size = next(tmp_path.iterdir()).stat().st_size
    with running(llm, context_dir=tmp_path, context_disk=int(2.5 * size)) as server:
        made = [read(server)["id"] for _ in range(4)]
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2.5 * size
        assert listed(server) == made[2:]
        for name in made[2:]:
            ask(server, name)


def test_directories_that_cannot_work_are_refused(llm, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be created"):
        create_app(llm, ServerSettings(model_name="tiny", context_dir=tmp_path / "file" / "x"))
    none = SimpleNamespace(
        engine=SimpleNamespace(
            config=SimpleNamespace(slots=1), plan=SimpleNamespace(sessions=0, contexts=0), files=None
        )
    )
    with pytest.raises(ConfigurationError, match="needs contexts"):
        create_app(none, ServerSettings(model_name="tiny", context_dir=tmp_path))


class FakeSequence(SimpleNamespace):
    tokens, entries = (1, 2), 2


def context(nbytes):
    return Context(FakeSequence(nbytes=nbytes), None)


def test_what_clients_are_told_about_room():
    async def work():
        contexts = ContextStore(SequenceStore(100))
        one = await contexts.add("", "one", context(60))
        taken = await contexts.take("", one.key)
        with pytest.raises(ApiError, match="take all the memory"):
            await contexts.add("", "two", context(60))
        small = await contexts.add("", "small", context(40))
        await contexts.delete("", one.key)  # still being asked
        assert contexts.store.nbytes == 100
        with pytest.raises(ApiError, match="use a smaller kv_budget"):
            await contexts.add("", "large", context(101))
        contexts.store.release(taken)
        assert contexts.store.nbytes == 40
        two = await contexts.add("", "two", context(60))
        assert [one.key for one in contexts.of("")] == [small.key, two.key]

    anyio.run(work)


def test_two_who_want_a_context_from_the_disk_read_it_once(llm, tmp_path, monkeypatch):
    async def work():
        directory = SequenceDirectory(tmp_path, llm.engine.files, kind="context", max_bytes=2**30)
        first = ContextStore(SequenceStore(60_000, directory))
        made = await first.add("", "a", llm.read(prompt(100)))
        second, reads = ContextStore(SequenceStore(60_000, directory)), []
        genuine = directory.read

        def counted(key):
            reads.append(key)
            return genuine(key)

        monkeypatch.setattr(directory, "read", counted)
        taken = []

        async def take():
            taken.append(await second.take("", made.key))

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(take)
        assert reads == [made.key]
        assert taken[0].users == 5

    anyio.run(work)
    llm.engine.reset()


def test_equal_beginnings_are_read_once(checkpoint):
    begins = prompt(150)
    asked = [[*begins, 7 + n] for n in range(3)]
    with running(make(checkpoint, prefix_cache="1MiB")) as server:
        replies = [post(server, prompt=one, **ANSWER).json() for one in asked + asked]
        texts = [reply["choices"][0]["text"] for reply in replies]
        assert texts[:3] == texts[3:]
        known = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
        assert known == [0, 64, 64, 64, 64, 64]
        assert metric(server, "snapstream_prefix_tokens_total") == sum(known)
        text = httpx.get(server.url + "/metrics").text
        assert 'snapstream_prefix_prompts_total{outcome="known"} 5.0' in text
        assert 'snapstream_prefix_prompts_total{outcome="new"} 1.0' in text


def test_tokens_and_their_texts(task_llm):
    with running(task_llm) as server:
        text = "The guard visited the flag. Note for walrus: red lamp."
        made = post(server, "/v1/contexts", text=text, chat=False).json()
        found = httpx.get(f"{server.url}/v1/contexts/{made['id']}/tokens").json()
        assert "".join(found["texts"]) == text
        assert found["tokens"] == task_llm.tokenizer.encode(text)
        assert httpx.get(f"{server.url}/v1/contexts/ctx-0/tokens").status_code == 404


def test_policies_by_name(server):
    made = read(server, kv_budget={"capacity": 32, "policy": "streaming"})
    assert made["entries"] == 32
    body = {"kv_budget": {"capacity": 30, "policy": "streaming"}, "telemetry": True}
    (choice,) = post(server, prompt=prompt(100), **ANSWER, **body).json()["choices"]
    assert choice["cache"]["kept"]["positions"][0][0] == [*range(4), *range(74, 100)]
    for budget, message in (
        ({"capacity": 30, "policy": "none"}, "unknown policy"),
        ({"capacity": 5000}, "a cache has 48 entries here"),
        ({"policy": "streaming"}, "Field required"),
        ({"capacity": 30, "window": 5}, "not a field"),
        ({"capacity": 2, "policy": "streaming"}, "kv_budget"),
    ):
        assert message in read(server, status=400, kv_budget=budget)["error"]["message"], budget
        assert post(server, prompt="w5", kv_budget=budget).status_code == 400


class SlowDirectory:
    """A directory that waits until it is let go, and may fail."""

    max_bytes = 100

    def __init__(self, error=None):
        self.error, self.gate, self.deleted = error, threading.Event(), []

    def scan(self):
        return []

    def find(self, key):
        return None

    def sweep(self, idle, newest=None):
        return []

    def write(self, key, sequence, about, idle):
        assert self.gate.wait(10)
        if self.error:
            raise self.error
        return True

    def delete(self, key):
        self.deleted.append(key)
        return False


def test_what_is_being_written_makes_no_room_for_others():
    async def work():
        directory = SlowDirectory()
        contexts, made = ContextStore(SequenceStore(100, directory)), []

        async def add():
            made.append(await contexts.add("", "one", context(60)))

        async with anyio.create_task_group() as group:
            group.start_soon(add)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(ApiError, match="take all the memory"):
                await contexts.add("", "two", context(60))
            directory.gate.set()
        assert contexts.find("", made[0].key).users == 0
        assert not directory.deleted

    anyio.run(work)


def test_nobody_knows_of_it_so_it_is_not_kept():
    """The client has gone while its context was written, or writing it failed in a way that nobody foresaw."""

    async def work(error):
        directory = SlowDirectory(error)
        contexts = ContextStore(SequenceStore(100, directory))
        async with anyio.create_task_group() as group:
            if error is None:
                group.start_soon(contexts.add, "", "one", context(60))
                await anyio.wait_all_tasks_blocked()
                group.cancel_scope.cancel()
            directory.gate.set()
            if error is not None:
                with pytest.raises(RuntimeError, match="surprise"):
                    await contexts.add("", "one", context(60))
        assert not len(contexts.store)
        assert contexts.store.nbytes == 0
        assert len(directory.deleted) == 1

    anyio.run(work, None)
    anyio.run(work, RuntimeError("surprise"))


def test_a_context_larger_than_the_disk_stays_in_memory(llm, tmp_path):
    with running(llm, context_dir=tmp_path, context_disk=30_000) as server:
        small = read(server, kv_budget=16)
        assert small["on_disk"]
    with running(llm, context_dir=tmp_path, context_disk=20_000) as server:
        large = read(server)
        assert not large["on_disk"]
        assert listed(server) == [small["id"], large["id"]]
        ask(server, small["id"])


def test_the_file_asked_longest_ago_goes_first_also_after_a_restart(llm, tmp_path):
    with running(llm, context_dir=tmp_path) as server:
        size = read(server)["bytes"]
        httpx.delete(f"{server.url}/v1/contexts/{listed(server)[0]}")
        first, second = read(server)["id"], read(server)["id"]
        ask(server, first)
    with running(llm, context_dir=tmp_path, context_disk=3 * size) as server:
        third = read(server)["id"]
        assert listed(server) == [first, third]
        assert second not in listed(server)


def test_a_disk_that_cannot_be_read_now_loses_nothing(llm, tmp_path, monkeypatch):
    with running(llm, context_dir=tmp_path) as server:
        made = read(server)["id"]
    with running(llm, context_dir=tmp_path) as server:

        def failing(path):
            raise CacheFileError("too many open files") from OSError("too many open files")

        with monkeypatch.context() as patched:
            patched.setattr(llm.engine.files, "load", failing)
            assert "cannot be read now" in ask(server, made, status=503)["error"]["message"]
        ask(server, made)


def test_a_text_that_is_too_large_is_refused_before_it_is_read(checkpoint):
    with running(make(checkpoint, context_bytes=10_000)) as server:
        assert "smaller kv_budget" in read(server, status=400)["error"]["message"]
        assert metric(server, "snapstream_prompt_tokens_total") == 0
        made = read(server, kv_budget=16)
        assert made["bytes"] == server.llm.engine.kept_bytes(100, 16)

"""The router before instances that are imitated: what it sends to whom, and what comes back as one answer."""

import asyncio
import contextlib
import json

import httpx
import pytest

pytest.importorskip("fastapi")
from snapstream.errors import ConfigurationError
from snapstream.routing.settings import RouterSettings, parse_urls
from tests.routing.fake import Instance, Network, client_of

BODY = {"model": "letters", "prompt": "abc", "max_tokens": 5, "temperature": 0}
CHAT = {"model": "letters", "messages": [{"role": "user", "content": "abc"}], "temperature": 0}


@contextlib.asynccontextmanager
async def router(prefill="p", decode="d", attempts=3, keep_alive_seconds=5.0, **instances):
    """A client of a router before these instances."""
    settings = RouterSettings(
        prefill=tuple(f"http://{name}" for name in prefill),
        decode=tuple(f"http://{name}" for name in decode),
        attempts=attempts,
        check_seconds=0.02,
        keep_alive_seconds=keep_alive_seconds,
    )
    async with client_of(settings, Network(**instances)) as client:
        yield client


def both():
    return {"p": Instance(reads=True), "d": Instance(decodes=True)}


def run(work):
    return asyncio.run(work)


async def post(client, body, kind="completions", status=200, **options):
    answer = await client.post(f"/v1/{kind}", json=body, **options)
    assert answer.status_code == status, answer.text
    return answer


def text_of(answer):
    """The text of a stream or of an answer, the reason for its end, and its usage."""
    if "event-stream" not in answer.headers["content-type"]:
        whole = answer.json()
        choice = whole["choices"][0]
        return (
            choice["text"] if "text" in choice else choice["message"]["content"],
            choice["finish_reason"],
            whole["usage"],
        )
    text, finish, usage, events = "", None, None, answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for each in events[:-2]:
        said = json.loads(each.removeprefix("data: "))
        for choice in said["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"]["content"]
            finish = choice["finish_reason"] or finish
        usage = said.get("usage") or usage
    return text, finish, usage


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
@pytest.mark.parametrize("wanted", [1, 2, 7])
def test_two_requests_are_one_answer(streams, kind, wanted):
    async def work():
        instances = both()
        async with router(**instances) as client:
            body = (BODY if kind == "completions" else CHAT) | {"max_tokens": wanted, "stream": streams}
            if streams:
                body["stream_options"] = {"include_usage": True}
            answer = await post(client, body, kind, headers={"Authorization": "Bearer me"})
        text, finish, usage = text_of(answer)
        assert (text, finish) == ("defghijklm"[:wanted], "length")
        assert usage == {"prompt_tokens": 3, "completion_tokens": wanted, "total_tokens": 3 + wanted}
        (path, first, headers), second = instances["p"].asked[0], instances["d"].asked
        assert (path, first["max_tokens"], first.get("stream")) == (f"/v1/{kind}", 1, None)
        assert headers["authorization"] == "Bearer me"
        if wanted == 1:
            assert not second
        else:
            ((path, body, headers),) = second
            assert (path, body["prompt"], body["max_tokens"]) == ("/v1/completions", [0, 1, 2, 3], wanted - 1)
            assert headers["authorization"] == "Bearer me"

    run(work())


def test_a_chat_may_be_as_long_as_the_model_allows():
    async def work():
        async with router(**both()) as client:
            text, _, usage = text_of(await post(client, CHAT | {"max_completion_tokens": None}, "chat/completions"))
            assert (len(text), usage["total_tokens"]) == (37, 40)
            assert len(text_of(await post(client, {k: v for k, v in BODY.items() if k != "max_tokens"}))[0]) == 16

    run(work())


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("stop", ["d", "de", "def", "efg", "g", "xyz", "defghijk"])
def test_stops_are_found_across_the_seam(streams, keeps, stop):
    """As if one instance had made everything."""

    async def work():
        async with router(**both()) as client:
            body = BODY | {"stop": [stop], "max_tokens": 8, "stream": streams}
            if keeps and stop in ("de", "def"):  # the imitation keeps none
                body["include_stop_str_in_output"] = True
            text, finish, _ = text_of(await post(client, body))
        whole = "defghijk"
        want = whole.split(stop, maxsplit=1)[0] + (stop if body.get("include_stop_str_in_output") else "")
        assert text == want
        assert finish == ("stop" if stop in whole else "length")

    run(work())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n": 2}, "several choices"),
        ({"prompt": ["abc"]}, "several prompts"),
        ({"prompt": [[1, 2]]}, "several prompts"),
        ({"echo": True}, "echo"),
        ({"presence_penalty": 0.5}, "penalties"),
        ({"seed": 3, "temperature": 1.0}, "a seed"),
        ({"logprobs": 2}, "field logprobs"),
        ({"response_format": {"type": "json_object"}}, "field response_format"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream options"),
    ],
)
def test_what_two_could_not_answer_as_one_goes_whole(change, reason):
    async def work():
        instances = both()
        instances["d"].tokens = lambda body: [0, 1, 2]
        async with router(**instances) as client:
            await post(client, BODY | change)
            page = (await client.get("/metrics")).text
        assert not instances["p"].asked
        assert instances["d"].asked[0][1] == BODY | change
        assert f'snapstream_router_whole_total{{reason="{reason}"}} 1.0' in page

    run(work())


def test_pictures_and_tools_go_whole():
    async def work():
        instances = both()
        instances["d"].tokens = lambda body: [0, 1, 2]
        picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        called = [{"role": "assistant", "content": "", "tool_calls": []}]
        async with router(**instances) as client:
            for body in (CHAT | {"messages": picture}, CHAT | {"messages": called}, CHAT | {"tools": []}):
                await post(client, body | {"max_tokens": 3}, "chat/completions")
        assert not instances["p"].asked
        assert len(instances["d"].asked) == 3

    run(work())


def test_a_part_of_a_character_goes_whole():
    """The text of the first token could not be put before the rest's."""

    class Broken(Instance):
        async def answer(self, request):
            response = await super().answer(request)
            return httpx.Response(200, json=json.loads(response.content.decode().replace('"d"', '"\ufffd"')))

    async def work():
        instances = {"p": Broken(reads=True), "d": Instance(decodes=True)}
        async with router(**instances) as client:
            assert text_of(await post(client, BODY))[0] == "defgh"
        assert instances["d"].asked[0][1] == BODY

    run(work())


@pytest.mark.parametrize("streams", [False, True])
def test_another_instance_is_tried_before_the_first_byte(streams):
    async def work():
        instances = {name: Instance(reads=name in "pq", decodes=name in "de") for name in "pqde"}
        instances["p"].fails = instances["d"].fails = 100
        async with router("pq", "de", **instances) as client:
            for _ in range(6):
                assert text_of(await post(client, BODY | {"stream": streams}))[0] == "defgh"
            instances["d"].fails, instances["e"].loses_caches = 0, True  # it fails after the head of its answer
            for _ in range(6):
                assert text_of(await post(client, BODY | {"stream": streams}))[0] == "defgh"
            page = (await client.get("/metrics")).text
        assert instances["q"].asked
        assert 'snapstream_router_retries_total{does="decode"}' in page
        assert 'snapstream_router_requests_total{outcome="answered",way="split"} 12.0' in page

    run(work())


def test_nobody_left():
    async def work():
        instances = both()
        async with router(**instances) as client:
            instances["d"].fails = 100
            answer = await post(client, BODY, status=503)
            assert "no instance could serve this: http://d failed: 500" in answer.json()["error"]["message"]
            instances["d"].fails, instances["p"].fails = 0, 100  # then decode instances read
            assert text_of(await post(client, BODY))[0] == "defgh"
            instances["p"].fails, instances["p"].is_well = 0, False
            await client.proxy.check()
            assert (await client.get("/health")).json() == {"prefill": 0, "decode": 1}
            assert text_of(await post(client, BODY))[0] == "defgh"
            assert len(instances["p"].asked) == 2
            del client.proxy.client._transport.instances["d"]
            answer = await client.post("/v1/completions", json=BODY)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
            assert (await client.get("/health")).status_code == 503
            assert (await client.get("/v1/models")).status_code == 503

    run(work())


def test_a_refused_cache_is_read_there():
    """An instance with other settings than the one that read the prompt: slower, but right."""

    async def work():
        instances = both()
        instances["d"].refuses_caches = True
        async with router(**instances) as client:
            assert text_of(await post(client, BODY))[0] == "defgh"
        assert [body.get("kv_transfer_params") is None for _, body, _ in instances["d"].asked] == [False, True]

    run(work())


def test_an_answer_that_breaks_off_says_so():
    async def work():
        instances = both()
        instances["d"].breaks_at = 2
        async with router(**instances) as client:
            answer = await post(client, BODY | {"stream": True})
        events = [json.loads(one.removeprefix("data: ")) for one in answer.text.split("\n\n") if one]
        assert [one["choices"][0]["text"] for one in events[:-1]] == ["de", "f"]
        assert "failed mid-answer" in events[-1]["error"]["message"]
        assert instances["d"].closed == 1

    run(work())


def test_bad_requests_are_the_clients():
    async def work():
        async with router(**both()) as client:
            answer = await post(client, BODY | {"model": "another"}, status=404)
            assert answer.json()["error"]["message"] == "no such model"
            for content in (b"{", b"[]", b"5"):
                assert (await client.post("/v1/completions", content=content)).status_code == 400

    run(work())


def test_who_has_least_to_do_is_next():
    async def work():
        here, all_here = [], asyncio.Event()

        class Slow(Instance):
            """Answers none before all ten have come."""

            async def answer(self, request):
                if request.method == "POST":
                    here.append(request)
                    if len(here) == 10:
                        all_here.set()
                    await all_here.wait()
                return await super().answer(request)

        instances = {"p": Instance(reads=True), "d": Slow(decodes=True), "e": Slow(decodes=True)}
        async with router("p", "de", **instances) as client:
            await asyncio.gather(*(post(client, BODY) for _ in range(10)))
            assert not any(one.busy for pool in client.proxy.metrics.pools.values() for one in pool.instances)
        counts = [len(instances[name].asked) for name in "de"]
        assert counts == [5, 5]

    run(work())


def test_a_client_that_leaves_is_left_by_the_instances():
    async def work():
        instances = both()
        instances["d"].delay = 0.05
        async with router(**instances) as client:
            app, said, asked = client._transport.app, [], []

            async def receive():
                if not asked:
                    asked.append(True)
                    return {"type": "http.request", "body": json.dumps(BODY | {"stream": True}).encode()}
                while not said:
                    await asyncio.sleep(0.01)
                return {"type": "http.disconnect"}

            async def send(message):
                said.append(message)

            scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
            await asyncio.wait_for(app(scope | {"asgi": {"version": "3.0"}, "http_version": "1.1"}, receive, send), 5)
            await asyncio.sleep(0.1)
            assert instances["d"].closed == 1
            assert not any(one.busy for one in client.proxy.decode.instances)

    run(work())


def test_settings():
    assert parse_urls(["http://a:1/, http://b:2", "https://c"]) == ("http://a:1", "http://b:2", "https://c")
    bad = ((["a:1"], "is not a URL"), (["http://"], "is not a URL"), (["http://a", "http://a/"], "twice"))
    for texts, message in bad:
        with pytest.raises(ConfigurationError, match=message):
            parse_urls(texts)
    with pytest.raises(ConfigurationError, match="decode is empty"):
        RouterSettings(("http://a",), ())


@pytest.mark.parametrize("who", ["p", "d"])
def test_a_stream_is_not_silent_while_a_prompt_is_read(who):
    """Comments come before the first event, and between events, but never inside of one."""

    async def work():
        instances = both()
        instances[who].delay = 0.3
        async with router(keep_alive_seconds=0.05, **instances) as client:
            streamed = await post(client, BODY | {"stream": True})
            whole = await post(client, BODY)
        lines = streamed.text.split("\n\n")
        assert lines.count(": waiting") > 2
        assert ": waiting" not in whole.text
        events = "\n\n".join(line for line in lines if line != ": waiting")
        assert "".join(json.loads(one[6:])["choices"][0]["text"] for one in events.split("\n\n")[:-2]) == "defgh"

    run(work())


def test_an_error_after_a_stream_has_begun_is_an_event():
    async def work():
        instances = both()
        instances["p"].delay = 0.2
        async with router(keep_alive_seconds=0.05, **instances) as client:
            late = await post(client, BODY | {"stream": True, "model": "other"})
            assert late.text.startswith(": waiting\n\n")
            assert "no such model" in late.text.strip().split("\n\n")[-1]
            instances["p"].delay = 0
            await post(client, BODY | {"stream": True, "model": "other"}, status=404)

    run(work())


def test_health_can_be_asked_by_head():
    async def work():
        async with router(**both()) as client:
            answer = await client.head("/health")
            assert (answer.status_code, answer.content) == (200, b"")

    run(work())


def test_keep_alive_seconds_are_checked():
    with pytest.raises(ConfigurationError, match="keep_alive_seconds is -1; it must be 0 or more"):
        RouterSettings((), ("http://d",), keep_alive_seconds=-1)

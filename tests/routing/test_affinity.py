"""Where requests go whose beginnings have been read."""

import asyncio
import contextlib
import json

import httpx
import pytest

pytest.importorskip("fastapi")
from snapstream.errors import ConfigurationError
from snapstream.routing.affinity import PIECE, Affinity, Marks
from snapstream.routing.instances import Instance, Pool
from snapstream.routing.settings import RouterSettings
from tests.routing.fake import Instance as FakeInstance
from tests.routing.fake import Network, client_of

LONG = "a" * (3 * PIECE)


def chat(*texts, **more):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)], **more}


def pool_of(count):
    pool = Pool([f"http://{number}" for number in range(count)])
    for one in pool.instances:
        one.is_well = True
    return pool


def test_a_conversation_begins_as_its_earlier_turns():
    first = Marks.of(chat(LONG), {}).beginnings
    second = Marks.of(chat(LONG, "answer", "another question"), {}).beginnings
    assert list(second[: len(first)]) == list(first)
    assert len(first) >= 3
    for other in (
        chat("b" + LONG),
        chat(LONG, tools=[{"type": "function"}]),
        chat(LONG, system="You are"),
        chat(LONG, model="other"),
    ):
        assert set(Marks.of(other, {}).beginnings).isdisjoint(first)
    for headers in ({"authorization": "Bearer me"}, {"x-api-key": "me"}):  # each key has its own caches
        assert set(Marks.of(chat(LONG), headers).beginnings).isdisjoint(first)


def test_what_does_not_change_a_prompt_does_not_matter():
    want = Marks.of(chat(LONG), {}).beginnings
    assert want == Marks.of(chat(LONG, stream=True, temperature=0.2, max_tokens=5, user="x"), {}).beginnings


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": LONG},
        {"prompt": list(range(2000))},
        {"prompt": [LONG, LONG]},
        {"input": [{"role": "user", "content": LONG}], "instructions": "Be brief."},
        {"text": LONG},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
        {"prompt": "\ud800" * 2000},
    ],
)
def test_all_kinds_of_prompts_have_beginnings(body):
    assert len(Marks.of(body, {}).beginnings) > 0
    assert Marks.of(body, {}) == Marks.of(json.loads(json.dumps(body)), {})


@pytest.mark.parametrize("body", [{}, {"prompt": "short"}, {"messages": 5}, {"session_id": 7, "context_id": None}])
def test_short_and_strange_requests_have_none(body):
    assert not Marks.of(body, {}).beginnings


def test_shares_of_what_has_been_read():
    affinity, pool = Affinity(4.0), pool_of(3)
    one, two, _ = pool.instances
    marks = Marks.of(chat(LONG), {})
    assert affinity.held(marks) == {}
    affinity.remember(marks, one)
    assert affinity.held(marks) == {one: 1.0}
    longer = Marks.of(chat(LONG, LONG), {})
    share = len(marks.beginnings) / len(longer.beginnings)
    assert affinity.held(longer) == {one: pytest.approx(share)}
    affinity.remember(longer, two)
    assert affinity.held(longer) == {one: pytest.approx(share), two: 1.0}
    assert affinity.advantages(longer, pool.instances) == {one: pytest.approx(4 * share), two: 4.0}


@pytest.mark.parametrize("busy", [0, 3, 4, 5, 9])
def test_a_busy_instance_is_left(busy):
    affinity, pool = Affinity(4.5), pool_of(2)
    holder, other = pool.instances
    marks = Marks.of(chat(LONG), {})
    affinity.remember(marks, holder)
    holder.busy = busy
    assert pool.choose((), affinity.advantages(marks, pool.instances)) is (holder if busy < 4.5 else other)
    none = Affinity(0.0)
    none.remember(marks, holder)
    if busy:
        assert pool.choose((), none.advantages(marks, pool.instances)) is other


def test_an_instance_that_was_down_has_lost_everything():
    affinity, pool = Affinity(4.0), pool_of(2)
    one = pool.instances[0]
    marks = Marks.of(chat(LONG, context_id="c"), {})
    affinity.remember(marks, one)
    assert affinity.advantages(marks, pool.instances) == {one: float("inf")}
    one.life += 1
    assert affinity.held(marks) == affinity.advantages(marks, pool.instances) == {}
    affinity.remember(marks, one)
    assert affinity.held(marks) == {one: 1.0}


def test_of_a_prompt_the_end_is_forgotten_first():
    affinity, pool = Affinity(4.0, most=5), pool_of(1)
    first, second = (Marks.of({"prompt": letter * (4 * PIECE)}, {}) for letter in "ab")
    affinity.remember(first, pool.instances[0])
    affinity.remember(Marks(second.beginnings[:2]), pool.instances[0])
    assert affinity.held(first) == {pool.instances[0]: 3 / len(first.beginnings)}


def test_what_was_used_least_recently_is_forgotten():
    affinity, pool = Affinity(4.0, most=6), pool_of(1)
    every = [Marks.of({"prompt": str(number) + "x" * (2 * PIECE)}, {}) for number in range(4)]
    for marks in every[:3]:
        affinity.remember(marks, pool.instances[0])
    affinity.remember(every[0], pool.instances[0])
    affinity.remember(every[3], pool.instances[0])
    assert [bool(affinity.held(marks)) for marks in every] == [True, False, True, True]


def test_a_session_has_one_place_whoever_routes_it():
    places, pool = [], pool_of(4)
    for number in range(200):
        marks = Marks.of({"session_id": f"s{number}", "prompt": "short"}, {})
        ((place, advantage),) = Affinity(1.0).advantages(marks, pool.instances).items()
        assert Affinity(9.0).advantages(marks, pool.instances) == {place: advantage}
        places.append(place)
    assert all(places.count(one) > 25 for one in pool.instances)
    pool.instances[2].is_well = False  # only its own sessions move
    for number, before in enumerate(places):
        marks = Marks.of({"session_id": f"s{number}", "prompt": "short"}, {})
        (place,) = Affinity(1.0).advantages(marks, pool.instances)
        assert (place is before) == (before is not pool.instances[2])


# -- the router -------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def router(names, affinity=4.0, **instances):
    settings = RouterSettings((), tuple(f"http://{name}" for name in names), check_seconds=0.02, affinity=affinity)
    async with client_of(settings, Network(**instances)) as client:
        yield client


def replicas(names, kind=FakeInstance):
    return {name: kind(reads=True, decodes=True) for name in names}


def body_of(number, turns=1):
    text = chr(ord("a") + number) * (2 * PIECE)
    return {**chat(*[text] * (2 * turns - 1)), "model": "letters", "max_tokens": 2}


def test_conversations_stay_where_they_are():
    async def work():
        instances = replicas("abc")
        async with router("abc", **instances) as client:
            for turns in (1, 2, 3):
                for number in range(12):
                    answer = await client.post("/v1/chat/completions", json=body_of(number, turns))
                    assert answer.status_code == 200
            page = (await client.get("/metrics")).text
        places = [
            {name for name, one in instances.items() for _, body, _ in one.asked if body["messages"][0] == first}
            for first in (body_of(number)["messages"][0] for number in range(12))
        ]
        assert all(len(place) == 1 for place in places)
        assert len(set.union(*places)) > 1
        assert 'snapstream_router_prompts_total{beginning="new"} 12.0' in page
        assert 'snapstream_router_prompts_total{beginning="followed"} 24.0' in page

    asyncio.run(work())


def test_many_at_once_are_shared_out():
    """All have the same beginning, and none has been answered when the next one comes."""

    async def work():
        instances = replicas("ab")
        for one in instances.values():
            one.delay = 0.1
        async with router("ab", affinity=2.0, **instances) as client:
            sent = [client.post("/v1/chat/completions", json=body_of(1)) for _ in range(12)]
            assert all(answer.status_code == 200 for answer in await asyncio.gather(*sent))
            page = (await client.get("/metrics")).text
        counts = sorted(len(one.asked) for one in instances.values())
        assert counts[0] >= 4  # at most two apart, until both have read it
        assert 'beginning="left"' in page

    asyncio.run(work())


class Owner(FakeInstance):
    """Has contexts and responses of its own; no other instance knows them."""

    def __init__(self, **options):
        super().__init__(**options)
        self.contexts, self.looked_for = [], 0

    async def answer(self, request):
        path = request.url.path
        missing = httpx.Response(404, json={"error": {"message": "there is no such context"}})
        if path == "/v1/contexts" and request.method == "POST":
            self.contexts.append(f"ctx-{id(self)}-{len(self.contexts)}")
            return httpx.Response(200, json={"id": self.contexts[-1]})
        if path == "/v1/contexts":
            return httpx.Response(200, json={"object": "list", "data": [{"id": one} for one in self.contexts]})
        if path.startswith("/v1/sessions/"):
            return missing
        if path.startswith("/v1/contexts/"):
            name = path.split("/")[3]
            if name not in self.contexts:
                return missing
            if request.method == "DELETE":
                self.contexts.remove(name)
            return httpx.Response(200, json={"id": name, "at": id(self)})
        if request.method == "POST" and (name := json.loads(request.content).get("context_id")):
            self.looked_for += 1
            if name not in self.contexts:
                return missing
        return await super().answer(request)


def test_contexts_are_found():
    async def work():
        instances = replicas("abcd", Owner)
        async with router("abcd", **instances) as client:
            made = [(await client.post("/v1/contexts", json={"text": LONG + str(n)})).json()["id"] for n in range(8)]
            listed = (await client.get("/v1/contexts")).json()
            assert sorted(each["id"] for each in listed["data"]) == sorted(made)
            assert listed["object"] == "list"
            for name in made:
                assert (await client.get(f"/v1/contexts/{name}")).json()["id"] == name
                assert (await client.get(f"/v1/contexts/{name}/tokens")).status_code == 200
                for _ in range(3):
                    asked = {"model": "letters", "prompt": "abc", "max_tokens": 2, "context_id": name}
                    assert (await client.post("/v1/completions", json=asked)).status_code == 200
            # It is looked for once, and known then.
            assert sum(one.looked_for for one in instances.values()) == 8 * 3  # its place is known from the beginning
            unknown = {"model": "letters", "prompt": "abc", "max_tokens": 2, "context_id": "none"}
            answer = await client.post("/v1/completions", json=unknown)
            assert (answer.status_code, answer.json()["error"]["message"]) == (404, "there is no such context")
            assert (await client.delete(f"/v1/contexts/{made[0]}")).status_code == 200
            assert (await client.get(f"/v1/contexts/{made[0]}")).status_code == 404
            assert (await client.delete("/v1/sessions/none")).status_code == 404
            instances["b"].is_well = instances["a"].is_well = instances["c"].is_well = instances["d"].is_well = False
            await client.proxy.check()
            for path in ("/v1/contexts", f"/v1/contexts/{made[1]}"):
                assert (await client.get(path)).status_code == 503

    asyncio.run(work())


@pytest.mark.parametrize("trouble", ["busy", "down", "gone"])
def test_a_context_whose_owner_cannot_answer_is_not_missing(trouble):
    """Nobody is told to create it again."""

    async def work():
        instances = replicas("abc", Owner)
        async with router("abc", **instances) as client:
            name = (await client.post("/v1/contexts", json={"text": LONG})).json()["id"]
            (owner,) = (one for one in instances.values() if one.contexts)
            asked = {"model": "letters", "prompt": "abc", "max_tokens": 2, "context_id": name}
            if trouble == "busy":
                owner.fails = 100
            elif trouble == "down":
                owner.is_well = False
                await client.proxy.check()
            else:
                where = next(each for each, one in instances.items() if one is owner)
                del client.proxy.client._transport.instances[where]
            answer = await client.post("/v1/completions", json=asked)
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            if trouble != "busy":  # the imitation answers this whatever else it does
                assert (await client.get(f"/v1/contexts/{name}")).status_code == 503
                assert (await client.delete(f"/v1/contexts/{name}")).status_code == 503

    asyncio.run(work())


def test_a_session_is_deleted_everywhere():
    class Holder(FakeInstance):
        has = True

        async def answer(self, request):
            if request.method != "DELETE":
                return await super().answer(request)
            had, self.has = self.has, False
            return httpx.Response(200 if had else 404, json={})

    async def work():
        instances = replicas("abc", Holder)
        instances["b"].has = False
        async with router("abc", **instances) as client:
            assert (await client.delete("/v1/sessions/one")).status_code == 200
            assert not any(one.has for one in instances.values())
            assert (await client.delete("/v1/sessions/one")).status_code == 404

    asyncio.run(work())


def test_what_any_instance_answers_is_asked_of_another():
    async def work():
        instances = replicas("abc")
        async with router("abc", **instances) as client:
            del client.proxy.client._transport.instances["a"]
            for _ in range(6):
                assert (await client.get("/v1/models")).status_code == 200

    asyncio.run(work())


def test_an_instance_that_failed_has_read_nothing():
    async def work():
        instances = replicas("ab")
        instances["a"].fails = instances["b"].fails = 1
        async with router("ab", **instances) as client:
            body = body_of(3)
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 503
            marks = Marks.of(body, {})
            assert client.proxy.affinity.held(marks) == {}
            instances["a"].fails = 1
            for _ in range(4):
                assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            assert len(client.proxy.affinity.held(marks)) == 1

    asyncio.run(work())


def test_benchmarks_of_vllm_work_through_the_router():
    """An instance and the router send empty lines to them, which don't end an event."""

    async def work():
        instances = replicas("a")
        instances["a"].delay = 0.2
        settings = RouterSettings((), ("http://a",), check_seconds=60, keep_alive_seconds=0.05)
        agent = {"User-Agent": "Python/3.12 aiohttp/3.13"}
        async with client_of(settings, Network(**instances), headers=agent) as client:
            body = {"model": "letters", "prompt": "abc", "max_tokens": 3, "stream": True}
            answer = await client.post("/v1/completions", json=body)
        assert ":" not in {line[:1] for line in answer.text.splitlines()}
        assert "\n\n\n" in answer.text
        assert instances["a"].asked[0][2]["user-agent"] == agent["User-Agent"]

    asyncio.run(work())


@pytest.mark.parametrize(
    ("kind", "event"),
    [("messages", '"type": "error", "error": {"type": "api_error"'), ("responses", '"type": "error", "code"')],
)
def test_errors_in_streams_have_the_form_of_their_api(kind, event):
    async def work():
        instances = replicas("a")
        instances["a"].breaks_at = 1
        async with router("a", **instances) as client:
            body = {"model": "letters", "prompt": "abc", "max_tokens": 4, "stream": True}
            answer = await client.post(f"/v1/{kind}", json=body)
        *_, last = [each for each in answer.text.split("\n\n") if each]
        assert last.startswith("event: error\ndata: ")
        assert event in last
        assert "failed mid-answer" in last

    asyncio.run(work())


def test_paths_are_forwarded_as_they_are():
    """With what an instance's URL has before them, and with escapes and a query."""
    asked = []

    class Here(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request):
            asked.append(request.url.raw_path)
            return httpx.Response(200, json={"data": []}, request=request)

    async def work():
        settings = RouterSettings((), ("http://a/base",), check_seconds=60)
        async with client_of(settings, Here()) as client:
            await client.get("/v1/contexts/a%2Fb/tokens?x=1")
            await client.delete("/v1/sessions/name%20x")

    asyncio.run(work())
    assert asked[-2:] == [b"/base/v1/contexts/a%2Fb/tokens?x=1", b"/base/v1/sessions/name%20x"]


@pytest.mark.parametrize("affinity", [-1, float("inf"), float("nan")])
def test_affinity_is_checked(affinity):
    with pytest.raises(ConfigurationError, match=r"affinity is .*; it must be 0 or more"):
        RouterSettings((), ("http://d",), affinity=affinity)


def test_instances_know_how_often_they_came_up():
    async def work():
        instances = replicas("a")
        async with router("a", **instances) as client:
            (one,) = client.proxy.decode.instances
            assert isinstance(one, Instance)
            assert one.life == 1
            for is_well in (False, True, True):
                instances["a"].is_well = is_well
                await client.proxy.check()
            assert one.life == 2

    asyncio.run(work())

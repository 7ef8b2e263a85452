"""Two servers and the router: one reads prompts, the other decodes, and nobody sees a difference."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from snapstream.assets import TASK_MODEL
from tests.integrations.vllm.servers import running, start, wait_for
from tests.serving.servers import wait_until
from tests.texts import Notes

pytest.importorskip("vllm")
openai = pytest.importorskip("openai")

MODEL = str(TASK_MODEL)
BUDGET = '{"snapstream": 1000}'
SECRET = {"SNAPSTREAM_TRANSFER_KEY": "known to both of them"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def transfer(role, **settings):
    config = {"kv_connector": "SnapStreamConnector", "kv_role": role, "kv_connector_extra_config": settings}
    return ["--additional-config", BUDGET, "--kv-transfer-config", json.dumps(config)]


@contextlib.contextmanager
def router(directory, *options):
    log = (directory / "router.log").open("w")
    port = free_port()
    command = [sys.executable, "-m", "snapstream", "route", "--port", str(port), "--check-seconds", "0.5", *options]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(process, f"{address}/health", directory / "router.log")
        yield address
    finally:
        process.terminate()
        process.wait(30)
        log.close()


@pytest.fixture(scope="module", params=["tcp", pytest.param("directory", marks=pytest.mark.slow)])
def instances(request, tmp_path_factory):
    """Processes and addresses of a prefill and a decode instance."""
    directory = tmp_path_factory.mktemp("instances")
    if request.param == "directory":
        reads = decodes = {"directory": str(directory / "payloads")}
    else:
        place = f"127.0.0.1:{free_port()}"
        reads, decodes = {"address": place}, {"peers": [place]}
    made = []
    try:
        for role, settings in (("kv_producer", reads), ("kv_consumer", decodes)):
            (directory / role).mkdir()
            made.append(start(directory / role, MODEL, *transfer(role, **settings), environment=SECRET))
        for process, address, log in made:
            wait_for(process, f"{address}/health", log)
        yield made
    finally:
        for process, _, _ in made:
            process.terminate()
        for process, _, _ in made:
            process.wait(60)


@pytest.fixture(scope="module")
def routed(instances, tmp_path_factory):
    (_, reads, _), (_, decodes, _) = instances
    with router(tmp_path_factory.mktemp("router"), "--prefill", reads, "--decode", decodes) as address:
        yield address


@pytest.fixture(scope="module")
def document():
    return Notes(4000, 8)


@pytest.fixture(scope="module")
def stock(tmp_path_factory, document):
    """What one instance with the same budget answers."""
    with running(tmp_path_factory.mktemp("alone"), MODEL, "--additional-config", BUDGET, environment=SECRET) as (
        address,
        _,
    ):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=120, max_retries=0)
        chat = client.chat.completions.create(**chat_about(document))
        return [ask(client, document.prompt(question), 60) for question in document.questions], chat


def chat_about(document):
    messages = [{"role": "user", "content": document.prompt(document.questions[2])}]
    return {
        "model": "tiny",
        "messages": messages,
        "max_tokens": 30,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }


def ask(client, prompt, steps, **options):
    extra = {"ignore_eos": True}
    got = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=steps, temperature=0, extra_body=extra, **options
    )
    return got.choices[0].text


def numbers(address, name):
    text = urllib.request.urlopen(f"{address}/metrics", timeout=20).read().decode()
    return {labels: float(value) for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.M)}


def test_answers_are_those_of_one_instance(routed, instances, document, stock):
    async def run():
        client = openai.AsyncOpenAI(base_url=f"{routed}/v1", api_key="none", timeout=120, max_retries=0)

        async def one(question):
            return await ask(client, document.prompt(question), 60)

        async def ask(client, prompt, steps):
            got = await client.completions.create(
                model="tiny", prompt=prompt, max_tokens=steps, temperature=0, extra_body={"ignore_eos": True}
            )
            assert got.usage.completion_tokens == steps
            return got.choices[0].text

        return await asyncio.gather(*map(one, document.questions))

    before = numbers(routed, "snapstream_router_requests_total").get('outcome="answered",way="split"', 0)
    assert asyncio.run(run()) == stock[0]
    after = numbers(routed, "snapstream_router_requests_total")
    assert after['outcome="answered",way="split"'] == before + len(stock[0])
    # The decode instance has read no prompt.
    compressed = numbers(instances[1][1], "snapstream_prompts_compressed_total")
    assert sum(compressed.values()) == 0
    assert sum(numbers(instances[0][1], "snapstream_prompts_compressed_total").values()) >= len(stock[0])


def test_chat_and_streams(routed, document, stock):
    client = openai.OpenAI(base_url=f"{routed}/v1", api_key="none", timeout=120, max_retries=0)
    options, (answers, chat) = chat_about(document), stock
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == chat.choices[0].message.content
    assert whole.choices[0].finish_reason == chat.choices[0].finish_reason == "length"
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [getattr(whole.usage, n) for n in counts] == [getattr(chat.usage, n) for n in counts]
    text, usage, roles = "", None, []
    for part in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        for choice in part.choices:
            text += choice.delta.content or ""
            roles.append(choice.delta.role)
        usage = part.usage or usage
    assert text == whole.choices[0].message.content
    assert usage == whole.usage
    assert [role for role in roles if role] == ["assistant"]
    prompt, want = document.prompt(document.questions[2]), answers[2]
    parts = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=60, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    assert "".join(part.choices[0].text for part in parts) == want
    for stop in (want[:3], want[1:4], want[4:7]):  # in the first token, across its end, behind it
        assert ask(client, prompt, 60, stop=[stop]) == want[: want.index(stop)], stop
        parts = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=60, temperature=0, stream=True, stop=[stop]
        )
        assert "".join(part.choices[0].text for part in parts) == want[: want.index(stop)], stop


def test_what_is_not_split_is_served_all_the_same(routed, document):
    client = openai.OpenAI(base_url=f"{routed}/v1", api_key="none", timeout=120, max_retries=0)
    prompts = [document.prompt(question) for question in document.questions[:2]]
    got = client.completions.create(model="tiny", prompt=prompts, max_tokens=16, temperature=0, logprobs=1)
    assert [choice.text.strip() for choice in got.choices] == [q.answer.strip() for q in document.questions[:2]]
    assert client.models.list().data[0].id == "tiny"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="a", max_tokens=100_000)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="a", max_tokens=1)


def test_either_side_may_die(tmp_path_factory, tmp_path, document, stock):
    """In mid-stream: that answer says so; afterwards the ones that are left go on, and whoever comes back helps."""
    payloads = {"directory": str(tmp_path / "payloads")}
    with contextlib.ExitStack() as stack:
        made = []
        for number, role in enumerate(("kv_producer", "kv_consumer", "kv_consumer")):
            (tmp_path / str(number)).mkdir()
            made.append(start(tmp_path / str(number), MODEL, *transfer(role, **payloads), environment=SECRET))
            stack.callback(lambda process=made[-1][0]: (process.kill(), process.wait(60)))
        for process, address, log in made:
            wait_for(process, f"{address}/health", log)
        (reads, read_at, _), (first, first_at, _), (second, second_at, _) = made
        address = stack.enter_context(
            router(tmp_path, "--prefill", read_at, "--decode", first_at, "--decode", second_at)
        )
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=120, max_retries=0)
        stream = client.completions.create(
            model="tiny",
            prompt=document.prompt(document.questions[0]),
            max_tokens=3000,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        busy = numbers(address, "snapstream_router_instance_busy")
        victim, other = (first, second) if busy[f'does="decode",url="{first_at}"'] else (second, first)
        kill_all(victim)
        with pytest.raises(openai.APIError):
            for _ in stream:
                pass
        # A prompt that is read for an instance that has died is read again for another one; the first cache would stay
        # in the directory until it is too old.
        dead = first_at if victim is first else second_at
        wait_until(lambda: not numbers(address, "snapstream_router_instance_well")[f'does="decode",url="{dead}"'])
        for number in (0, 1):
            assert ask(client, document.prompt(document.questions[number]), 60) == stock[0][number]
        kill_all(reads)
        for number in (2, 3):  # the one that is left reads prompts, too
            assert ask(client, document.prompt(document.questions[number]), 60) == stock[0][number]
        assert numbers(address, "snapstream_router_whole_total")['reason="no prefill instance"'] >= 1
        kill_all(other)
        with pytest.raises(openai.InternalServerError, match="no instance could serve this"):
            ask(client, "a", 5)
        assert not list((tmp_path / "payloads").glob("[0-9a-f]*"))


def kill_all(process):
    """A server and its engines, at once."""
    for child in children(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    process.kill()
    process.wait(60)
    time.sleep(0.2)


def children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    direct = [int(line) for line in found.stdout.split()]
    return [grandchild for child in direct for grandchild in children(child)] + direct

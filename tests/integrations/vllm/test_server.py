"""vLLM's own server with the plugin, over HTTP, as the ``openai`` client sees it: the shipped model answers."""

import asyncio
import re
import time
import urllib.request

import pytest

from snapstream import LLM, CacheBudget, SamplingParams
from snapstream.assets import TASK_MODEL
from tests.integrations.vllm.servers import running, start
from tests.texts import Notes

pytest.importorskip("vllm")
openai = pytest.importorskip("openai")

MODEL = str(TASK_MODEL)
BUDGET = CacheBudget.of(2000)  # what `snapstream demo` uses for its 8000 tokens


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("server")
    with running(directory, MODEL, "--additional-config", f'{{"snapstream": {BUDGET.capacity}}}') as served:
        yield served


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", timeout=120, max_retries=0)


@pytest.fixture(scope="module")
def document():
    return Notes(8000, 16)


@pytest.fixture(scope="module")
def asked(document):
    return document.questions[::2]


@pytest.fixture(scope="module")
def engine():
    return LLM(MODEL, budget=BUDGET, slots=4, max_model_len=12000, enforce_eager=True, report_plan=lambda _: None)


def metrics(server):
    text = urllib.request.urlopen(f"{server[0]}/metrics", timeout=20).read().decode()
    return {
        name: float(value) for name, value in re.findall(r"^((?:snapstream|vllm)\w*[:\w]*)\{[^}]*\} (\S+)$", text, re.M)
    }


def test_the_start_says_what_the_budget_buys(server):
    line = next(line for line in server[1].read_text().splitlines() if "SnapStream: a sequence decodes" in line)
    assert "decodes in 63 blocks (2000 entries)" in line


def test_the_demo_through_vllm(client, engine, document, asked):
    """Every answer is right, and is the built-in engine's."""
    prompts = [document.prompt(question) for question in asked]
    got = client.completions.create(model="tiny", prompt=prompts, max_tokens=16, temperature=0)
    answers = [choice.text.strip() for choice in sorted(got.choices, key=lambda choice: choice.index)]
    assert answers == [output.text.strip() for output in engine.generate(prompts, SamplingParams(max_tokens=16))]
    assert answers == [question.answer.strip() for question in asked]


def test_chat_and_streaming_say_the_same(client, document, asked):
    messages = [{"role": "user", "content": document.prompt(asked[3])}]
    options = {"model": "tiny", "messages": messages, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content.strip() == asked[3].answer.strip()
    parts = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    text, usage = "", None
    for part in parts:
        text += part.choices[0].delta.content or "" if part.choices else ""
        usage = part.usage or usage
    assert text == whole.choices[0].message.content
    assert 7900 < usage.prompt_tokens <= 8000


def test_six_at_once_with_one_that_leaves(server, document, asked):
    """Concurrent requests of several lengths; one client hangs up in mid-stream and its slot comes free."""

    async def run():
        client = openai.AsyncOpenAI(base_url=f"{server[0]}/v1", api_key="none", timeout=120, max_retries=0)

        async def ask(question):
            got = await client.completions.create(
                model="tiny", prompt=document.prompt(question), max_tokens=16, temperature=0
            )
            return got.choices[0].text.strip()

        async def leave():
            prompt = document.prompt(asked[0])
            options = {"max_tokens": 3000, "temperature": 0, "extra_body": {"ignore_eos": True}}
            stream = await client.completions.create(model="tiny", prompt=prompt, stream=True, **options)
            async for _ in stream:
                break
            await stream.close()

        return await asyncio.gather(*(ask(question) for question in asked[:6]), leave())

    answers = asyncio.run(run())
    assert answers[:-1] == [question.answer.strip() for question in asked[:6]]
    deadline = time.monotonic() + 20
    while metrics(server)["vllm:num_requests_running"] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert metrics(server)["vllm:num_requests_running"] == 0
    assert metrics(server)["vllm:kv_cache_usage_perc"] == 0


def test_a_budget_for_one_request(client, engine, document, asked):
    prompt = document.prompt(asked[1])
    options = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0}
    got = client.completions.create(**options, extra_body={"ignore_eos": True, "vllm_xargs": {"kv_budget": 64}})
    want = engine.generate(prompt, SamplingParams(max_tokens=40, ignore_eos=True, kv_budget=64))[0]
    assert got.choices[0].text.strip() == want.text.strip()
    server_wide = client.completions.create(**options, extra_body={"ignore_eos": True})
    assert (
        server_wide.choices[0].text.strip() != want.text.strip()
    )  # 64 entries are too few, so the setting did something


@pytest.mark.parametrize("asked_for", [2001, 5, "many", 1.5])
def test_a_bad_budget_is_the_clients_error(client, document, asked, asked_for):
    with pytest.raises(openai.BadRequestError, match="kv_budget"):
        client.completions.create(
            model="tiny", prompt="a", max_tokens=4, extra_body={"vllm_xargs": {"kv_budget": asked_for}}
        )
    prompt = document.prompt(asked[2])
    good = client.completions.create(model="tiny", prompt=prompt, max_tokens=16, temperature=0)
    assert good.choices[0].text.strip() == asked[2].answer.strip()


def test_counters_are_on_vllms_own_page(client, server, document, asked):
    before = metrics(server)
    client.completions.create(
        model="tiny",
        prompt=document.prompt(asked[5]),
        max_tokens=8,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    client.completions.create(model="tiny", prompt="a short one", max_tokens=4)
    deadline = time.monotonic() + 20
    name = "snapstream_prompts_compressed_total"
    while metrics(server)[name] == before[name] and time.monotonic() < deadline:
        time.sleep(0.2)
    after = metrics(server)
    length = client.completions.create(model="tiny", prompt=document.prompt(asked[5]), max_tokens=1).usage
    assert after[name] == before[name] + 1
    tokens = "snapstream_tokens_dropped_total"
    assert after[tokens] == before[tokens] + length.prompt_tokens - BUDGET.capacity
    blocks = "snapstream_blocks_released_total"
    assert after[blocks] == before[blocks] + -(-length.prompt_tokens // 32)


def test_a_bad_budget_stops_the_server(tmp_path):
    process, _, log = start(tmp_path, MODEL, environment={"SNAPSTREAM_BUDGET": '{"capcity": 2000}'})
    assert process.wait(120) != 0
    last = [line for line in log.read_text().splitlines() if line.strip()][-1]
    assert "unknown field capcity; allowed: capacity" in last

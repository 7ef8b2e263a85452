"""Every feature, through the client that users have: sync and async, against the engine itself."""

import asyncio
import math

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from snapstream import SamplingParams
from tests.checkpoints import prompt
from tests.readings import record_readings
from tests.serving.servers import running

WORDS = " ".join(f"w{token}" for token in prompt(150))
MESSAGES = [{"role": "system", "content": "w9 w10"}, {"role": "user", "content": WORDS}]
FOREVER = {"ignore_eos": True}


@pytest.fixture(scope="module")
def server(llm):
    with running(llm) as one:
        yield one


@pytest.fixture(params=["sync", "async"])
def create(request, server):
    """Calls an endpoint, and collects a stream, by either client."""
    url = server.url + "/v1"
    if request.param == "sync":
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:

            def call(kind, **body):
                endpoint = client.completions if kind == "text" else client.chat.completions
                reply = endpoint.create(model="tiny", **body)
                return list(reply) if body.get("stream") else reply

            yield call
        return

    async def call_async(kind, **body):
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            endpoint = client.completions if kind == "text" else client.chat.completions
            reply = await endpoint.create(model="tiny", **body)
            return [event async for event in reply] if body.get("stream") else reply

    yield lambda kind, **body: asyncio.run(call_async(kind, **body))


@pytest.fixture(scope="module")
def alone(checkpoint):
    """The engine's own answer."""
    from tests.engine.test_engine import make

    engine = make(checkpoint, max_model_len=2000)

    def generate(text, **params):
        return engine.generate(text, SamplingParams(**params))[0]

    return generate


def test_completion(create, alone):
    expected = alone(WORDS, max_tokens=20, ignore_eos=True)
    reply = create("text", prompt=WORDS, max_tokens=20, temperature=0, extra_body=FOREVER)
    assert reply.object == "text_completion"
    assert reply.choices[0].text == expected.text
    assert reply.choices[0].finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (150, 20, 170)


def test_completion_stream(create, alone):
    expected = alone(WORDS, max_tokens=60, ignore_eos=True)
    events = create("text", prompt=WORDS, max_tokens=60, temperature=0, stream=True, extra_body=FOREVER)
    assert "".join(event.choices[0].text for event in events) == expected.text
    assert [event.choices[0].finish_reason for event in events][-1] == "length"
    assert len(events) > 3
    assert len({event.id for event in events}) == 1
    assert all(event.usage is None for event in events)


def test_chat(create, alone):
    expected = alone("w9 w10 " + WORDS, max_tokens=20, ignore_eos=True)
    reply = create("chat", messages=MESSAGES, max_completion_tokens=20, temperature=0, extra_body=FOREVER)
    assert reply.object == "chat.completion"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == expected.text
    older = create("chat", messages=MESSAGES, max_tokens=20, temperature=0, extra_body=FOREVER)
    assert older.choices[0].message.content == expected.text
    parts = [{"type": "text", "text": " ".join(part)} for part in (WORDS.split()[:20], WORDS.split()[20:])]
    in_parts = [{"role": "developer", "content": "w9 w10"}, {"role": "tool", "tool_call_id": "a", "content": parts}]
    reply = create("chat", messages=in_parts, max_tokens=20, temperature=0, extra_body=FOREVER)
    assert reply.choices[0].message.content == expected.text


def test_chat_stream_with_usage(create, alone):
    expected = alone("w9 w10 " + WORDS, max_tokens=20, ignore_eos=True)
    events = create(
        "chat",
        messages=MESSAGES,
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=FOREVER,
    )
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events[:-1]) == expected.text
    assert [event.choices[0].finish_reason for event in events[:-1]][-1] == "length"
    assert events[-1].choices == []
    assert events[-1].usage.total_tokens == 172


def test_chat_goes_on_to_the_end_of_the_model_by_default(create, server):
    reply = create("chat", messages=[{"role": "user", "content": "w5"}], temperature=0, extra_body=FOREVER)
    assert reply.usage.total_tokens == server.llm.engine.max_model_len
    assert reply.choices[0].finish_reason == "length"


def test_several_prompts_and_answers(create, alone):
    texts = [WORDS, "w5 w6", "w7"]
    reply = create("text", prompt=texts, n=2, max_tokens=9, temperature=0, extra_body=FOREVER)
    expected = [alone(text, max_tokens=9, ignore_eos=True).text for text in texts for _ in range(2)]
    assert [choice.text for choice in reply.choices] == expected
    assert [choice.index for choice in reply.choices] == list(range(6))
    assert reply.usage.prompt_tokens == 153
    assert reply.usage.completion_tokens == 54
    events = create("text", prompt=texts, n=2, max_tokens=9, temperature=0, stream=True, extra_body=FOREVER)
    merged = ["".join(e.choices[0].text for e in events if e.choices[0].index == i) for i in range(6)]
    assert merged == expected
    ids = [[5, 6], [7]]
    reply = create("text", prompt=ids, max_tokens=9, temperature=0, extra_body=FOREVER)
    assert [choice.text for choice in reply.choices] == [expected[2], expected[4]]
    reply = create("text", prompt=[5, 6], max_tokens=9, temperature=0, extra_body=FOREVER)
    assert [choice.text for choice in reply.choices] == [expected[2]]


def test_sampling_parameters_reach_the_engine(create, alone):
    same = {
        "temperature": 0.9,
        "top_p": 0.8,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    ours = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True}
    bias = {5: 3.0, 7: -100}
    params = same | ours | {"max_tokens": 60, "logit_bias": bias}
    expected = [alone(WORDS, **params, seed=seed).text for seed in (3, 4, 5)]
    assert len(set(expected)) == 3
    named = {str(token): value for token, value in bias.items()}
    reply = create("text", prompt=WORDS, max_tokens=60, seed=3, n=3, logit_bias=named, **same, extra_body=ours)
    assert [choice.text for choice in reply.choices] == expected
    for name, value in (params | {"seed": 9}).items():  # each of them matters, so each must have arrived
        if name in ("ignore_eos", "max_tokens"):
            continue
        neutral = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        without = params | {"seed": 3} | {name: neutral.get(name, {} if name == "logit_bias" else 0.0)}
        if name == "seed":
            without["seed"] = value
        if name != "min_p":  # top_k cuts more here
            assert alone(WORDS, **without).text != expected[0], name


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_and_tokens(create, alone, stream):
    free = alone(WORDS, max_tokens=30, ignore_eos=True)
    stop = free.text[40:44]
    expected = free.text[: free.text.index(stop)]

    def text_of(**more):
        reply = create("text", prompt=WORDS, max_tokens=30, temperature=0, stream=stream, **more)
        events = reply if stream else [reply]
        assert [event.choices[0].finish_reason for event in events][-1] == "stop"
        return "".join(event.choices[0].text for event in events)

    assert text_of(stop=stop, extra_body=FOREVER) == expected
    assert text_of(stop=["nothing", stop], extra_body=FOREVER) == expected
    token = free.token_ids[10]
    until = alone(WORDS, max_tokens=30, ignore_eos=True, stop_token_ids=(token,))
    assert text_of(extra_body=FOREVER | {"stop_token_ids": [token]}) == until.text


def test_logprobs_of_completions(create, alone):
    expected = alone(WORDS, max_tokens=12, ignore_eos=True, logprobs=3)
    reply = create("text", prompt=WORDS, max_tokens=12, temperature=0, logprobs=3, extra_body=FOREVER)
    got = reply.choices[0].logprobs
    assert got.token_logprobs == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-4)
    assert got.tokens == [
        f"w{one.token_id}" if one.token_id > 2 else got.tokens[i] for i, one in enumerate(expected.logprobs)
    ]
    assert [len(top) for top in got.top_logprobs] == [3] * 12
    shown = [text if one.token_id > 2 else "" for text, one in zip(got.tokens, expected.logprobs, strict=True)]
    assert got.text_offset == [len("".join(shown[:i])) for i in range(12)]
    events = create("text", prompt=WORDS, max_tokens=12, temperature=0, logprobs=3, stream=True, extra_body=FOREVER)
    pieces = [event.choices[0].logprobs for event in events if event.choices[0].logprobs]
    assert [token for piece in pieces for token in piece.tokens] == got.tokens
    assert [at for piece in pieces for at in piece.text_offset] == got.text_offset


def test_logprobs_of_chats(create):
    body = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0, "logprobs": True, "extra_body": FOREVER}
    reply = create("chat", **body, top_logprobs=2)
    content = reply.choices[0].logprobs.content
    assert len(content) == 12
    for one in content:
        assert bytes(one.bytes).decode() == one.token
        assert one.top_logprobs[0].logprob == pytest.approx(one.logprob)  # greedy takes the most likely
        assert math.exp(one.logprob) <= 1
        assert len(one.top_logprobs) == 2
    assert [len(one.top_logprobs) for one in create("chat", **body).choices[0].logprobs.content] == [0] * 12
    events = create("chat", **body, top_logprobs=2, stream=True)
    pieces = [event.choices[0].logprobs for event in events if event.choices[0].logprobs]
    assert [one.token for piece in pieces for one in piece.content] == [one.token for one in content]


def test_echo(create, alone):
    expected = alone(WORDS, max_tokens=5, ignore_eos=True).text
    body = {"prompt": WORDS, "max_tokens": 5, "temperature": 0, "echo": True, "extra_body": FOREVER}
    assert create("text", **body).choices[0].text == WORDS + expected
    assert "".join(event.choices[0].text for event in create("text", **body, stream=True)) == WORDS + expected


@pytest.mark.parametrize("most", [0, 1, 4])
def test_echo_with_logprobs(create, checkpoint, most):
    """Those of the prompt are transformers' own; they come from prefill, so a small cache does not change them."""
    from transformers import AutoModelForCausalLM

    tokens = prompt(150)
    with torch.no_grad():
        peer = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
        want = peer(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = [float(want[at, token]) for at, token in enumerate(tokens[1:])]
    body = {"prompt": WORDS, "max_tokens": most, "temperature": 0, "echo": True, "logprobs": 2, "extra_body": FOREVER}
    reply = create("text", **body).choices[0]
    free = create("text", **(body | {"echo": False})).choices[0]
    got = reply.logprobs
    assert reply.text == WORDS + free.text
    assert (reply.finish_reason, len(got.tokens)) == ("length", 150 + most)
    assert got.tokens[:150] == [f"w{token}" for token in tokens]
    assert got.token_logprobs[0] is got.top_logprobs[0] is None
    assert got.token_logprobs[1:150] == pytest.approx(expected, abs=1e-4)
    assert got.token_logprobs[150:] == pytest.approx(free.logprobs.token_logprobs, abs=1e-5)
    for at, top in enumerate(got.top_logprobs[1:150]):
        best = want[at].topk(2)
        assert {f"w{token}" for token in best.indices.tolist() if token > 2} <= set(top)
        assert max(top.values()) == pytest.approx(float(best.values[0]), abs=1e-4)
    small = create("text", **(body | {"extra_body": FOREVER | {"kv_budget": 16}})).choices[0]
    assert small.logprobs.token_logprobs[1:150] == got.token_logprobs[1:150]
    events = create("text", **body, stream=True)
    assert "".join(event.choices[0].text for event in events) == reply.text
    pieces = [event.choices[0].logprobs for event in events if event.choices[0].logprobs]
    assert [token for piece in pieces for token in piece.tokens] == got.tokens
    assert [at for piece in pieces for at in piece.text_offset] == got.text_offset
    assert create("text", prompt=WORDS, max_tokens=0).choices[0].text == ""
    several = create("text", **(body | {"n": 3})).choices
    assert [choice.logprobs for choice in several] == [got] * 3


def test_offsets_of_an_echo_are_those_of_the_text(create, server, monkeypatch):
    """Tokens that the tokenizer adds have no place in it; token ids are echoed as they decode."""
    tokenizer = server.llm.tokenizer
    monkeypatch.setattr(tokenizer, "_tokenizer", with_beginning(tokenizer.backend_tokenizer))
    body = {"max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 0, "extra_body": FOREVER}
    choice = create("text", prompt="w5 w6 w77", **body).choices[0]
    got = choice.logprobs
    assert got.tokens[:4] == ["<s>", "w5", "w6", "w77"]
    assert got.text_offset[:4] == [0, 0, 3, 6]
    assert [choice.text[at:].startswith(word) for at, word in zip(got.text_offset, got.tokens, strict=True)][1:4] == [
        True,
        True,
        True,
    ]
    assert got.text_offset[4] == len("w5 w6 w77")
    ids = create("text", prompt=[1, 5, 6], **body).choices[0]
    assert ids.text.startswith("<s>w5w6")
    assert ids.logprobs.text_offset[:3] == [0, 3, 5]


def with_beginning(tokenizer):
    """The same, which begins every text with <s>."""
    made = Tokenizer.from_str(tokenizer.to_str())
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def test_a_prompt_is_scored_once_for_all_answers(server, monkeypatch):
    read = record_readings(server.llm.engine, monkeypatch)
    body = {"prompt": WORDS, "n": 4, "max_tokens": 0, "echo": True, "logprobs": 1}
    assert len(httpx.post(server.url + "/v1/completions", json=body).json()["choices"]) == 4
    assert len(read) == 1


def test_min_tokens(create, alone):
    """Neither an end token nor a stop string ends the output before; then it ends as soon as it may."""
    free = alone(WORDS, max_tokens=40, ignore_eos=True)
    stops, stop = list(free.token_ids[3:6]), free.text[8:10]
    early = alone(WORDS, max_tokens=40, ignore_eos=True, stop_token_ids=stops)
    assert len(early.token_ids) < 12
    for least in (12, 25):
        extra = FOREVER | {"stop_token_ids": stops, "min_tokens": least}
        reply = create("text", prompt=WORDS, max_tokens=40, temperature=0, logprobs=0, extra_body=extra).choices[0]
        assert len(reply.logprobs.tokens) >= least
        assert not {f"w{token}" for token in stops} & set(reply.logprobs.tokens[:least])
        # The same tokens with the stops forbidden by a bias until they may come, and then without it.
        forbidden = {token: -100.0 for token in stops}
        begin = alone(WORDS, max_tokens=least, ignore_eos=True, logit_bias=forbidden).token_ids
        rest = alone(WORDS, max_tokens=40, ignore_eos=True, forced=begin, stop_token_ids=tuple(stops))
        assert reply.text == rest.text
        assert reply.finish_reason == rest.finish_reason
        extra = FOREVER | {"min_tokens": least}
        reply = create("text", prompt=WORDS, max_tokens=40, temperature=0, stop=stop, extra_body=extra).choices[0]
        whole = alone(WORDS, max_tokens=40, ignore_eos=True)
        early = alone(WORDS, max_tokens=least, ignore_eos=True).text
        at = whole.text.find(stop, len(early))
        assert reply.text == (whole.text if at < 0 else whole.text[:at])
    none = create("text", prompt=WORDS, max_tokens=40, temperature=0, stop=stop, extra_body=FOREVER).choices[0]
    assert none.text == free.text[: free.text.index(stop)]


def test_special_tokens_in_the_text(create, server):
    end = server.llm.engine.spec.eos_token_ids[0]
    forcing = {"logit_bias": {str(end): 100}, "extra_body": FOREVER | {"skip_special_tokens": False}}
    assert create("text", prompt="w5", max_tokens=2, **forcing).choices[0].text == "</s></s>"
    forcing["extra_body"] = FOREVER
    assert create("text", prompt="w5", max_tokens=2, **forcing).choices[0].text == ""


def test_variables_of_the_chat_template(create, server, alone, monkeypatch):
    template = "{% if enable_thinking %}w20 {% endif %}{% for m in messages %}{{ m.content }} {% endfor %}{{ tail }}"
    monkeypatch.setattr(server.llm, "chat_template", template)
    for variables, laid_out in (
        (None, f"{WORDS} "),
        ({"enable_thinking": True, "tail": "w21"}, f"w20 {WORDS} w21"),
        ({"enable_thinking": False}, f"{WORDS} "),
    ):
        messages = [{"role": "user", "content": WORDS}]
        extra = FOREVER | ({} if variables is None else {"chat_template_kwargs": variables})
        reply = create("chat", messages=messages, max_tokens=9, temperature=0, extra_body=extra)
        assert reply.choices[0].message.content == alone(laid_out, max_tokens=9, ignore_eos=True).text
        body = {"messages": messages, "chat_template_kwargs": variables}
        assert httpx.post(server.url + "/tokenize", json=body).json()["count"] == len(laid_out.split())


@pytest.mark.parametrize("field", [{"kv_budget": 36}, {"vllm_xargs": {"kv_budget": 36}}])
def test_budget_and_kept_tokens(create, alone, field):
    expected = alone(WORDS, max_tokens=30, ignore_eos=True, kv_budget=36, return_kept_tokens=True)
    assert expected.text != alone(WORDS, max_tokens=30, ignore_eos=True).text
    extra = FOREVER | field | {"return_kept_tokens": True}
    reply = create("text", prompt=WORDS, max_tokens=30, temperature=0, extra_body=extra)
    events = create("text", prompt=WORDS, max_tokens=30, temperature=0, stream=True, extra_body=extra)
    assert reply.choices[0].text == "".join(event.choices[0].text for event in events) == expected.text
    for choice in (reply.choices[0], events[-1].choices[0]):
        cache = choice.cache
        assert cache["limit"] == 36
        assert cache["sink"] + cache["pinned"] + cache["recent"] == 36
        assert cache["dropped"] == 114
        assert cache["kept"]["mass"] == pytest.approx(expected.cache.kept.mass)
        assert cache["kept"]["positions"] == [[list(h) for h in layer] for layer in expected.cache.kept.positions]
    assert "cache" not in create("text", prompt="w5", max_tokens=2).choices[0].model_dump(exclude_none=True)


def test_models_and_what_clients_send_along(create, server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").max_model_len == 2000
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            client.models.retrieve("other")
    reply = create(
        "chat",
        messages=[{"role": "user", "content": "w5", "name": "me"}],
        max_tokens=3,
        user="u",
        metadata={"a": "b"},
        store=False,
        tools=[],
        response_format={"type": "text"},
        parallel_tool_calls=True,
    )
    assert reply.usage.completion_tokens <= 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ""}, "has no tokens"),
        ({"prompt": [5, 96]}, "token 96 is not in the model's vocabulary"),
        ({"prompt": "w5 " * 2000}, "at most 1999 fit"),
        ({"prompt": "w5", "model": "gpt-4"}, "'gpt-4' is not served here; 'tiny' is"),
        ({"prompt": "w5", "max_tokens": -2}, "max_tokens: Input should be greater than or equal to -1"),
        ({"prompt": "w5", "max_tokens": 8.5}, "max_tokens: Input should be a valid integer"),
        (
            {"messages": MESSAGES, "max_tokens": 0, "kind": "chat"},
            "max_tokens: Input should be greater than or equal to 1",
        ),
        ({"prompt": "w5", "extra_body": {"min_tokens": 17}}, "min_tokens is 17; it must be at most max_tokens (16)"),
        ({"prompt": "w5", "temperature": 3}, "temperature"),
        ({"prompt": "w5", "logprobs": 21}, "at most 20"),
        ({"prompt": "w5", "logit_bias": {"96": 1}}, "token 96"),
        ({"prompt": "w5", "logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": "w5", "extra_body": {"kv_budget": 49}}, "a cache has 48 entries here, give at most that"),
        (
            {"prompt": "w5", "extra_body": {"kv_buget": 40}},
            "'kv_buget' is not a field of this request; did you mean 'kv_bud",
        ),
        ({"prompt": "w5", "extra_body": {"qqq": 40}}, "'qqq' is not a field of this request"),
        ({"prompt": "w5", "extra_body": {"max_completion_tokens": 4}}, "is not a field of this request; did you mean"),
        ({"prompt": "w5", "extra_body": {"messages": []}}, "'messages' is not a field of this request; it belongs to"),
        ({"messages": MESSAGES, "extra_body": {"echo": True}, "kind": "chat"}, "it belongs to /v1/completions"),
        (
            {"prompt": [[5] * 1900] * 100, "echo": True, "logprobs": 20},
            "echo with logprobs would report 3990000 numbers; at most 1048576 in one request",
        ),
        ({"prompt": [5] * 1900, "n": 100, "echo": True, "logprobs": 20}, "would report 3990000 numbers"),
        ({"prompt": "w5", "suffix": "x"}, "suffix is not supported: a text can only be continued at its end"),
        ({"prompt": "w5", "best_of": 3}, "best_of is not supported: every answer is returned; set n"),
        ({"prompt": "w5", "extra_body": {"prompt_logprobs": 3}}, "ask /v1/completions for echo with logprobs"),
        ({"prompt": "w5", "extra_body": {"guided_json": {"type": "object"}}}, "with this model's tokenizer"),
        (
            {"prompt": "w5", "extra_body": {"guided_whitespace_pattern": " "}},
            "guided_whitespace_pattern is not supported",
        ),
        ({"prompt": "w5", "stop": ["a"] * 17}, "stop: List should have at most 16 items"),
        ({"prompt": "w5", "stop": ["a", ""]}, "stop[1]: String should have at least 1 character"),
        ({"prompt": [1, 2, -3]}, "prompt[2]: Input should be greater than or equal to 0"),
        (
            {"prompt": "w5", "echo": True, "logprobs": 1, "extra_body": {"session_id": "a"}},
            "echo with logprobs needs the whole prompt to be prefilled; leave out session_id",
        ),
        ({"messages": [], "kind": "chat"}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "kind": "chat"},
            "messages[0].content[0]: a part of type 'image_url' is not supported: this server reads and writes text",
        ),
        ({"messages": MESSAGES, "top_logprobs": 1, "kind": "chat"}, "needs logprobs"),
        (
            {"messages": MESSAGES, "tools": [{"type": "function"}], "kind": "chat"},
            "tools[0].function: Field required",
        ),
        ({"messages": MESSAGES, "functions": [{"name": "f"}], "kind": "chat"}, "use tools and tool_choice"),
        (
            {"messages": MESSAGES, "extra_body": {"chat_template_kwargs": {"tokenize": True}}, "kind": "chat"},
            "chat_template_kwargs: tokenize cannot be set here",
        ),
    ],
)
def test_errors_say_what_to_do(server, body, message):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        kind = body.pop("kind", "text") if "kind" in body else "text"
        endpoint = client.completions if kind == "text" else client.chat.completions
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
            endpoint.create(**({"model": "tiny"} | body))
        body["kind"] = kind
    assert message in caught.value.message
    assert caught.value.body["type"] in ("invalid_request_error", "not_found_error")
    assert caught.value.body["request_id"] == caught.value.request_id


def test_defaults_are_the_model_makers(server, create, alone, monkeypatch):
    monkeypatch.setattr(
        server.llm.engine, "sampling_defaults", {"temperature": 0.5, "top_k": 5, "repetition_penalty": 1.2}
    )
    expected = alone(WORDS, max_tokens=25, temperature=0.5, top_k=5, repetition_penalty=1.2, seed=4, ignore_eos=True)
    reply = create("text", prompt=WORDS, max_tokens=25, seed=4, extra_body=FOREVER)
    assert reply.choices[0].text == expected.text
    greedy = alone(WORDS, max_tokens=25, repetition_penalty=1.2, ignore_eos=True)
    reply = create("text", prompt=WORDS, max_tokens=25, temperature=0, extra_body=FOREVER)
    assert reply.choices[0].text == greedy.text

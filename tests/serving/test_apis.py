"""OpenAI's responses and Anthropic's messages, through their own clients: they say what chat completions say."""

import json

import anthropic
import httpx
import openai
import pytest

from snapstream.serving.apis.history import ResponseHistory
from tests.bytelevel import MERGES, save_model
from tests.engine.test_engine import make
from tests.serving.servers import idle, post, running, wait_until
from tests.serving.test_tools import SCHEMA, TEMPLATE, THINKING

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = [
    {"type": "function", "name": "save", "description": "", "parameters": SCHEMA, "strict": True},
    {"type": "function", "name": "stop", "parameters": NO_ARGUMENTS, "strict": None},
]
CUSTOM = [{"name": "save", "description": "", "input_schema": SCHEMA}, {"name": "stop", "input_schema": NO_ARGUMENTS}]
CHAT = [
    {"type": "function", "function": {name: value for name, value in each.items() if name != "type"}}
    for each in FUNCTIONS
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    made = make(
        save_model(tmp_path_factory.mktemp("bytes"), MERGES), 64, max_model_len=3000, slots=3, prefix_cache=2**22
    )
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def server(llm):
    with running(llm, api_keys=("secret", "other")) as one:
        yield one


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A server whose model reasons if it is asked to."""
    made = make(save_model(tmp_path_factory.mktemp("bytes"), MERGES), 64, max_model_len=3000, slots=3)
    made.chat_template = THINKING
    with running(made) as one:
        yield one


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0) as one:
        yield one


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as one:
        yield one


def respond(client, **body):
    body = {"input": "Hello, how are you?", "temperature": 0, "max_output_tokens": 300} | body
    return client.responses.create(model="tiny", **body)


def ask(claude, **body):
    asked = [{"role": "user", "content": "Hello, how are you?"}]
    extra = {"temperature": 0} | body.pop("extra_body", {})
    return claude.messages.create(model="tiny", **({"messages": asked, "max_tokens": 300} | body), extra_body=extra)


def chat(client, *messages, **body):
    body = {"temperature": 0, "max_tokens": 300} | body
    return client.chat.completions.create(model="tiny", messages=list(messages), **body).choices[0]


USER = {"role": "user", "content": "Hello, how are you?"}
SYSTEM = {"role": "system", "content": "Be brief."}


# -- responses --------------------------------------------------------------------------------------------------------


def test_a_response(client):
    want = chat(client, SYSTEM, USER, max_tokens=12)
    got = respond(client, instructions="Be brief.", max_output_tokens=12)
    assert got.output_text == want.message.content
    assert got.status == ("incomplete" if want.finish_reason == "length" else "completed")
    assert got.usage.output_tokens == 12
    assert got.usage.total_tokens == got.usage.input_tokens + 12
    assert got.id.startswith("resp_")
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": USER["content"]}]},
    ]
    assert respond(client, input=parts, max_output_tokens=12).output_text == want.message.content


def test_responses_follow_each_other(client):
    first = respond(client, max_output_tokens=8)
    second = respond(
        client, input="And now?", previous_response_id=first.id, max_output_tokens=8, instructions="Be brief."
    )
    third = respond(client, input="Why?", previous_response_id=second.id, max_output_tokens=8)
    history = [USER, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And now?"}]
    assert second.output_text == chat(client, SYSTEM, *history, max_tokens=8).message.content
    history += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "Why?"}]
    assert third.output_text == chat(client, *history, max_tokens=8).message.content, "instructions are not kept"
    assert third.previous_response_id == second.id
    again = respond(
        client, input="And now?", previous_response_id=first.id, max_output_tokens=8, instructions="Be brief."
    )
    assert again.output_text == second.output_text, "a response can be followed more than once"


def test_ids_of_responses_are_their_own(server):
    """Whatever id a client gives its requests."""
    headers = {"Authorization": "Bearer secret", "X-Request-Id": "always-the-same"}
    answers = [post(server, "/v1/responses", headers=headers, input="x", max_output_tokens=1).json() for _ in range(2)]
    assert answers[0]["id"] != answers[1]["id"]


def test_responses_that_are_not_there(client, server):
    kept = respond(client, max_output_tokens=2)
    unkept = respond(client, max_output_tokens=2, store=False)
    other = openai.OpenAI(base_url=server.url + "/v1", api_key="other", max_retries=0)
    for one, name in ((client, "resp_x"), (client, unkept.id), (other, kept.id)):
        with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
            respond(one, previous_response_id=name)
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        respond(client, previous_response_id=kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(kept.id)


def test_functions_of_a_namespace(client, llm):
    """The model sees full names; calls have a name and a namespace, in answers, streams and histories."""
    group = {"type": "namespace", "name": "files", "description": "", "tools": [FUNCTIONS[0]]}
    body = {"tools": [group], "tool_choice": "required"}
    qualified = [{"type": "function", "function": CHAT[0]["function"] | {"name": "files.save"}}]
    want = chat(client, USER, tools=qualified, tool_choice="required").message.tool_calls[0]
    assert want.function.name == "files.save"
    item = respond(client, **body).output[-1]
    assert (item.name, item.namespace, item.arguments) == ("save", "files", want.function.arguments)
    with client.responses.stream(model="tiny", input=USER["content"], temperature=0, **body) as stream:
        streamed = [event.item for event in stream if event.type == "response.output_item.done"][-1]
    assert (streamed.name, streamed.namespace) == ("save", "files")
    given = [USER, {"type": "function_call", "call_id": "a", "name": "save", "namespace": "files", "arguments": "{}"}]
    given.append({"type": "function_call_output", "call_id": "a", "output": "done"})
    call = {"id": "a", "type": "function", "function": {"name": "files.save", "arguments": "{}"}}
    history = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    history.append({"role": "tool", "tool_call_id": "a", "content": "done"})
    shown = [{"type": "function", "function": qualified[0]["function"]}]
    wanted = chat(client, *history, tools=shown, max_tokens=5).message
    assert respond(client, input=given, tools=[group], max_output_tokens=5).output_text == (wanted.content or "")
    for wrong in ({"type": "namespace", "tools": []}, group | {"tools": [{"type": "namespace", "name": "x"}]}):
        with pytest.raises(openai.BadRequestError, match=r"tools"):
            respond(client, tools=[wrong])


def test_calls_of_a_response(client):
    got = respond(client, tools=[*FUNCTIONS, {"type": "web_search"}], tool_choice="required")
    item = got.output[-1]
    want = chat(client, USER, tools=CHAT, tool_choice="required").message.tool_calls[0]
    assert (item.type, item.name, item.arguments) == ("function_call", want.function.name, want.function.arguments)
    json.loads(item.arguments)
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "done"}
    next_one = respond(client, input=[result], previous_response_id=got.id, tools=FUNCTIONS, max_output_tokens=5)
    call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
    history = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    history += [{"role": "tool", "tool_call_id": item.call_id, "content": "done"}]
    stated = [{"role": "user", "content": USER["content"]}, item.model_dump(exclude_none=True), result]
    assert respond(client, input=stated, tools=FUNCTIONS, max_output_tokens=5).output_text == next_one.output_text
    assert next_one.output_text == chat(client, *history, tools=CHAT, max_tokens=5).message.content
    named = respond(client, tools=FUNCTIONS, tool_choice={"type": "function", "name": "stop"})
    assert named.output[-1].name == "stop"


@pytest.mark.parametrize(
    "body",
    [
        {"max_output_tokens": 9},
        {"tools": FUNCTIONS, "tool_choice": "required"},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}},
    ],
)
def test_a_streamed_response_says_the_same(client, body):
    want = respond(client, **body)
    events = list(respond(client, stream=True, **body))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == f"response.{want.status}"

    def plain(response):
        return [
            {name: value for name, value in item.model_dump().items() if name not in ("id", "call_id")}
            for item in response.output
        ]

    assert plain(last.response) == plain(want)
    texts = {"response.output_text.delta", "response.reasoning_text.delta", "response.function_call_arguments.delta"}
    said = "".join(event.delta for event in events if event.type in texts)
    whole = [item.arguments if item.type == "function_call" else item.content[0].text for item in want.output]
    assert said == "".join(whole)
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert added == done == [item.id for item in last.response.output]


def test_the_client_can_put_a_stream_together(client):
    shape = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    with client.responses.stream(model="tiny", input="Hi", temperature=0, text=shape) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == respond(client, input="Hi", text=shape).output_text


# -- messages ---------------------------------------------------------------------------------------------------------


def test_a_message(client, claude):
    want = chat(client, SYSTEM, USER, max_tokens=12)
    got = ask(claude, system="Be brief.", max_tokens=12)
    assert got.content[0].text == want.message.content
    assert got.stop_reason == ("max_tokens" if want.finish_reason == "length" else "end_turn")
    assert got.usage.output_tokens == 12
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    parts = [{"role": "user", "content": [{"type": "text", "text": USER["content"]}]}]
    assert ask(claude, system=blocks, messages=parts, max_tokens=12).content[0].text == want.message.content
    used = ask(claude, system="Be brief.", max_tokens=12).usage
    counted = claude.messages.count_tokens(model="tiny", system="Be brief.", messages=parts).input_tokens
    assert used.input_tokens + used.cache_read_input_tokens == counted


def test_calls_of_a_message(client, claude):
    got = ask(claude, tools=CUSTOM, tool_choice={"type": "any"})
    block = got.content[-1]
    tools = [
        {"type": "function", "function": {"name": each["name"], "parameters": each["input_schema"]}} for each in CUSTOM
    ]
    want = chat(client, USER, tools=tools, tool_choice="required").message.tool_calls[0]
    assert got.stop_reason == "tool_use"
    assert (block.type, block.name, block.input) == (
        "tool_use",
        want.function.name,
        json.loads(want.function.arguments),
    )
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "done"}]}
    messages = [USER, {"role": "assistant", "content": got.content}, {"role": "user", "content": [result]}]
    answer = ask(claude, messages=messages, tools=CUSTOM, max_tokens=5)
    call = {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
    history = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    history += [{"role": "tool", "tool_call_id": block.id, "content": "done"}]
    assert answer.content[0].text == chat(client, *history, tools=tools, max_tokens=5).message.content
    assert ask(claude, tools=CUSTOM, tool_choice={"type": "tool", "name": "stop"}).content[-1].name == "stop"
    assert ask(claude, tools=CUSTOM, tool_choice={"type": "none"}, max_tokens=5).content[0].type == "text"


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 9},
        {"tools": CUSTOM, "tool_choice": {"type": "any"}},
        {"max_tokens": 40, "stop_sequences": ["a", "e", "i", "0", "1", "z", "Z"]},
    ],
)
def test_a_streamed_message_says_the_same(claude, body):
    want = ask(claude, **body)
    asked = [{"role": "user", "content": "Hello, how are you?"}]
    with claude.messages.stream(
        model="tiny", **({"messages": asked, "max_tokens": 300} | body), extra_body={"temperature": 0}
    ) as stream:
        kinds = [event.type for event in stream]
        got = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(want.content)

    def plain(message):
        return [
            {k: v for k, v in block.model_dump().items() if k not in ("id", "parsed_output")}
            for block in message.content
        ]

    assert plain(got) == plain(want)
    assert (got.stop_reason, got.stop_sequence) == (want.stop_reason, want.stop_sequence)
    assert got.usage.output_tokens == want.usage.output_tokens


def test_a_stop_sequence_is_named(claude):
    free = ask(claude, max_tokens=30).content[0].text
    stop = free[len(free) // 2]
    got = ask(claude, max_tokens=30, stop_sequences=["never there", stop])
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", stop)
    assert got.content[0].text == free[: free.index(stop)]


def test_thinking_is_a_block(thinker):
    with anthropic.Anthropic(base_url=thinker.url, api_key="none", max_retries=0) as claude:
        thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
        got = ask(claude, max_tokens=9, extra_body=thinking)
        assert [block.type for block in got.content] == ["thinking"]
        with claude.messages.stream(
            model="tiny", max_tokens=9, messages=[USER], extra_body=thinking | {"temperature": 0}
        ) as stream:
            assert stream.get_final_message().content[0].thinking == got.content[0].thinking
        off = ask(claude, max_tokens=9, extra_body={"thinking": {"type": "disabled"}})
        assert off.content[0].type == "text"
        history = [USER, {"role": "assistant", "content": [*got.content, {"type": "text", "text": "Yes."}]}, USER]
        assert ask(claude, messages=history, max_tokens=3).content


def test_reasoning_is_an_item(thinker):
    with openai.OpenAI(base_url=thinker.url + "/v1", api_key="none", max_retries=0) as client:
        body = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}, "max_output_tokens": 9}
        got = respond(client, **body)
        assert [item.type for item in got.output] == ["reasoning"]
        events = list(respond(client, stream=True, **body))
        assert events[-1].response.output[0].content == got.output[0].content
        said = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        assert said == got.output[0].content[0].text
        assert respond(client, input="And?", previous_response_id=got.id, max_output_tokens=3).output


# -- errors -----------------------------------------------------------------------------------------------------------

KEY = {"x-api-key": "secret"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/messages", {"messages": [USER]}, "max_tokens: Field required"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [IMAGE]}], "max_tokens": 3}, "type 'image' is not"),
        ("/v1/messages", {"messages": [USER], "max_tokens": 3, "tool_choice": {"type": "tool"}}, "give the name"),
        ("/v1/messages", {"messages": [USER], "max_tokens": 3, "tool_choice": {"type": "any"}}, "there are no tools"),
        (
            "/v1/messages",
            {"messages": [USER], "max_tokens": 3, "tools": [{"type": "bash_20250124", "name": "bash"}]},
            "Anthropic's servers",
        ),
        ("/v1/messages", {"messages": [USER], "max_tokens": 3, "mcp_servers": [{"url": "x"}]}, "nothing is fetched"),
        ("/v1/messages", {"messages": [USER], "max_tokens": 3, "stop_sequences": [""]}, "stop"),
        ("/v1/messages", {"messages": [USER], "max_tokens": 3, "nonsense": 1}, "'nonsense' is not a field"),
        ("/v1/messages/count_tokens", {"messages": []}, "at least 1"),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference' is not supported"),
        ("/v1/responses", {"input": [{"type": "function_call", "name": "x"}]}, "needs call_id"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image' is not"),
        ("/v1/responses", {"input": []}, "at least 1"),
        ("/v1/responses", {"input": "x", "background": True}, "background is not supported"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "custom", "name": "x"}]}, "'custom' is not supported"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function"}]}, "a function needs a name"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema"}}}, "give a schema"),
        ("/v1/responses", {"input": "x", "tool_choice": "required"}, "there are no tools"),
        ("/v1/responses", {"input": [{"role": "user", "content": [0] * 100_000}]}, "input[0].content"),
        ("/v1/messages", {"messages": [USER], "max_tokens": 1, "system": [0] * 100_000}, "system"),
    ],
)
def test_errors_are_in_the_format_of_the_api(server, path, body, message):
    answer = post(server, path, headers=KEY, **body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
    assert (answer.json().get("type") == "error") == path.startswith("/v1/messages")
    assert idle(server)


def test_keys_of_either_kind(server, claude):
    assert post(server, "/v1/messages", headers={"x-api-key": "wrong"}, messages=[USER]).status_code == 401
    refused = post(server, "/v1/messages", messages=[USER], max_tokens=2)
    assert refused.json()["type"] == "error"
    assert refused.json()["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=1, messages=[USER])
    for headers in (KEY, {"Authorization": "Bearer other"}):
        assert post(server, "/v1/messages", headers=headers, messages=[USER], max_tokens=2).status_code == 200


def test_a_stream_that_fails_says_so(server, llm, monkeypatch):
    def broken(batch, most):
        raise RuntimeError("injected")

    for path, body, kind in (
        ("/v1/messages", {"messages": [USER], "max_tokens": 50}, "error"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 50}, "error"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(llm.engine.runner, "decode", broken)
            answer = post(server, path, headers=KEY, stream=True, **body)
        last = answer.text.strip().split("\n\n")[-1]
        assert last.startswith(f"event: {kind}\n")
        assert json.loads(last.partition("data: ")[2])["type"] == "error"
        wait_until(lambda: idle(server))


def test_history_is_bounded():
    history = ResponseHistory(max_bytes=1000)
    for at in range(50):
        history.put("me", f"r{at}", [{"role": "user", "content": "x" * 60}])
        history.get("me", "r0")
    assert history.get("me", "r0")
    assert history.get("me", "r30") is None
    assert history.get("you", "r0") is None
    history.put("me", "long", [{"role": "user", "content": "x" * 2000}])
    assert history.get("me", "long") is None
    assert history.get("me", "r0"), "what is too large drops nothing else"
    for _ in range(100):
        history.put("me", "again", [{"role": "user", "content": "x" * 300}])
    assert history._size == sum(map(len, history._known.values())) <= 1000


def test_documents_are_text(claude, server):
    document = {
        "type": "document",
        "title": "Notes",
        "source": {"type": "text", "media_type": "text/plain", "data": "abc"},
    }
    counted = httpx.post(
        server.url + "/v1/messages/count_tokens",
        headers=KEY,
        json={"messages": [{"role": "user", "content": [document]}]},
    )
    plain = httpx.post(
        server.url + "/v1/messages/count_tokens",
        headers=KEY,
        json={"messages": [{"role": "user", "content": "Notes\n\nabc"}]},
    )
    assert counted.json() == plain.json()

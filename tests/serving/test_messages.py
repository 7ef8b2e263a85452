"""Messages as clients send them, and what chat templates get of them: nothing is lost without an error."""

import contextlib
import json

import httpx
import pytest

from tests.serving.servers import post, running

QWEN = (  # of Qwen2.5: a role that is not among these leaves no trace
    "{% for m in messages %}{% if m.role in ('user', 'system') or (m.role == 'assistant' and not m.tool_calls) %}"
    "[{{ m.role }}]{{ m.content }}"
    "{% elif m.role == 'assistant' %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% elif m.role == 'tool' %}[user]{{ m.content }}{% endif %}{% endfor %}"
)
DEVELOPER = (
    "{% for m in messages %}{% if m.role in ('developer', 'user') %}[{{ m.role }}]{{ m.content }}{% endif %}"
    "{% endfor %}"
)
ITEMS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{% for name, value in call.function.arguments.items() %}{{ call.function.name }}:{{ name }}={{ value }};"
    "{% endfor %}{% endfor %}{% endfor %}"
)
STRINGS = (  # of DeepSeek-V3
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name + call.function.arguments }}{% endfor %}{% endfor %}"
)
FIRST_SYSTEM = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') or loop.first %}[{{ m.role }}]{{ m.content }}"
    "{% endif %}{% endfor %}"
)
THINKS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content.split('|')[-1] }}{% endfor %}"
)
PICKY = (
    "{% for m in messages %}{% if m.content == 'w5' %}[{{ m.role }}]w5"
    "{% elif m.role != 'tool' %}{{ 1 + 'a' }}{% endif %}{% endfor %}"
)
USER = {"role": "user", "content": "w5"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Paris", "n": 2}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "w8"}


@pytest.fixture(scope="module")
def server(llm):
    with running(llm) as one:
        yield one


@contextlib.contextmanager
def template(llm, source):
    before, llm.chat_template = llm.chat_template, source
    try:
        yield
    finally:
        llm.chat_template = before


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (QWEN, [{"role": "developer", "content": "w9"}, USER], "[system]w9[user]w5"),
        (QWEN, [USER, {"role": "developer", "content": "w9"}, USER], "[user]w5[system]w9[user]w5"),
        (DEVELOPER, [{"role": "developer", "content": "w9"}, USER], "[developer]w9[user]w5"),
        (QWEN, [USER, CALL, RESULT], '[user]w5[assistant]look{"city": "Paris", "n": 2}[user]w8'),
        (ITEMS, [USER, CALL, RESULT], "[user]w5[assistant]look:city=Paris;look:n=2;[tool]w8"),
        (STRINGS, [USER, CALL, RESULT], '[user]w5[assistant]look{"city": "Paris", "n": 2}[tool]w8'),
        (
            THINKS,
            [USER, {"role": "assistant", "content": "w6", "reasoning_content": "w7"}],
            "[user]w5[assistant](w7)w6",
        ),
        (THINKS, [USER, {"role": "assistant", "content": "w6", "reasoning": "w7"}], "[user]w5[assistant](w7)w6"),
        # Of an earlier answer some leave out what was thought: the message is still there.
        (THINKS, [USER, {"role": "assistant", "content": "w7|w6"}], "[user]w5[assistant]w6"),
        (
            QWEN,
            [{"role": "user", "content": [{"type": "text", "text": "w5"}, {"type": "text", "text": "w6"}]}],
            "[user]w5\nw6",
        ),
        (QWEN, [USER, {"role": "assistant", "content": ""}, USER], "[user]w5[assistant][user]w5"),
        # Looks at what is said, so that marks cannot stand for it.
        (PICKY, [USER, USER], "[user]w5[user]w5"),
    ],
)
def test_what_templates_get(server, source, messages, text):
    with template(server.llm, source):
        tokens = post(server, "/tokenize", messages=messages).json()["tokens"]
        assert tokens == server.llm.tokenizer.encode(text, add_special_tokens=False)
        assert post(server, "/v1/chat/completions", messages=messages, max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    ("source", "messages", "param", "message"),
    [
        (
            QWEN,
            [USER, {"role": "function", "name": "f", "content": "w8"}],
            "messages[1].role",
            "role 'function' here",
        ),
        (
            FIRST_SYSTEM,
            [USER, {"role": "system", "content": "w9"}, USER],
            "messages[1].role",
            "role 'system' here",
        ),
        (FIRST_SYSTEM, [USER, {"role": "developer", "content": "w9"}], "messages[1].role", "role 'system' here"),
        (DEVELOPER, [{"role": "system", "content": "w9"}, USER], "messages[0].role", "role 'system' here"),
        # What another message says as well is no trace of this one.
        (DEVELOPER, [{"role": "system", "content": "w5"}, USER], "messages[0].role", "role 'system' here"),
        (THINKS, [USER, CALL, RESULT], "messages[1].tool_calls", "does not write tool calls"),
        (PICKY, [USER, {"role": "tool", "content": "w77"}], "messages[1].role", "role 'tool' here"),
    ],
)
def test_what_would_be_lost_is_refused(server, source, messages, param, message):
    with template(server.llm, source):
        for path in ("/v1/chat/completions", "/tokenize"):
            reply = post(server, path, messages=messages)
            error = reply.json()["error"]
            assert reply.status_code == 400
            assert error["param"] == param
            assert error["message"].startswith(f"{param}: this model's chat template does not")
            assert message in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "msg_1", "annotations": [], "refusal": None, "audio": None, "function_call": None, "tool_calls": None},
        {"reasoning_content": None, "reasoning": "", "reasoning_details": [], "thinking_blocks": None, "parsed": None},
        {"provider_specific_fields": {"refusal": None}, "images": [], "name": "a", "refusal": "", "tool_calls": []},
        {"content": [{"type": "text", "text": "w6", "cache_control": {"type": "ephemeral"}, "annotations": []}]},
    ],
)
def test_fields_that_say_nothing(server, fields):
    plain = [USER, {"role": "assistant", "content": "w6"}, USER]
    given = [USER, {"role": "assistant", "content": "w6", **fields}, USER]
    same = {"temperature": 0, "max_tokens": 5}
    want, got = (post(server, "/v1/chat/completions", messages=one, **same).json() for one in (plain, given))
    assert got["choices"] == want["choices"]


@pytest.mark.parametrize(
    ("message", "param", "said"),
    [
        ({"role": "assistant", "content": "w6", "audio": {"id": "a"}}, "messages[1].audio", "audio is not supported"),
        ({"role": "assistant", "refusal": "no"}, "messages[1].refusal", "give its text as content"),
        ({"role": "assistant", "content": "w", "annotations": [{}]}, "messages[1].annotations", "leave them out"),
        ({"role": "user", "contnt": "w6"}, "messages[1].contnt", "did you mean 'content'?"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content[0].text", "valid string"),
        ({"role": "user", "content": [{"type": "file"}]}, "messages[1].content[0]", "a part of type 'file'"),
        ({"role": "boss", "content": "w6"}, "messages[1].role", "Input should be 'system', 'developer'"),
        ({"content": "w6"}, "messages[1].role", "Field required"),
        ("w6", "messages[1]", "Input should be a valid dictionary"),
    ],
)
def test_an_error_names_message_and_field(server, message, param, said):
    error = post(server, "/v1/chat/completions", messages=[USER, message]).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith("messages[1]")
    assert said in error["message"]


def test_numbers_as_other_servers_take_them(server):
    common = {"prompt": "w5 w6", "temperature": 0, "ignore_eos": True}
    whole, real = (post(server, **common, max_tokens=n, logprobs=n - 6) for n in (8, 8.0))
    assert real.json()["choices"] == whole.json()["choices"]
    to_the_end = post(server, **common | {"prompt": [5] * 1990}, max_tokens=-1).json()
    assert to_the_end["usage"]["completion_tokens"] == 10
    chat = {"messages": [{"role": "user", "content": "w5 " * 1990}], "ignore_eos": True}
    for name in ("max_tokens", "max_completion_tokens"):
        assert post(server, "/v1/chat/completions", **chat, **{name: -1}).json()["usage"]["completion_tokens"] == 10
    greedy = post(server, **common, max_tokens=8).json()["choices"]
    assert post(server, **common | {"temperature": 2}, top_p=0, max_tokens=8).json()["choices"] == greedy


def test_a_prediction_is_refused_with_the_truth(server):
    error = post(server, prompt="w5", prediction={"type": "content", "content": "w6"}).json()["error"]
    assert "--speculative lookup" in error["message"]
    assert "nothing is decoded speculatively" not in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_in_every_event(server, path):
    prompt = {"prompt": "w5 w6"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "w5 w6"}]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"max_tokens": 12, "ignore_eos": True, "stream": True, "stream_options": options}
    text = httpx.post(server.url + path, json=prompt | body, timeout=30).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert all(event["usage"]["prompt_tokens"] == 2 for event in events)
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert counts[0] < 12

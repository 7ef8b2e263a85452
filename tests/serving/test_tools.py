"""Tools, structured answers and reasoning, through OpenAI's client."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import jsonschema
import openai
import pytest

from snapstream.serving.settings import ServerSettings
from tests.bytelevel import MERGES, save_model
from tests.engine.test_engine import make
from tests.serving.servers import idle, post, running, wait_until

TEMPLATE = (
    "{% if tools %}[{% for tool in tools %}{{ tool | tojson }}{% endfor %}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}{% endfor %}<assistant>{# reasoning #}"
)
THINKING = TEMPLATE + "{% if enable_thinking %}<think>\n{% endif %}"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def tool(name, schema=None, **more):
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema or SCHEMA} | more}


TOOLS = [tool("save"), tool("look_up", {"type": "object", "properties": {}, "additionalProperties": False})]
ASKED = [{"role": "user", "content": "What is the weather?"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    directory = save_model(tmp_path_factory.mktemp("bytes"), MERGES)
    made = make(directory, 64, max_model_len=3000, slots=3, sessions=2, speculative="lookup")
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def server(llm):
    with running(llm) as one:
        yield one


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as one:
        yield one


def chat(client, **body):
    return client.chat.completions.create(
        model="tiny", **({"messages": ASKED, "max_tokens": 300, "temperature": 0} | body)
    )


def joined(events):
    """What a stream has said: text, reasoning, calls, and why it ended."""
    text, reasoning, calls, reason = "", "", [], None
    for event in events:
        for choice in event.choices:
            delta = choice.delta
            text += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
            for part in delta.tool_calls or []:
                if part.id:
                    assert part.index == len(calls)
                    assert part.type == "function"
                    calls.append([part.function.name, ""])
                assert part.index == len(calls) - 1
                calls[-1][1] += part.function.arguments or ""
            reason = choice.finish_reason or reason
    return text, reasoning, calls, reason


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "save"}}])
def test_a_call_that_is_required(client, choice, temperature):
    for seed in range(4):
        body = {"tools": TOOLS, "tool_choice": choice, "temperature": temperature, "seed": seed}
        answer = chat(client, **body).choices[0]
        (call,) = answer.message.tool_calls
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        assert call.id.startswith("call_")
        assert call.function.name in ("save", "look_up") if choice == "required" else call.function.name == "save"
        schema = next(
            each["function"]["parameters"] for each in TOOLS if each["function"]["name"] == call.function.name
        )
        jsonschema.validate(json.loads(call.function.arguments), schema)
        text, _, calls, reason = joined(chat(client, stream=True, **body))
        assert (text, calls, reason) == ("", [[call.function.name, call.function.arguments]], "tool_calls")


def test_several_calls_and_several_answers(client):
    body = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": True, "n": 2, "temperature": 1, "seed": 3}
    answer = chat(client, **body)
    for choice in answer.choices:
        assert choice.message.tool_calls
        for call in choice.message.tool_calls[: None if choice.finish_reason == "tool_calls" else -1]:
            json.loads(call.function.arguments)
    assert answer.usage.completion_tokens > 0


def test_calls_and_their_results_go_back_to_the_model(client, server):
    call = {"id": "call_1", "type": "function", "function": {"name": "save", "arguments": '{"name": "a", "age": 3}'}}
    history = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    history.append({"role": "tool", "tool_call_id": "call_1", "content": "saved"})
    answer = chat(client, messages=history, tools=TOOLS, max_tokens=5)
    assert answer.choices[0].finish_reason in ("length", "stop")
    shown = httpx.post(server.url + "/tokenize", json={"messages": history, "tools": TOOLS}).json()
    without = httpx.post(server.url + "/tokenize", json={"messages": history}).json()
    assert shown["count"] > without["count"] + 100
    assert (
        chat(client, messages=history, tools=TOOLS, tool_choice="none", max_tokens=5).usage.prompt_tokens
        == without["count"]
    )
    assert answer.usage.prompt_tokens == shown["count"]


def test_a_template_without_tools_gets_them_in_words(llm, server, client):
    llm.chat_template = PLAIN
    try:
        call = {"id": "1", "type": "function", "function": {"name": "save", "arguments": '{"name": "a", "age": 3}'}}
        results = [
            {"role": "tool", "tool_call_id": "1", "content": "saved"},
            {"role": "tool", "tool_call_id": "2", "content": "twice"},
        ]
        history = [
            {"role": "system", "content": "Be brief."},
            *ASKED,
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        history += results
        shown = httpx.post(server.url + "/tokenize", json={"messages": history, "tools": TOOLS}).json()
        text = llm.tokenizer.decode(shown["tokens"])
        assert text.startswith("<system>Be brief.\n\n# Tools")
        assert '"name": "look_up"' in text
        assert (
            '<assistant><tool_call>\n{"name": "save", "arguments": {"name": "a", "age": 3}}\n</tool_call><user>' in text
        )
        assert "<tool_response>\nsaved\n</tool_response>\n<tool_response>\ntwice\n</tool_response><assistant>" in text
        answer = chat(client, messages=history, tools=TOOLS, tool_choice="required").choices[0]
        assert answer.message.tool_calls[0].function.name in ("save", "look_up")
    finally:
        llm.chat_template = TEMPLATE


def test_strict_tools_may_be_left_alone(client):
    answer = chat(client, tools=[tool("save", strict=True)], max_tokens=30, temperature=1, seed=5).choices[0]
    assert answer.finish_reason in ("length", "stop", "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"extra_body": {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}},
        {"extra_body": {"guided_json": json.dumps(SCHEMA)}},
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            "tools": [],
            "n": 2,
        },
    ],
)
def test_answers_fit_their_schema(client, body, stream):
    if stream:
        events = list(chat(client, stream=True, **body))
        texts = {}
        for event in events:
            for choice in event.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        texts = list(texts.values())
    else:
        texts = [choice.message.content for choice in chat(client, **body).choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_shapes_of_plain_completions(client):
    def complete(**body):
        return client.completions.create(model="tiny", prompt="abc", max_tokens=300, temperature=0, **body).choices[0]

    assert complete(extra_body={"guided_choice": ["abcabc", "no"]}).text in ("abcabc", "no")
    assert complete(extra_body={"guided_regex": "(ab){3}c"}).text == "abababc"
    assert complete(extra_body={"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}).text in ("x", "y")
    assert complete(extra_body={"guided_grammar": 'start: "x" "y"'}).text == "xy"
    schema = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    jsonschema.validate(json.loads(complete(extra_body={"response_format": schema}).text), SCHEMA)
    stopped = complete(extra_body={"guided_regex": "ababab"}, stop=["ba"])
    assert (stopped.text, stopped.finish_reason) == ("a", "stop")


def test_any_object(client):
    answer = chat(client, response_format={"type": "json_object"}, max_tokens=400, temperature=1, seed=2).choices[0]
    assert answer.message.content.startswith("{")
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)


def test_logprobs_of_structured_answers(client):
    body = {"extra_body": {"guided_choice": ["abcabcabc"]}, "logprobs": True, "top_logprobs": 1}
    answer = chat(client, **body).choices[0]
    assert "".join(one.token for one in answer.logprobs.content) == "abcabcabc"
    events = list(chat(client, stream=True, **body))
    tokens = [
        one.token
        for event in events
        for choice in event.choices
        for one in (choice.logprobs and choice.logprobs.content) or []
    ]
    assert "".join(tokens) == "abcabcabc"


def test_a_session_goes_on_after_a_structured_answer(client):
    extra = {"session_id": "one", "guided_choice": ["abcabc"]}
    first = chat(client, extra_body=extra)
    history = [*ASKED, {"role": "assistant", "content": "abcabc"}, {"role": "user", "content": "And now?"}]
    second = chat(client, messages=history, extra_body=extra | {"guided_choice": ["no"]})
    assert second.choices[0].message.content == "no"
    assert second.session["kept"]
    assert first.usage.prompt_tokens < second.usage.prompt_tokens


def test_templates_that_know_no_thinking_are_not_told(client):
    body = {"extra_body": {"guided_choice": ["yes"], "enable_thinking": True, "reasoning_effort": "low"}}
    text = chat(client, **body).choices[0].message
    assert text.content == "yes"
    assert getattr(text, "reasoning_content", None) is None


def test_a_model_that_reasons(tmp_path_factory):
    """The prompt ends in the reasoning, whose end is a stop for the shape: the answer comes after it."""
    directory = save_model(tmp_path_factory.mktemp("thinking"), MERGES)
    llm = make(directory, 64, max_model_len=3000, slots=2)
    llm.chat_template = (
        "{{ messages[-1].content }}{% if enable_thinking is not defined or enable_thinking %}<think>\n"
        "{% else %}<think>\n\n</think>\n\n{% endif %}"
    )
    with running(llm) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        answer = chat(client, max_tokens=40).choices[0].message
        assert answer.reasoning_content
        assert answer.reasoning == answer.reasoning_content
        assert answer.content == ""
        text, reasoning, _, _ = joined(chat(client, max_tokens=40, stream=True))
        assert (text, reasoning) == ("", answer.reasoning_content)
        off = chat(client, max_tokens=40, reasoning_effort="none").choices[0].message
        assert off.content
        assert getattr(off, "reasoning_content", None) is None
        shaped = chat(client, max_tokens=40, extra_body={"guided_choice": ["yes"], "enable_thinking": False})
        assert shaped.choices[0].message.content == "yes"
        history = [*ASKED, {"role": "assistant", "content": "x", "reasoning_content": "y"}, *ASKED]
        with pytest.raises(openai.BadRequestError, match="does not write"):
            chat(client, messages=history, max_tokens=3)  # this template shows only the last message


def test_reasoning_can_stay_in_the_text(tmp_path_factory):
    with pytest.raises(Exception, match="reasoning_parser"):
        ServerSettings("x", reasoning_parser="nonsense")


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"tool_choice": "required"}, "there are no tools", "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "no tool named 'x'",
            "tool_choice",
        ),
        ({"tools": [tool("a"), tool("a")]}, "two tools named 'a'", "tools[1].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools are functions here", "tools[0]"),
        ({"tools": [tool("a b")]}, "pattern", "tools[0].function.name"),
        ({"tools": [tool("a", {"type": "string", "format": "x"})], "tool_choice": "required"}, "format: x", None),
        ({"response_format": {"type": "xml"}}, "response_format.type", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "give a schema", "response_format.json_schema"),
        ({"structured_outputs": {}}, "nothing was given", "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "x"}}, "json and regex was given", "structured_outputs"),
        ({"structured_outputs": {"structural_tag": {}}}, "'structural_tag' is not supported", "structured_outputs"),
        ({"guided_json": {}, "guided_regex": "x"}, "guided_json and guided_regex were given", "guided_json"),
        ({"guided_regex": "("}, "the regular expression cannot be used", None),
        ({"guided_json": {"type": "string", "format": "x"}}, "Unknown format: x", None),
        ({"guided_choice": []}, "one or more strings", "guided_choice"),
        ({"guided_grammar": "start: nothing"}, "the grammar cannot be used", None),
        ({"functions": [{"name": "x"}]}, "use tools", "functions"),
        ({"tools": [tool("a", {"properties": ["x"]})]}, "it must map names", "tools[0].function.parameters.properties"),
        ({"tools": [tool("a", {"required": True})]}, "it must be a list", "tools[0].function.parameters.required"),
        ({"tools": TOOLS, "guided_json": "no json"}, "the json is invalid", None),
        ({"tools": TOOLS, "guided_grammar": "root ::= ("}, "invalid", None),
    ],
)
def test_bad_requests(server, body, message, param):
    answer = post(server, "/v1/chat/completions", messages=ASKED, max_tokens=5, **body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param
    assert idle(server)


def test_requests_with_and_without_shapes_together(client, server):
    """What one asks for does not change what others get."""
    kinds = [
        {"max_tokens": 40},
        {"extra_body": {"guided_regex": "(ab|c1){9}"}},
        {"tools": TOOLS, "tool_choice": "required"},
        {"max_tokens": 40, "temperature": 0.8, "seed": 4},
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            "temperature": 1,
            "seed": 9,
        },
    ]

    def said(body):
        message = chat(client, **body).choices[0].message
        return message.content, [call.function for call in message.tool_calls or []]

    alone = [said(body) for body in kinds]
    with ThreadPoolExecutor(10) as pool:
        together = list(pool.map(said, kinds * 4))
    assert together == alone * 4
    wait_until(lambda: idle(server))

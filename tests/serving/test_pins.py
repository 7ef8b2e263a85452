"""What requests pin, and what is pinned by itself: system messages and tools."""

import httpx
import pytest

from snapstream.serving.messages import Message
from tests.bytelevel import MERGES, save_model
from tests.engine.test_engine import make
from tests.serving.servers import running
from tests.serving.test_tools import PLAIN, TEMPLATE, TOOLS

SYSTEM = {"role": "system", "content": "Always answer in rhymes."}
LONG = "There once was a ship that put to sea. " * 8
ASKED = [SYSTEM, {"role": "user", "content": LONG}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    directory = save_model(tmp_path_factory.mktemp("bytes"), MERGES)
    made = make(directory, 256, max_model_len=3000, slots=1, sessions=2, context_bytes=2**20)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def server(llm):
    with running(llm) as one:
        yield one


def ask(server, route="chat/completions", **body):
    body = {"max_tokens": 4, "temperature": 0} | body
    if route == "completions":
        body.setdefault("prompt", LONG)
    elif route != "responses":
        body.setdefault("messages", ASKED)
    return httpx.post(f"{server.url}/v1/{route}", json=body, timeout=60)


def pinned(server, llm, text, *args, **body):
    """The texts that a request pins; ``text`` is its prompt's."""
    answer = ask(server, *args, **body)
    assert answer.status_code == 200, answer.text
    slot = httpx.get(f"{server.url}/v1/cache").json()["slots"][0]
    tokens = llm.engine.texts.encode(text, special=False).tokens
    return [llm.tokenizer.decode(tokens[start:end]) for start, end in slot["pin"]]


def rendered(llm, messages=ASKED, tools=None):
    return llm.chat_text(messages, None, tools and [tool | {"function": shown(tool["function"])} for tool in tools])


def shown(function):
    return {key: value for key, value in function.items() if key != "strict"}


@pytest.mark.parametrize("default", [{}, {"pin": True}, {"pin": None}, {"pin": ["system", "tools"]}])
def test_system_messages_and_tools_are_pinned(server, llm, default):
    assert pinned(server, llm, rendered(llm), **default) == ["<system>Always answer in rhymes."]
    system, tools = pinned(server, llm, rendered(llm, tools=TOOLS), tools=TOOLS, **default)
    assert system.endswith("<system>Always answer in rhymes.")
    assert '"save"' in tools
    assert '"look_up"' in tools
    assert tools.count("{") == tools.count("}")
    assert pinned(server, llm, rendered(llm, ASKED[1:]), messages=ASKED[1:], **default) == []


def test_nothing_is_pinned_on_request(server, llm):
    for nothing in (False, []):
        assert pinned(server, llm, rendered(llm), pin=nothing) == []


def test_tools_that_are_shown_none_of(server, llm):
    assert pinned(server, llm, rendered(llm), tools=TOOLS, tool_choice="none") == ["<system>Always answer in rhymes."]


def test_what_is_asked_for_in_its_order(server, llm):
    messages = [*ASKED, {"role": "assistant", "content": "Aye."}, {"role": "user", "content": "Sail on."}]
    body = {"messages": messages, "pin": [-1, 2, "system", {"text": "sea"}, [3, 5], "0:2"]}
    text = rendered(llm, messages)
    last, aye, system, *seas, tokens, start = pinned(server, llm, text, **body)
    assert (last, aye) == ("Sail on.", "Aye.")
    assert system.endswith("rhymes.")
    assert {*seas} == {"sea"}
    assert len(seas) == text.count("sea")
    ids = llm.engine.texts.encode(text, special=False).tokens
    assert (tokens, start) == (llm.tokenizer.decode(ids[3:5]), llm.tokenizer.decode(ids[:2]))


def test_plain_prompts(server, llm):
    assert pinned(server, llm, LONG, "completions") == []
    assert pinned(server, llm, LONG, "completions", pin=True) == []
    assert pinned(server, llm, LONG, "completions", pin=[{"text": "once was"}, [0, 4]]) == ["once was"] * 8 + [LONG[:4]]
    ids = llm.engine.texts.encode(LONG, special=False).tokens
    assert pinned(server, llm, LONG, "completions", prompt=ids, pin=["2:9"]) == [llm.tokenizer.decode(ids[2:9])]
    xargs = {"vllm_xargs": {"pin": ["2:9", "0:3"]}}
    assert len(pinned(server, llm, LONG, "completions", **xargs)) == 2
    assert len(pinned(server, llm, LONG, "completions", vllm_xargs={"pin": "2:9"})) == 1


def test_the_other_apis(server, llm):
    asked = {"messages": ASKED[1:], "system": SYSTEM["content"]}
    assert pinned(server, llm, rendered(llm), "messages", **asked) == ["<system>Always answer in rhymes."]
    assert pinned(server, llm, rendered(llm), "messages", **asked, pin=False) == []
    asked = {"input": LONG, "instructions": SYSTEM["content"], "max_output_tokens": 4, "max_tokens": None}
    assert pinned(server, llm, rendered(llm), "responses", **asked) == ["<system>Always answer in rhymes."]
    assert pinned(server, llm, rendered(llm), "responses", **asked, pin=[{"text": "ship"}])[0] == "ship"


def test_a_template_without_tools_has_them_in_the_system_message(server, llm):
    llm.chat_template = PLAIN
    try:
        with running(llm, tool_parser="hermes") as one:
            (system,) = pinned(one, llm, "", tools=TOOLS)
            slot = httpx.get(f"{one.url}/v1/cache").json()["slots"][0]
            assert slot["pin"][0][1] > 300  # the description of the tools
            assert pinned(one, llm, "", tools=TOOLS, pin=["tools"]) == [system]
            assert len(pinned(one, llm, "", tools=TOOLS, pin=[1])) == 1
            calls = [{"id": "a", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}]
            messages = [
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": "two", "tool_calls": calls},
                {"role": "tool", "tool_call_id": "a", "content": "three"},
                {"role": "user", "content": "four"},
            ]
            places = {0: "one", 1: "two", 2: "three", 3: "four"}
            for number, word in places.items():  # results and what follows are one message
                asked = {"messages": messages, "tools": TOOLS, "pin": [number]}
                assert ask(one, **asked).status_code == 200
                start, end = httpx.get(f"{one.url}/v1/cache").json()["slots"][0]["pin"][0]
                whole = llm.chat_text(
                    one.parts.reader._layouts.apply(
                        [Message.model_validate(each) for each in messages], None, TOOLS, one.parts.reader._describe
                    ).messages
                )
                tokens = llm.engine.texts.encode(whole, special=False).tokens
                assert word in llm.tokenizer.decode(tokens[start:end])
                assert "look_up" not in llm.tokenizer.decode(tokens[start:end]) or number == 1
    finally:
        llm.chat_template = TEMPLATE


def test_sessions_keep_what_was_pinned(server, llm):
    first = ask(server, session_id="ship").json()["choices"][0]["message"]
    more = [*ASKED, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "Go on."}]
    answer = ask(server, session_id="ship", messages=more, pin=[-1]).json()
    assert answer["session"]["reused_tokens"] > 300
    slot = httpx.get(f"{server.url}/v1/cache").json()["slots"][0]
    (last, stop), (start, end) = slot["pin"]
    assert start == 0
    text = rendered(llm, ASKED)
    assert llm.tokenizer.decode(llm.engine.texts.encode(text, special=False).tokens[start:end]).endswith("rhymes.")
    assert stop - last == len(llm.engine.texts.encode("Go on.", special=False).tokens)
    assert stop <= slot["seen"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"pin": [7]}, "there is no message 7; there are 2 messages"),
        ({"pin": [-3]}, "there is no message -3"),
        ({"pin": [{"text": "whale"}]}, "the text 'whale' stands nowhere in the prompt"),
        ({"pin": [{"text": "a"}], "messages": [{"role": "user", "content": "a" * 300}]}, "stands 3"),
        ({"pin": [{"text": "sea"}, {"text": "to"}, *[[i, i + 1] for i in range(250)]]}, "at most 256 are allowed"),
        ({"pin": [[0, 9999]]}, r"the span [0, 9999] ends after the prompt"),
        ({"pin": [[5, 5]]}, "ends after its start"),
        ({"pin": ["9:3"]}, "ends after its start"),
        ({"pin": ["rules"]}, "pin"),
        ({"pin": [{"text": ""}]}, "pin"),
        ({"pin": [[1, 2, 3]]}, "pin"),
        ({"pin": 3}, "pin"),
        ({"pin": [0] * 257}, "pin"),
        ({"pin": [1], "messages": [SYSTEM, {"role": "user", "content": ""}]}, "message 1 is empty"),
    ],
)
def test_bad_pins_in_conversations(server, body, message):
    answer = ask(server, **body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"].startswith("pin")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"pin": ["system"]}, "'system' is a part of a conversation"),
        ({"pin": [0]}, "0 is a part of a conversation"),
        ({"pin": [{"text": "x"}], "prompt": [5, 6, 7]}, "this prompt is token ids"),
        ({"pin": [[0, 4]], "prompt": [5, 6, 7]}, "which has 3 tokens"),
    ],
)
def test_bad_pins_in_plain_prompts(server, body, message):
    answer = ask(server, "completions", **body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_conversations_are_looked_at_once(server, llm, monkeypatch):
    """Where system message and tools stand is known from the turn before, however long the conversation is."""
    ask(server, tools=TOOLS)
    rendered = []
    original = llm.chat_text
    monkeypatch.setattr(
        llm, "chat_text", lambda messages, *rest: rendered.append(len(messages)) or original(messages, *rest)
    )
    more = [*ASKED, {"role": "assistant", "content": "Aye."}, {"role": "user", "content": "Go on."}]
    ask(server, tools=TOOLS, messages=more)
    assert rendered.count(4) == 2  # for the prompt, and to see that no message is lost


def read(server, **body):
    answer = httpx.post(f"{server.url}/v1/contexts", json={"text": LONG} | body, timeout=60)
    return answer.json()["id"] if answer.status_code == 200 else answer.json()["error"]["message"]


def test_contexts_keep_what_is_pinned(server, llm):
    """Also for the questions about them."""
    system = read(server, system=SYSTEM["content"])
    text = read(server, pin=[{"text": "put to sea"}], kv_budget=128)
    nothing = read(server, system=SYSTEM["content"], pin=False)
    asked = [{"role": "user", "content": "Where did it go?"}]
    pins = {}
    for name in (system, text, nothing):
        answer = ask(server, messages=asked, context_id=name)
        assert answer.status_code == 200, answer.text
        pins[name] = httpx.get(f"{server.url}/v1/cache").json()["slots"][0]["pin"]
    opened = llm.chat_text([SYSTEM, {"role": "user", "content": "X"}]).partition("X")[0]
    assert pins[system] == [[0, len(llm.engine.texts.encode(opened, special=False).tokens)]]
    assert len(pins[text]) == LONG.count("put to sea")
    assert pins[nothing] == []
    assert "the text 'whale' stands nowhere in the prompt" in read(server, pin=[{"text": "whale"}])
    answer = ask(server, messages=asked, context_id=system, pin=[0])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "pin"
    assert "0 is a part of a conversation" in read(server, pin=[0])

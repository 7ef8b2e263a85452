"""The page in a real browser: system messages, tools, schemas, reasoning, and what is pinned."""

import json

import httpx
import pytest

from tests.bytelevel import MERGES, save_model
from tests.engine.test_engine import make
from tests.serving.servers import running
from tests.serving.test_tools import TEMPLATE

CALL = {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    made = make(save_model(tmp_path_factory.mktemp("bytes"), MERGES), 256, max_model_len=4000, slots=1)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def page(browser, llm):
    with running(llm) as server:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.problems, page.sent, page.server = [], [], server
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on(
            "request", lambda request: page.sent.append(request.post_data_json) if request.method == "POST" else None
        )
        page.goto(server.url)
        page.get_by_text("tiny: up to").wait_for()
        page.get_by_text("System message, tools, schema").click()
        yield page
        assert not page.problems
        page.close()


def changed(page, **fields):
    """Requests that have other fields than the page gives them."""

    def change(route):
        route.continue_(post_data=json.dumps(route.request.post_data_json | fields))

    page.route("**/v1/chat/completions", change)


def says(page, *deltas, finish="stop"):
    """A server that says something else."""
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


def ask(page, text="What is the weather in Paris?"):
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


def test_a_call_and_its_result(page):
    # The most likely strings of a random model may never end.
    changed(page, tool_choice="required", max_tokens=2000, temperature=1.0, seed=0)
    page.get_by_role("button", name="Insert a tool").click()
    assert json.loads(page.get_by_label("Tools, in").input_value())[0]["function"]["name"] == "get_weather"
    page.get_by_label("System message", exact=True).fill("Be brief.")
    ask(page)
    call = page.locator(".message.assistant .call")
    call.wait_for()
    page.get_by_label("Result of get_weather").fill("sunny, 21 degrees")
    name, _, given = call.inner_text().partition(" ")
    assert name == "get_weather"
    assert {*json.loads(given)} == {"city", "unit"}
    page.unroute("**/v1/chat/completions")
    changed(page, tool_choice="none", max_tokens=5)
    page.get_by_role("button", name="Send results").click()
    page.locator(".message.tool", has_text="sunny, 21 degrees").wait_for()
    page.locator("#figures", has_text="5 generated").wait_for()
    system, user, assistant, result = page.sent[-1]["messages"]
    assert (system["content"], user["role"], result["content"]) == ("Be brief.", "user", "sunny, 21 degrees")
    assert result["tool_call_id"] == assistant["tool_calls"][0]["id"]
    assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == json.loads(given)
    assert page.locator(".results").count() == 0


def test_a_call_without_a_result(page):
    """A next message takes the place of the results."""
    says(
        page,
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]},
        finish="tool_calls",
    )
    ask(page)
    page.get_by_label("Result of f").wait_for()
    page.unroute("**/v1/chat/completions")
    changed(page, max_tokens=3)
    ask(page, "Never mind.")
    page.locator("#figures", has_text="3 generated").wait_for()
    assert page.locator(".results").count() == 0
    assert [message["role"] for message in page.sent[-1]["messages"]] == ["user", "assistant", "user"]


def test_results_come_back_after_an_error(page):
    says(
        page,
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]},
        finish="tool_calls",
    )
    ask(page)
    page.get_by_label("Result of f").fill("one")
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.get_by_role("button", name="Send results").click()
    page.get_by_role("alert").wait_for()
    assert page.get_by_label("Result of f").input_value() == "one"
    page.get_by_label("Result of f").fill("two")
    page.unroute("**/v1/chat/completions")
    changed(page, max_tokens=3)
    page.get_by_role("button", name="Send results").click()
    page.locator("#figures", has_text="3 generated").wait_for()
    assert page.get_by_role("alert").is_hidden()
    assert [message["role"] for message in page.sent[-1]["messages"]] == ["user", "assistant", "tool"]
    assert page.locator(".message.tool").all_inner_texts()[0].endswith("two")


def test_an_answer_fits_the_schema(page):
    changed(page, max_tokens=500)
    page.get_by_role("button", name="Insert a schema").click()
    example = page.get_by_label("Schema of the answer").input_value()
    assert {*json.loads(example)["properties"]} == {"city", "population", "capital"}
    schema = {"type": "object", "properties": {"capital": {"type": "boolean"}}, "required": ["capital"]}
    page.get_by_label("Schema of the answer").fill(json.dumps(schema))
    page.get_by_role("button", name="Insert a schema").click()  # what is there stays
    ask(page)
    page.locator("#figures", has_text="generated").wait_for()
    said = json.loads(page.locator(".message.assistant .body").text_content())
    assert isinstance(said["capital"], bool)


@pytest.mark.parametrize("box", ["Tools, in", "Schema of the answer"])
def test_what_is_no_json_is_not_sent(page, box):
    page.get_by_label(box).fill('{"type": ')
    ask(page)
    page.get_by_role("alert").filter(has_text=box).wait_for()
    assert page.evaluate("document.activeElement.labels[0].textContent").startswith(box)
    assert not page.sent
    assert page.get_by_label("Message", exact=True).input_value() == "What is the weather in Paris?"


def test_what_the_server_refuses_is_said(page):
    page.get_by_label("Tools, in").fill("[3]")
    ask(page)
    page.get_by_role("alert").filter(has_text="tools").wait_for()
    assert page.locator(".message").count() == 0


def test_reasoning_is_folded(page):
    thought = "First, I look at the map. " * 10
    says(page, {"role": "assistant"}, {"reasoning_content": thought}, {"content": " It is "}, {"content": "sunny."})
    ask(page)
    page.locator(".message.assistant .body", has_text="It is sunny.").wait_for()
    page.get_by_text("Reasoning, 260 characters").wait_for()
    assert page.get_by_text("First, I look").is_hidden()
    page.get_by_text("Reasoning, 260 characters").click()
    assert page.get_by_text("First, I look").is_visible()


def test_what_is_pinned_is_underlined(page):
    changed(page, max_tokens=4)
    page.get_by_label("System message", exact=True).fill("Always answer in rhymes.")
    ask(page, "There once was a ship that put to sea. " * 20)
    page.locator("#figures", has_text="generated").wait_for()
    page.get_by_text("1 slot free, 1 of them used before").click()
    strip = page.locator(".slot svg.strip").first
    (start, end), slot = slot_pins(page)
    assert f"what is pinned is underlined: {end - start} tokens" in strip.get_attribute("aria-label")
    width = float(strip.locator(".pin").get_attribute("width"))
    assert width == pytest.approx(64 * (end - start) / (slot["seen"] - slot["generated"]))
    page.get_by_label("Pin system message and tools").uncheck()
    ask(page, "Go on.")
    page.locator("#figures", has_text="generated").wait_for()
    assert page.sent[-1]["pin"] is False
    assert page.server.llm.engine.slots()[0].pin == ()


def slot_pins(page):
    slot = httpx.get(f"{page.server.url}/v1/cache").json()["slots"][0]
    (pin,) = slot["pin"]
    return pin, slot


@pytest.mark.parametrize("width", [360, 1100, 1700])
def test_widths(page, width):
    page.set_viewport_size({"width": width, "height": 900})
    page.get_by_role("button", name="Insert a tool").click()
    page.get_by_text("Settings", exact=True).click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.get_by_role("button", name="Compare policies").click()
    page.evaluate("for (const id of ['kept', 'question-form']) document.getElementById(id).hidden = false")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    text, question, caches = (page.locator(name).bounding_box() for name in ("#text", "#question", ".caches"))
    is_beside = question["x"] > text["x"] + text["width"] and question["y"] < text["y"] + text["height"]
    assert is_beside == (width == 1700)  # the text on one side, the answers on the other
    if width == 1700:
        assert caches["y"] > text["y"] + text["height"]
        assert text["width"] > 800

"""The page in a real browser."""

import time

import httpx
import pytest

from snapstream import LLM
from snapstream.assets import TASK_MODEL
from snapstream.serving.settings import Example
from tests.serving.servers import idle, metric, post, running, wait_until


@pytest.fixture
def server(task_llm, example):
    with running(task_llm, model_name="task-model", example=Example(**example)) as one:
        yield one


@pytest.fixture(params=["light", "dark"])
def page(request, browser, server):
    context = browser.new_context(color_scheme=request.param, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    requests, problems = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.problems = problems
    page.goto(server.url)
    page.get_by_text("task-model: up to 16,384 tokens in a cache of 512 entries").wait_for()
    yield page
    assert all(url.startswith(server.url) for url in requests)  # nothing from elsewhere
    assert len(requests) > 5
    assert not page.problems
    context.close()


def ask(page, text, tokens=None, temperature=None):
    if tokens is not None:
        if not page.get_by_label("Max tokens").is_visible():
            page.get_by_text("Settings", exact=True).click()
        page.get_by_label("Max tokens").fill(str(tokens))
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


def answer(page, text):
    """What the model said; the text that was asked about may say it too."""
    return page.locator(".message.assistant .body", has_text=text)


def slow_steps(server, monkeypatch):
    """Gives a person, or a test, the time to press a button."""
    step = server.llm.engine.step
    monkeypatch.setattr(server.llm.engine, "step", lambda: (time.sleep(0.02), step())[1])


def longer_than(page, body, length):
    end = time.monotonic() + 20
    while len(body.inner_text()) <= length:
        assert time.monotonic() < end
        page.wait_for_timeout(20)


def never_ending(page):
    """Answers that go on past the end token."""

    def change(route):
        route.continue_(post_data=route.request.post_data.replace('"stream":true', '"stream":true,"ignore_eos":true'))

    page.route("**/v1/chat/completions", change)


def test_ask_about_the_example(page, server):
    page.get_by_role("button", name="Insert example").click()
    page.get_by_role("button", name="Send").click()
    answer(page, "broad vase.").wait_for()
    page.get_by_text("2,996 tokens of prompt, 4 generated").wait_for()
    page.get_by_text("4 slots free, ").click()
    slot = page.locator(".slot", has=page.get_by_text("free (last use)")).first
    slot.get_by_role("img", name="512 of 512 entries in use: 4 sinks, 444 pinned, 64 in the ring").wait_for()
    slot.get_by_role("img", name="of the prompt, 17 % was kept").wait_for()
    slot.get_by_text("768 KiB of memory; a full cache would take 4.4 MiB by now").wait_for()
    colours = page.evaluate("[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]")
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert (sum(map(int, colours[0][4:-1].split(","))) < 200) == dark
    assert (sum(map(int, colours[1][4:-1].split(","))) > 600) == dark


def test_stream_and_stop(page, server, monkeypatch):
    slow_steps(server, monkeypatch)
    never_ending(page)
    ask(page, "The guard visited the flag.", tokens=16_000)
    body = page.locator(".message.assistant .body").last
    longer_than(page, body, 30)
    longer_than(page, body, len(body.inner_text()))
    page.get_by_text("1 of 4 slots busy").wait_for()
    assert page.get_by_role("button", name="Send").is_disabled()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").wait_for()
    wait_until(lambda: idle(server))
    page.get_by_text("0 of 4 slots busy").wait_for()
    ask(page, "The porter carried the coin.", tokens=3)  # and the conversation goes on
    page.get_by_text("3 generated").wait_for()
    assert page.locator(".message").count() == 4


def test_a_new_conversation_while_an_answer_streams(page, server, monkeypatch):
    slow_steps(server, monkeypatch)
    never_ending(page)
    ask(page, "The guard visited the flag.", tokens=2_000)
    longer_than(page, page.locator(".message.assistant .body").last, 10)
    page.get_by_label("Message", exact=True).fill("a draft")
    page.get_by_role("button", name="New conversation").click()
    page.get_by_text("New conversation.").wait_for()
    wait_until(lambda: idle(server))
    assert page.locator(".message").count() == 0
    assert page.get_by_label("Message", exact=True).input_value() == "a draft"
    sent = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    ask(page, "The porter carried the coin.", tokens=3)
    page.get_by_text("3 generated").wait_for()
    assert [message["role"] for message in sent[0]["messages"]] == ["user"]


def test_stopped_before_any_text(page, server, monkeypatch):
    slow_steps(server, monkeypatch)
    page.route("**/v1/chat/completions", lambda route: None)  # never answered
    ask(page, "The guard visited the flag.", tokens=10)
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").wait_for()
    assert page.locator(".message").count() == 0
    assert page.get_by_label("Message", exact=True).input_value() == "The guard visited the flag."


def test_escape_stops(page, server, monkeypatch):
    slow_steps(server, monkeypatch)
    page.get_by_role("button", name="Insert example").click()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Stop").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("Stopped.").wait_for()
    wait_until(lambda: idle(server))


def test_an_error_is_shown_and_the_message_comes_back(page):
    def change(route):
        route.continue_(post_data=route.request.post_data.replace('"stream":true', '"stream":true,"kv_budget":100000'))

    page.route("**/v1/chat/completions", change)
    ask(page, "The guard visited the flag.")
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert "a cache has 512 entries here, give at most that" in alert.inner_text()
    assert "[request " in alert.inner_text()
    assert page.get_by_label("Message", exact=True).input_value() == "The guard visited the flag."
    assert page.locator(".message").count() == 0
    page.problems.clear()  # browsers log what was answered 400
    page.unroute("**/v1/chat/completions")
    page.get_by_label("Message", exact=True).press("Enter")
    page.locator("#figures", has_text="generated").wait_for()
    assert not alert.is_visible()


def test_an_error_in_mid_stream_is_shown(page, server, monkeypatch):
    launch, calls = server.llm.engine.model_runner.decoder.launch, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("on purpose")
        return launch(*args, **kwargs)

    monkeypatch.setattr(server.llm.engine.model_runner.decoder, "launch", failing)
    never_ending(page)
    ask(page, "The guard visited the flag.", tokens=500)
    page.get_by_role("alert").wait_for()
    assert "the engine failed" in page.get_by_role("alert").inner_text()


def test_a_session(page, server):
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Keep the compressed cache").check()
    page.get_by_role("button", name="Insert example").click()
    page.get_by_role("button", name="Send").click()
    answer(page, "broad vase.").wait_for()
    page.get_by_text("1 kept conversation takes").wait_for()
    ask(page, "Recall the note for swallow:")
    page.get_by_text("continued from the cache, prefilled only 5").wait_for()
    assert page.locator(".message.assistant .body").last.inner_text() == "broad vase."
    assert metric(server, "snapstream_reused_tokens_total") > 2900
    page.get_by_role("button", name="New conversation").click()
    assert page.locator(".message").count() == 0


def test_everything_can_be_reached_by_keyboard_and_has_a_name(page):
    page.get_by_text("Settings", exact=True).click()
    wanted = page.locator(
        "button:visible:enabled, input:visible, textarea:visible, summary:visible, [tabindex='0']:visible"
    )
    count = wanted.count()
    seen = set()
    page.locator("body").click(position={"x": 1, "y": 1})
    for _ in range(count + 4):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {
        "messages",
        "input",
        "send",
        "fresh",
        "example",
        "SUMMARY",
        "max-tokens",
        "temperature",
        "budget",
        "key",
    } <= seen
    for control in page.get_by_role("textbox").all() + page.get_by_role("spinbutton").all():
        assert control.evaluate("element => element.labels.length") == 1
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.get_by_role("heading", level=1).count() == 1


OVERLAPS = """() => {
  const boxes = [...document.querySelectorAll(".settings input")].map((input) => input.getBoundingClientRect());
  const panel = document.querySelector(".chat").getBoundingClientRect();
  const outside = boxes.filter((box) => box.left < panel.left || box.right > panel.right);
  const crossing = boxes.filter((a, i) => boxes.some((b, j) =>
    i < j && a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom));
  return outside.length + crossing.length;
}"""


@pytest.mark.parametrize("width", [360, 1024, 1360])
def test_widths(browser, server, width):
    page = browser.new_page(viewport={"width": width, "height": 700})
    page.goto(server.url)
    page.get_by_text("0 of 4 slots busy").wait_for()
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("API key").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OVERLAPS) == 0
    page.close()


def test_settings_that_the_server_would_refuse(page):
    """They are found out here, by name, and nothing is sent."""
    sent = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    page.get_by_label("Message", exact=True).fill("The guard visited the flag.")
    for label, value in (("Cache entries", "513"), ("Cache entries", "15"), ("Max tokens", "0"), ("Temperature", "3")):
        if not page.get_by_label(label).is_visible():
            page.get_by_text("Settings", exact=True).click()
        before = page.get_by_label(label).input_value()
        page.get_by_label(label).fill(value)
        page.get_by_text("Settings", exact=True).click()
        page.get_by_role("button", name="Send").click()
        page.get_by_role("alert").filter(has_text=f"{label}: ").wait_for()
        assert page.evaluate("document.activeElement.labels[0].textContent").startswith(label)
        page.get_by_label(label).fill(before)
    assert not sent
    assert page.get_by_label("Message", exact=True).input_value() == "The guard visited the flag."
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_role("button", name="Send").click()
    page.locator("#figures", has_text="generated").wait_for()


def test_a_long_message_says_that_its_end_is_shown(page):
    page.get_by_role("button", name="Insert example").click()
    length = len(page.get_by_label("Message", exact=True).input_value())
    page.get_by_role("button", name="Send").click()
    message = page.locator(".message.user")
    message.get_by_text(f"{length:,} characters, of which the end is shown").wait_for()
    short = message.bounding_box()["height"]
    message.get_by_role("button", name="Show all").click()
    assert message.bounding_box()["height"] > 3 * short
    message.get_by_role("button", name="Show the end").click()
    assert message.bounding_box()["height"] == short
    page.locator("#figures", has_text="generated").wait_for()


def test_what_the_shipped_model_is(page):
    page.get_by_text(
        "It answers questions about notes in generated texts, as in the example, and nothing else."
    ).wait_for()


def test_slots_are_drawn_to_scale_and_unused_ones_in_a_line(browser):
    fresh = LLM(str(TASK_MODEL), budget=512, slots=8, enforce_eager=True)
    with running(fresh, model_name="task-model") as server:
        page = browser.new_page()
        page.goto(server.url)
        page.get_by_text("8 slots free", exact=True).click()
        assert page.locator(".slot svg").count() == 0
        both = [post(server, prompt="The guard saw the flag. " * 99, max_tokens=2, kv_budget=n) for n in (512, 64)]
        assert [reply.status_code for reply in both] == [200, 200]  # one after the other, so in the same slot
        page.get_by_text("8 slots free, 1 of them used before").wait_for()
        page.get_by_role("img", name="64 of 64 entries in use").wait_for()
        cache = page.locator(".slot svg:not(.strip)").bounding_box()["width"]
        whole = page.locator(".slot svg.strip").first.bounding_box()["width"]
        assert cache / whole == pytest.approx(64 / 512, abs=0.01)
        page.close()


def test_a_key_is_asked_for(browser, task_llm):
    with running(task_llm, model_name="task-model", api_keys=("sesame",)) as server:
        page = browser.new_page()
        page.goto(server.url)
        page.get_by_role("alert").filter(has_text="This server needs an API key: enter it in Settings.").wait_for()
        assert page.locator("#server").inner_text() == "An API key is needed"
        assert page.evaluate("document.activeElement.id") == "key"
        page.keyboard.type("sesam")
        page.keyboard.press("Tab")
        page.get_by_role("alert").filter(has_text="does not know this API key").wait_for()
        page.get_by_label("Message", exact=True).focus()
        page.wait_for_timeout(2500)  # it is asked again meanwhile
        assert page.evaluate("document.activeElement.id") == "input"
        page.get_by_label("API key").fill("sesame")
        page.get_by_label("API key").press("Tab")
        page.get_by_text("task-model: up to").wait_for()
        assert not page.get_by_role("alert").is_visible()
        page.close()


def test_a_model_without_a_chat_template(browser, task_llm, monkeypatch):
    monkeypatch.setattr(task_llm, "chat_template", None)
    with running(task_llm, model_name="task-model") as server:
        page = browser.new_page()
        page.goto(server.url)
        page.get_by_text("task-model: up to").wait_for()
        ask(page, "The guard visited the flag.", tokens=5)
        page.locator("#figures", has_text="generated").wait_for()
        page.get_by_label("Keep the compressed cache").check()
        for turn in ("one more", "and another"):
            ask(page, f"The porter carried {turn}.", tokens=5)
            page.locator(".message.user", has_text=turn).wait_for()
            page.locator("#figures", has_text="generated").wait_for()
        page.locator("#figures", has_text="continued from the cache").wait_for()
        page.close()


# -- comparing policies -----------------------------------------------------------------------------------------------


def compare(page, text, question):
    page.get_by_role("button", name="Compare policies").click()
    page.get_by_label("Text", exact=True).fill(text)
    page.get_by_role("button", name="Read the text").click()
    page.get_by_text("Now ask.").wait_for()
    page.get_by_role("textbox", name="Question").fill(question)
    page.get_by_role("button", name="Ask all three").click()
    page.locator("#kept").wait_for()


def marked(page):
    """The text by whether it is marked as kept."""
    pieces = page.locator("#document span").evaluate_all("all => all.map(one => [one.className, one.textContent])")
    return "".join(text for _, text in pieces), "".join(text for name, text in pieces if name != "kept-0")


def move(page, entries):
    page.locator("#entries").evaluate(f"one => {{ one.value = {entries}; one.dispatchEvent(new Event('input')) }}")


@pytest.fixture(scope="module")
def roomy():
    """Caches that hold all of the example, so that a text is read once and compressed to any size."""
    return LLM(str(TASK_MODEL), budget=4096, slots=2, enforce_eager=True, sessions=1, context_bytes=2**25)


@pytest.fixture
def compared(browser, roomy, example):
    with running(roomy, model_name="task-model", example=Example(**example)) as server:
        page = browser.new_page()
        problems = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(server.url)
        page.get_by_text("task-model: up to").wait_for()
        page.server = server
        yield page
        assert not problems
        page.close()


def test_three_policies_side_by_side(compared, example):
    page = compared
    page.get_by_role("button", name="Compare policies").click()
    page.locator("#compare-example").click()
    text = page.get_by_label("Text", exact=True).input_value()
    assert text == example["text"]
    assert page.get_by_label("Message", exact=True).is_hidden()
    compare(page, text, page.locator("#question").input_value())
    answers = page.locator("#answers li")
    move(page, 496)
    answers.nth(2).get_by_text("496 of 2,").wait_for()
    said = answers.locator(".answer").all_inner_texts()
    assert said[0] == said[2] == "broad vase."
    assert said[1] != "broad vase."  # StreamingLLM has lost it
    figures = answers.locator(".quiet").all_inner_texts()
    assert "100 % of a full cache's" in figures[0]
    assert "17 % of a full cache's" in figures[2]
    shown, kept = marked(page)
    assert shown.strip() == text.strip()
    assert "broad vase" in kept
    assert len(kept) < len(shown)
    page.locator("#kept-policy").select_option("streaming")
    shown, kept = marked(page)
    assert "broad vase" not in kept
    assert len(kept) > 500
    assert shown.endswith(kept[-400:])
    page.locator("#kept-policy").select_option("spans")
    layers = page.locator("#kept-layer option").count() - 1
    assert layers == page.server.llm.engine.spec.layers
    each = set()
    for layer in range(layers):
        page.locator("#kept-layer").select_option(str(layer))
        each.add(marked(page)[1])
    assert len(each) == layers
    contexts = page.server.parts.contexts
    assert len(contexts.store) == 1
    compare(page, "The guard visited the flag.", "Recall")  # the next text takes the place of the first
    wait_until(lambda: len(contexts.store) == 1)
    assert next(iter(contexts.of(""))).tokens < 20


def test_a_text_from_a_file(compared, tmp_path):
    page = compared
    (tmp_path / "notes.txt").write_text("The guard visited the flag. Note for walrus: red lamp.")
    page.get_by_role("button", name="Compare policies").click()
    page.locator("#file").set_input_files(tmp_path / "notes.txt")
    page.get_by_role("button", name="Read the text").click()
    page.get_by_text("Now ask.").wait_for()


def test_what_cannot_be_compared_is_said(compared):
    page = compared
    page.get_by_role("button", name="Compare policies").click()
    page.get_by_role("button", name="Read the text").click()
    page.get_by_text("There is no text").wait_for()
    page.get_by_label("Text", exact=True).fill("The guard visited the flag. " * 4000)
    page.get_by_role("button", name="Read the text").click()
    page.get_by_text("at most 16383 fit").wait_for()
    assert page.get_by_role("textbox", name="Question").is_hidden()
    page.get_by_label("Text", exact=True).fill("The guard visited the flag.")
    page.get_by_role("button", name="Read the text").click()
    page.get_by_text("Now ask.").wait_for()
    page.get_by_role("button", name="Ask all three").click()
    page.get_by_text("There is no question.").wait_for()
    made = page.server.parts.contexts.of("")[0].key
    assert httpx.delete(f"{page.server.url}/v1/contexts/{made}").status_code == 200
    page.get_by_role("textbox", name="Question").fill("Recall")
    page.get_by_role("button", name="Ask all three").click()
    page.get_by_text("it was deleted or evicted; create it again").wait_for()

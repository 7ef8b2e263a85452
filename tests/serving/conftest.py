import json
import shutil

import pytest

from snapstream import LLM
from snapstream.assets import EXAMPLE, PLAIN_CHAT, TASK_MODEL
from tests.engine.test_engine import BUDGET
from tests.serving.servers import running


@pytest.fixture(scope="session")
def llm(checkpoint):
    """A tiny random model: it never ends by itself if asked not to, and says the same for the same prompt.

    It has no prefix cache, so a prompt takes as long every time.
    """
    engine = LLM(
        str(checkpoint),
        budget=BUDGET,
        max_model_len=2000,
        slots=3,
        prefill_chunk=32,
        enforce_eager=True,
        sessions=2,
        context_bytes=60_000,  # two full ones
        prefix_cache=0,
    )
    engine.chat_template = PLAIN_CHAT.read_text()
    return engine


@pytest.fixture
def server(llm):
    with running(llm, max_queue=20, example=None) as one:
        yield one


@pytest.fixture(scope="session")
def task_llm():
    """The shipped model, which can answer."""
    return LLM(str(TASK_MODEL), budget=512, slots=4, enforce_eager=True, sessions=4, context_bytes=2**24)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium here (apt-get install chromium)")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def example():
    return json.loads(EXAMPLE.read_text())

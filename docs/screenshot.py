"""Makes docs/page.png and docs/page-compare.png: the page after an example, and with one question under three policies.

python -m docs.screenshot        # needs chromium, and what `make chat` sets up
"""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import httpx
from playwright.sync_api import Browser, sync_playwright

from benchmarks.server_load import serving
from snapstream.assets import EXAMPLE

HERE = Path(__file__).parent
TO_THE_FACT = """text => {
  const nodes = document.createTreeWalker(text, NodeFilter.SHOW_TEXT);
  let before = "";
  while (!before.includes("5831") && nodes.nextNode()) before += nodes.currentNode.data;
  nodes.currentNode.parentElement.scrollIntoView({ block: "center" });
}"""
"""Scrolls to the phone number in the example's text."""


def chat(browser: Browser) -> None:
    """The shipped model's example, other sequences being decoded beside it."""
    text = json.loads(EXAMPLE.read_text())["text"]
    with serving("--budget", "512", "--slots", "4", "--eager") as client:
        url = str(client.base_url)

        def ask(characters: int) -> None:
            body = {"prompt": text[:characters], "max_tokens": 12000, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
                for _ in reply.iter_lines():
                    pass

        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.goto(url)
        page.get_by_role("button", name="Insert example").click()
        page.get_by_role("button", name="Send").click()
        page.locator(".message.assistant", has_text="broad vase.").wait_for()
        threads = [threading.Thread(target=ask, args=(size,)) for size in (9000, 2000)]
        for thread in threads:
            thread.start()
        page.wait_for_timeout(300)
        page.evaluate("document.dispatchEvent(new Event('working'))")  # it looks at the caches now
        page.get_by_text("2 of 4 slots busy").wait_for()
        page.wait_for_timeout(400)
        page.screenshot(path=HERE / "page.png")
        page.close()
        for thread in threads:
            thread.join()


def comparison(browser: Browser) -> None:
    """A real model and its example: the three answers, and what was kept around the one that was asked for."""
    with serving("smollm2", "--budget", "4k", "--slots", "4", "--sessions", "4") as client:
        page = browser.new_page(viewport={"width": 1100, "height": 1580})
        page.goto(str(client.base_url))
        page.get_by_role("button", name="Compare policies").click()
        page.locator("#compare-example").click()
        page.locator("#read").click()
        page.locator("#question-form").wait_for(state="visible")
        page.locator("#question").press("Enter")
        page.locator("#kept").wait_for(state="visible")  # after all three answers
        page.locator("#document").evaluate(TO_THE_FACT)
        page.get_by_text("0 of 4 slots busy, 0 waiting").wait_for()
        page.screenshot(path=HERE / "page-compare.png", full_page=True)
        page.close()


def main() -> None:
    """Take both pictures."""
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        chat(browser)
        comparison(browser)
        browser.close()


if __name__ == "__main__":
    main()

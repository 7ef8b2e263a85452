"""Makes docs/page.png: the page with the shipped model's example, other sequences being decoded beside it.

python -m docs.screenshot        # needs chromium
"""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import httpx
from playwright.sync_api import sync_playwright

from benchmarks.server_load import serving
from snapstream.assets import EXAMPLE


def main() -> None:
    """Take the picture."""
    text = json.loads(EXAMPLE.read_text())["text"]
    with serving("--budget", "512", "--slots", "4", "--eager") as client, sync_playwright() as started:
        url = str(client.base_url)

        def ask(characters: int) -> None:
            body = {"prompt": text[:characters], "max_tokens": 6000, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
                for _ in reply.iter_lines():
                    pass

        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.goto(url)
        page.get_by_role("button", name="Insert example").click()
        page.get_by_role("button", name="Send").click()
        page.locator(".message.assistant", has_text="broad vase.").wait_for()
        threads = [threading.Thread(target=ask, args=(size,)) for size in (9000, 2000)]
        for thread in threads:
            thread.start()
        page.get_by_text("2 of 4 slots busy").wait_for()
        page.wait_for_timeout(1500)
        page.screenshot(path=str(Path(__file__).parent / "page.png"))
        browser.close()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()

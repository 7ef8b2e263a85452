"""What docs/transformers.md tells users to do works as written, and prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

from snapstream.assets import PLAIN_CHAT, TASK_MODEL

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "transformers.md").read_text()


def test_the_snippets_run():
    code, pins = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert "4096" in code
    names = {}
    exec(compile(code.replace("path/to/model", str(TASK_MODEL)), "snippet", "exec"), names)
    assert names["output"].shape[1] > names["inputs"].input_ids.shape[1]
    names["tokenizer"].chat_template = PLAIN_CHAT.read_text()
    names["messages"] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who was it?"}]
    names["tools"] = []
    exec(compile(pins, "pins", "exec"), names)
    ((start, end),) = names["pin"]
    shown = names["tokenizer"].decode(names["inputs"].input_ids[0, start:end])
    assert shown.replace(" ", "").endswith("Bebrief.") or "<unk>" in shown
    assert names["cache"].layers[0].budget.capacity == 4096


def test_the_example_prints_what_the_page_says():
    (printed,) = re.findall(r"```text\n(.*?)\n```", TEXT, re.DOTALL)
    command = [sys.executable, str(ROOT / "examples" / "transformers_cache.py")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == printed

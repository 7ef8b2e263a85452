"""Run vLLM in a process of its own, as several ranks need it: settings in as JSON, tokens out as JSON.

python -m tests.integrations.vllm.offline '{"model": ..., "prompts": [[...]], "steps": 40, "budget": {...}}'
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run_offline(model, prompts, steps, budget=None, environment=None, timeout=420, **settings):
    """Greedy tokens of every prompt, from another process."""
    task = {"model": str(model), "prompts": prompts, "steps": steps, "budget": budget and budget.as_dict(), **settings}
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.vllm.offline", json.dumps(task)],
        cwd=ROOT,
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | (environment or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert lines, f"no tokens; {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return json.loads(lines[0].removeprefix("TOKENS "))


def main():
    from tests.integrations.vllm.engines import generate, vllm_engine

    task = json.loads(sys.argv[1])
    prompts, steps, model = task.pop("prompts"), task.pop("steps"), task.pop("model")
    with vllm_engine(model, task.pop("budget"), **task) as llm:
        print("TOKENS", json.dumps(generate(llm, prompts, steps)), flush=True)


if __name__ == "__main__":
    main()

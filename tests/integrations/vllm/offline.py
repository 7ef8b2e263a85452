"""Run vLLM in a process of its own, as several ranks need it: settings in as JSON, tokens out as JSON.

python -m tests.integrations.vllm.offline '{"model": ..., "prompts": [[...]], "steps": 40, "budget": {...}}'
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run_offline(
    model, prompts, steps, budget=None, environment=None, timeout=420, script=__name__, counted=False, **settings
):
    """Greedy tokens of every prompt, from another process; if `counted`, also how many were preempted."""
    task = {"model": str(model), "prompts": prompts, "steps": steps, "budget": budget and budget.as_dict(), **settings}
    whole = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | (environment or {})
    done = subprocess.run(
        [sys.executable, "-m", script, json.dumps(task)],
        cwd=ROOT,
        env={name: value for name, value in whole.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    said = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line]
    assert lines, "no tokens:\n" + "\n".join(dict.fromkeys(said))[:4000]
    tokens, preempted = json.loads(lines[0].removeprefix("TOKENS "))
    return (tokens, preempted) if counted else tokens


def main():
    from tests.integrations.vllm.engines import counted, generate, vllm_engine
    from tests.integrations.vllm.travel import decode, read, transfer

    task = json.loads(sys.argv[1])
    prompts, steps, model = task.pop("prompts"), task.pop("steps"), task.pop("model")
    if directory := task.pop("travels", None):
        task["kv_transfer_config"] = transfer(directory, **task.pop("transfer", {}))
    stage, departures = task.pop("stage", None), task.pop("departures", None)
    with vllm_engine(model, task.pop("budget"), **task) as llm:
        if not directory:
            tokens = generate(llm, prompts, steps)
        elif stage == "read":  # what another one needs
            tokens = read(llm, prompts)
        else:
            tokens = decode(llm, prompts, departures or read(llm, prompts), steps)
        print("TOKENS", json.dumps([tokens, counted(llm, "num_preemptions")]), flush=True)


if __name__ == "__main__":
    main()

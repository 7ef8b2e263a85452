"""The memory that a process takes, beside the plan: long prompts, with the prefix cache and sessions in use.

Each row is a process of its own, because a process does not return all memory to the system. What is measured is what
the engine adds to a process that has imported the package, used torch's libraries and loaded the tokenizer::

    python benchmarks/memory.py [MODEL ...] [--length 16384] [--slots 1,8] [--rounds 3]

Without models, the 12-layer model that the benchmarks share.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from engine import Spread, make_checkpoint
from limits import as_the_command_does

BUDGET = 2048
SESSIONS, PREFIXES = 2, "128MiB"
PARTS = ("weights", "slots", "staging", "workspace", "metadata", "sessions", "prefixes", "tokenizing")


def held(field: str) -> int:
    """Resident memory of the process in bytes: VmRSS is the current value, VmHWM the peak."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024


def prompt_of(tokenizer, length: int, rng: random.Random) -> str | list[int]:
    """A text of nearly ``length`` tokens that begins like no other; tokens, if the tokenizer knows a single word."""
    if len(tokenizer) < 100:
        return [rng.randrange(5, 4000) for _ in range(length - 64)]
    ids = tokenizer(" ".join(str(rng.randrange(10**6)) for _ in range(length // 2)), add_special_tokens=False)[
        "input_ids"
    ]
    return tokenizer.decode(ids[: length - 128])


def child(model: str, length: int, slots: int) -> None:
    """Fill everything that one engine keeps; print its plan and what the process takes."""
    from snapstream import LLM, SamplingParams
    from snapstream.cache import SequenceStore, StoreFullError
    from snapstream.engine.requests.tokenizing import give_memory_back
    from snapstream.engine.settings import load_tokenizer
    from snapstream.models.files import resolve_config
    from snapstream.models.weights import load_spec

    config = resolve_config(model)
    length = min(length, load_spec(config).max_position)
    tokenizer = load_tokenizer(str(config))
    rng = random.Random(0)
    # Two long prompts; the others fill what slots, sessions and the prefix cache keep.
    prompts = [prompt_of(tokenizer, each, rng) for each in (length, *[length // 8] * (2 * slots), length)]
    LLM("task-model", report_plan=lambda _: None, max_model_len=512).generate("A small model has used everything once.")
    gc.collect()
    give_memory_back()
    before = held("VmRSS")
    del tokenizer  # the engine loads its own
    gc.collect()
    settings = {"slots": slots, "max_model_len": length, "sessions": SESSIONS, "prefix_cache": PREFIXES}
    llm = LLM(model, budget=BUDGET, report_plan=lambda _: None, **settings)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak: loading has mapped the pages of the checkpoint
    plan = llm.engine.plan
    store = SequenceStore(plan.sessions)
    for at, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=8, temperature=at % 2, ignore_eos=True)
        llm.engine.add_request(prompt, params, request_id=str(at), keep=True)
    while llm.engine.busy:
        for output in llm.engine.step():
            assert output.error is None, output.error
            if output.saved is not None:
                with contextlib.suppress(StoreFullError):
                    store.put(output.request_id, output.saved, {})
            del output  # and with it a sequence
    found = {name: getattr(plan, name) for name in PARTS} | {"total": plan.total, "steady plan": plan.steady}
    stored = {"stored": store.nbytes, "prefixes held": llm.engine.model_runner.prefixes.store.nbytes}
    print(json.dumps(found | stored | {"peak": held("VmHWM") - before, "steady": held("VmRSS") - before}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--slots", default="1,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.models[0], options.length, int(options.slots))
        return
    with tempfile.TemporaryDirectory() as directory:
        models = options.models
        if not models:
            make_checkpoint(directory)
            models = [directory]
        print(f"| model, slots | {' | '.join(PARTS)} | plan | peak | peak / plan | steady / plan |")
        print("|---|" + "---|" * (len(PARTS) + 4))
        for model in models:
            for slots in options.slots.split(","):
                given = ["--child", model, "--length", str(options.length), "--slots", slots]
                rows = []
                for _ in range(options.rounds):
                    out = subprocess.run(
                        [sys.executable, __file__, *given], check=True, stdout=subprocess.PIPE, text=True
                    )
                    rows.append(json.loads(out.stdout.splitlines()[-1]))
                last = rows[-1]
                cells = " | ".join(f"{last[name] / 2**20:.0f}" for name in (*PARTS, "total"))
                peaks = Spread([row["peak"] / 2**20 for row in rows])
                shares = Spread([row["peak"] / row["total"] for row in rows])
                steady = Spread([row["steady"] / row["steady plan"] for row in rows])
                name = "12 layers" if model == directory else Path(model).stem
                print(
                    f"| {name}, {slots} | {cells} | {peaks.show(0)} | {shares.show(3)} | {steady.show(3)} |", flush=True
                )


if __name__ == "__main__":
    as_the_command_does()
    main()

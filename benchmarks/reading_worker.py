"""One version of the engine in a process of its own; see reading.py. Takes words on stdin, answers JSON on stdout."""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import tempfile
import time

import torch

from snapstream import LLM, SamplingParams
from snapstream.errors import SnapStreamError


def held(field: str) -> int:
    """Bytes of the process: VmRSS is what it holds now, VmHWM the most it has held."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024


def say(**found: object) -> None:
    print(json.dumps(found), flush=True)


def main() -> None:
    mode, checkpoint, budget, length, slots, style = sys.argv[1:]
    if mode == "start":  # compiled code of an earlier run would be found
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
        os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    settings = {
        "budget": int(budget),
        "max_model_len": int(length) + 64 if mode != "serve" else int(length),
        "slots": int(slots),
        "enforce_eager": style == "eager",
    }
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(5, 4096, (int(length),), generator=generator).tolist()
    if mode in ("memory", "limit"):
        # What libraries take for themselves when they are first used is no part of an engine.
        small = {"budget": 64, "max_model_len": 1024, "slots": 1, "dtype": "bfloat16", "enforce_eager": True}
        tiny = LLM("task-model", report_plan=lambda _: None, **small)
        tiny.generate([[token % 500 + 5 for token in prompt[:1000]]], SamplingParams(max_tokens=2, ignore_eos=True))
        del tiny
        gc.collect()
    if mode == "limit":
        with open("/proc/self/statm") as status:
            virtual = int(status.read().split()[0]) * resource.getpagesize()
        most = virtual + int(os.environ["SNAPSTREAM_BENCH_LIMIT"]) * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    before = held("VmRSS")
    start = time.perf_counter()
    try:
        llm = LLM(checkpoint, report_plan=lambda _: None, **settings)
        engine = getattr(llm, "engine", llm)
        if mode == "limit":
            out = llm.generate([prompt], SamplingParams(max_tokens=16, ignore_eos=True))[0]
            say(answer=f"answers, {out.token_count} tokens" if out.error is None else out.error.split("\n")[0][:120])
            return
    except (SnapStreamError, MemoryError, RuntimeError) as error:
        say(error=str(error).split("\n")[0][:160])
        return
    if mode == "start":
        say(seconds=time.perf_counter() - start)
        return
    plan = engine.plan
    if mode == "memory":
        with open("/proc/self/clear_refs", "w") as peaks:  # pages of the checkpoint were mapped while it was loaded
            peaks.write("5")
        llm.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True))
        peak = held("VmHWM")
        planned = plan.staging + plan.workspace + plan.metadata
        say(peak=peak, empty=before, weights=plan.weights, slots=plan.slots, planned=planned)
        return
    serve(llm, engine, prompt)


def serve(llm: LLM, engine: object, prompt: list[int]) -> None:
    decode = engine.executor.decode if hasattr(engine, "executor") else engine.decode
    say(ready=True)
    turn = 5
    for line in sys.stdin:
        kind, size = line.split()[0], int(line.split()[1])
        if kind == "prefill":
            turn += 1  # another prompt each time, or nothing would be read
            start = time.perf_counter()
            llm.generate([[turn, *prompt[: size - 1]]], SamplingParams(max_tokens=1))
            say(seconds=time.perf_counter() - start)
        else:
            for column, value in (("token", 1), ("position", 16384), ("base", 3072), ("count", 16384), ("limit", 4096)):
                getattr(decode, column).fill_(value)
            decode.active.fill_(False)
            decode.active[:size] = True
            start = time.perf_counter()
            for _ in range(8):
                decode.launch(4, greedy=True)
            say(seconds=(time.perf_counter() - start) / 32)
            decode.active.fill_(False)
            decode.count.fill_(0)


if __name__ == "__main__":
    main()

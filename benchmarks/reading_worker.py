"""One version of the engine in a process of its own; see reading.py. It uses nothing that one of them does not have."""

from __future__ import annotations

import gc
import os
import random
import resource
import sys
import tempfile
import time

BEGIN = time.perf_counter()

from process import serve  # noqa: E402 (after the clock)
from snapstream import LLM, SamplingParams  # noqa: E402

LIMIT = 256
"""MiB that the process may take beyond what an empty engine has, where there is a limit."""


def held(field: str) -> int:
    """Bytes of the process: VmRSS is what it holds now, VmHWM the most it has held."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024


class Version:
    """What is measured; the engine is made when it is first asked for."""

    def __init__(self, checkpoint: str, budget: str, length: str, slots: str) -> None:
        self.checkpoint = checkpoint
        self.settings = {"budget": int(budget), "max_model_len": int(length), "slots": int(slots)}
        self.prompt = random.Random(0).choices(range(5, 4096), k=int(length) - 64)
        self.turn = 5
        self.llm: LLM | None = None

    def made(self) -> tuple[LLM, object]:
        if self.llm is None:
            self.llm = LLM(self.checkpoint, report_plan=lambda _: None, **self.settings)
        return self.llm, getattr(self.llm, "engine", self.llm)

    def start(self) -> dict:
        """Seconds until an engine is there, with nothing compiled before, and what the process then holds."""
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
        os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
        _, engine = self.made()
        plan = engine.plan
        return {
            "seconds": time.perf_counter() - BEGIN,
            "held": held("VmRSS"),
            "planned": plan.weights + plan.slots + plan.staging,
        }

    def memory(self) -> dict:
        """Bytes planned, and held while the prompt is read."""
        use_libraries()
        empty = held("VmRSS")
        llm, engine = self.made()
        plan = engine.plan
        with open("/proc/self/clear_refs", "w") as peaks:  # pages of the checkpoint were mapped while it was loaded
            peaks.write("5")
        llm.generate([self.prompt], SamplingParams(max_tokens=2, ignore_eos=True))
        planned = plan.staging + plan.workspace + plan.metadata
        return {
            "peak": held("VmHWM"),
            "empty": empty,
            "weights": plan.weights,
            "slots": plan.slots,
            "planned": planned,
        }

    def limit(self) -> dict:
        """What happens to the prompt under a limit on the process."""
        use_libraries()
        with open("/proc/self/statm") as status:
            virtual = int(status.read().split()[0]) * resource.getpagesize()
        most = virtual + LIMIT * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        try:
            out = self.made()[0].generate([self.prompt], SamplingParams(max_tokens=16, ignore_eos=True))[0]
            said = f"answers, {out.token_count} tokens" if out.error is None else out.error
        except Exception as error:  # whatever a version says
            said = str(error)
        return {"mebibytes": LIMIT, "said": said.split("\n")[0][:160]}

    def prefill(self, length: int) -> float:
        """Seconds to read a prompt; another one each time, or nothing would be read."""
        llm, _ = self.made()
        self.turn += 1
        begin = time.perf_counter()
        llm.generate([[self.turn, *self.prompt[: length - 1]]], SamplingParams(max_tokens=1))
        return time.perf_counter() - begin

    def decode(self, batch: int) -> float:
        """Seconds of a decode step in the middle of sequences."""
        _, engine = self.made()
        decode = engine.executor.decode if hasattr(engine, "executor") else engine.decode
        for column, value in (("token", 1), ("position", 16384), ("base", 3072), ("count", 16384), ("limit", 4096)):
            getattr(decode, column).fill_(value)
        decode.active.fill_(False)
        decode.active[:batch] = True
        begin = time.perf_counter()
        for _ in range(8):
            decode.launch(4, greedy=True)
        seconds = (time.perf_counter() - begin) / 32
        decode.active.fill_(False)
        decode.count.fill_(0)
        return seconds


def use_libraries() -> None:
    """What libraries take for themselves when they are first used is no part of an engine."""
    small = {"budget": 64, "max_model_len": 1024, "slots": 1, "dtype": "bfloat16"}
    tiny = LLM("task-model", report_plan=lambda _: None, **small)
    tiny.generate([[token % 500 + 5 for token in range(1000)]], SamplingParams(max_tokens=2, ignore_eos=True))
    del tiny
    gc.collect()


if __name__ == "__main__":
    serve(Version(*sys.argv[1:]))

"""One version of the engine in a separate process; see reading.py. It only uses interfaces that all versions have."""

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
from snapstream.config import EngineConfig  # noqa: E402

LIMIT = 256
"""Memory limit in MiB, in addition to the address space of the process without an engine."""


def held(field: str) -> int:
    """Resident memory of the process in bytes: VmRSS is the current value, VmHWM the peak."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024


class Version:
    """The measurements of one version; the engine is created on first use."""

    def __init__(self, checkpoint: str, budget: str, length: str, slots: str) -> None:
        self.checkpoint = checkpoint
        self.settings = {"budget": int(budget), "max_model_len": int(length), "slots": int(slots)}
        self.prompt = random.Random(0).choices(range(5, 4096), k=int(length) - 64)
        self.turn = 5
        self.llm: LLM | None = None

    def made(self) -> tuple[LLM, object]:
        if self.llm is None:
            # Versions before the prefix cache was on do not know the setting.
            known = "prefix_cache" in EngineConfig.__dataclass_fields__
            options = {"prefix_cache": 0} if known else {}
            self.llm = LLM(self.checkpoint, report_plan=lambda _: None, **options, **self.settings)
        return self.llm, getattr(self.llm, "engine", self.llm)

    def start(self) -> dict:
        """Seconds until the engine is ready, without cached compilations, and the memory of the process then."""
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
        """Bytes planned, and bytes held during prefill."""
        use_libraries()
        empty = held("VmRSS")
        llm, engine = self.made()
        plan = engine.plan
        with open("/proc/self/clear_refs", "w") as peaks:  # reset the peak: loading has mapped the checkpoint's pages
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
        """The outcome of the prompt under a memory limit on the process."""
        use_libraries()
        with open("/proc/self/statm") as status:
            virtual = int(status.read().split()[0]) * resource.getpagesize()
        most = virtual + LIMIT * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        try:
            out = self.made()[0].generate([self.prompt], SamplingParams(max_tokens=16, ignore_eos=True))[0]
            said = f"answers, {out.token_count} tokens" if out.error is None else out.error
        except Exception as error:  # versions may raise different errors
            said = str(error)
        return {"mebibytes": LIMIT, "said": said.split("\n")[0][:160]}

    def prefill(self, length: int) -> float:
        """Seconds to prefill a prompt; a different one each time, so that nothing is reused."""
        llm, _ = self.made()
        self.turn += 1
        begin = time.perf_counter()
        llm.generate([[self.turn, *self.prompt[: length - 1]]], SamplingParams(max_tokens=1))
        return time.perf_counter() - begin

    def decode(self, batch: int) -> float:
        """Seconds per decode step in the middle of sequences."""
        _, engine = self.made()
        # Other versions call it differently.
        decode = engine.model_runner.decoder if hasattr(engine, "model_runner") else engine.executor.decode
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
    """Run a tiny engine, so that memory which libraries allocate on first use is not attributed to an engine."""
    small = {"budget": 64, "max_model_len": 1024, "slots": 1, "dtype": "bfloat16"}
    tiny = LLM("task-model", report_plan=lambda _: None, **small)
    tiny.generate([[token % 500 + 5 for token in range(1000)]], SamplingParams(max_tokens=2, ignore_eos=True))
    del tiny
    gc.collect()


if __name__ == "__main__":
    serve(Version(*sys.argv[1:]))

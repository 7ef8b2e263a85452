"""Both ends of an engine that runs in a separate process and environment, driven by lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def vllm_in_one_process(gigabytes: int) -> dict[str, str]:
    """Environment variables for a vLLM engine that can be driven step by step, with ``gigabytes`` for caches."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", str(gigabytes)),
        "HF_HUB_OFFLINE": "1",
    }


class Process:
    """The client: starts the engine's process and calls its methods.

    Args:
        name: Name for messages.
        command: Command to run; it must end up in :func:`serve`.
        environment: Additional environment variables.
    """

    def __init__(self, name: str, command: Sequence[str | Path], environment: Mapping[str, str]) -> None:
        self.name = name
        self.process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def ask(self, what: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the engine."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, arguments, named]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise SystemExit(f"{self.name}: the engine died")

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def serve(engine: Any) -> None:
    """The server: report that the engine is ready, then answer until the input ends."""
    print("ANSWER true", flush=True)
    for line in sys.stdin:
        what, arguments, named = json.loads(line)
        print("ANSWER", json.dumps(getattr(engine, what)(*arguments, **named)), flush=True)

"""Runs code that a model wrote against its test: in a process of its own, with limits, and without a network.

The limits contain mistakes: endless loops, memory, files, requests to other machines. They do not contain code that
tries to do harm to the machine it runs on, such as reading files that the user may read.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from snapstream.errors import ConfigurationError
from snapstream.evaluation.questions.question import Scoring

SECONDS = 10
"""Processor time of a program; it may take twice as long by the clock."""
BYTES = 2**31
"""Address space of a program; a file that it writes may have a hundredth of it."""

_FENCE = re.compile(r"```[a-zA-Z0-9]*\n(.*?)(?:```|\Z)", re.DOTALL)
_CONFINED = f"""
import ctypes, os, resource, sys
for limit, most in (
    (resource.RLIMIT_CPU, {SECONDS}),
    (resource.RLIMIT_AS, {BYTES}),
    (resource.RLIMIT_FSIZE, {BYTES // 100}),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (most, most))
unshare = ctypes.CDLL(None).unshare
NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000
if unshare(NEW_NETWORK) != 0 and unshare(NEW_USER | NEW_NETWORK) != 0:
    sys.exit("no network namespace")
os.execv(sys.executable, [sys.executable, "-I", sys.argv[1]])
"""
"""Limits its process, and then becomes the program. Limits and namespaces outlive ``exec``."""


def program(scoring: Scoring, output: str) -> str:
    """The program that an output stands for, with its test.

    An output in a code block, as chat models write it, replaces the head that it was asked to continue if it repeats
    it. Other outputs continue the head, up to the first line that belongs to neither.
    """
    block = _FENCE.search(output)
    written = block[1] if block else output
    names = re.findall(r"^\s*def\s+(\w+)", scoring.program, re.MULTILINE)
    if names and re.search(rf"^def\s+{names[-1]}\b", written, re.MULTILINE):
        # Imports and helpers above the head stay; the head itself is there again.
        head = scoring.program[: scoring.program.rindex(f"def {names[-1]}")]
        return f"{head}\n{written}\n\n{scoring.test}\n"
    if names and scoring.program.rstrip().endswith((":", '"""', "'''")):
        written = _body(written)
    return f"{scoring.program}{written}\n\n{scoring.test}\n"


def run_code(scoring: Scoring, output: str) -> float:
    """1 if the program ends without an error, within its limits; else 0."""
    with tempfile.TemporaryDirectory(prefix="snapstream-code-") as directory:
        path = Path(directory) / "program.py"
        path.write_text(program(scoring, output), "utf-8", errors="replace")
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _CONFINED, str(path)],
            cwd=directory,
            env={"PATH": "/usr/bin:/bin", "HOME": directory, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return float(process.wait(2 * SECONDS) == 0)
        except subprocess.TimeoutExpired:
            return 0.0
        finally:  # whatever it has started, too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def require_confinement() -> None:
    """Refuse to run code where a process cannot be cut off from the network.

    Raises:
        ConfigurationError: It cannot.
    """
    if sys.platform != "linux":
        raise ConfigurationError("--run-code needs Linux, where a process can be cut off from the network")
    if not run_code(Scoring("code"), "pass"):
        raise ConfigurationError(
            "--run-code: a process cannot be cut off from the network here, because user namespaces are disabled; run "
            "this command as root in a container, or enable them (sysctl kernel.unprivileged_userns_clone=1)"
        )


def _body(written: str) -> str:
    """The indented lines that an output begins with, which continue the body of a function."""
    lines = written.splitlines()
    end = next((at for at, line in enumerate(lines) if at and line.strip() and not line[:1].isspace()), len(lines))
    return "\n".join(lines[:end])

"""Runs code that a model wrote against its test: in a process of its own, with limits, and without a network.

The limits contain mistakes: endless loops, memory, files, requests to other machines. They do not contain malicious
code, which can read whatever the user can read.
"""

from __future__ import annotations

import ast
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

PASSED = 77
"""Exit status of a program that has run to its end, test included. A program that ends itself has another one."""

_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_CONFINED = f"""
import ctypes, os, resource, signal, sys
library = ctypes.CDLL(None)
END_WITH_PARENT = 1
library.prctl(END_WITH_PARENT, signal.SIGKILL)
for limit, most in (
    (resource.RLIMIT_CPU, {SECONDS}),
    (resource.RLIMIT_AS, {BYTES}),
    (resource.RLIMIT_FSIZE, {BYTES // 100}),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (most, most))
unshare = library.unshare
NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
if unshare(NEW_NETWORK | NEW_PROCESSES) != 0 and unshare(NEW_USER | NEW_NETWORK | NEW_PROCESSES) != 0:
    sys.exit("no namespaces")
child = os.fork()
if child == 0:
    library.prctl(END_WITH_PARENT, signal.SIGKILL)  # also if it leaves the group of processes
    run = "import runpy, sys; runpy.run_path(sys.argv[1])"  # not as __main__, whose end would not be the test's
    os.execv(sys.executable, [sys.executable, "-I", "-c", run, sys.argv[1]])
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
"""
"""Limits its process, and starts the program. Limits and namespaces are inherited; when the first process of a
namespace ends, all others in it do."""


def program(scoring: Scoring, output: str) -> str:
    """The program that an output stands for, with its test.

    An output in a code block, as chat models write it, replaces the head that it was asked to continue if it repeats
    it. Other outputs continue the head; if it is the head of a function, up to the end of its body. Text around code
    that is in no block is left out.
    """
    heads = list(re.finditer(r"^def\s+(\w+)", scoring.program, re.MULTILINE))
    wanted = re.compile(rf"^def\s+{heads[-1][1]}\b", re.MULTILINE) if heads else None
    blocks = [found[1] for found in _FENCE.finditer(output)]
    blocks.sort(key=lambda block: (wanted is not None and wanted.search(block) is not None, len(block)))
    written = blocks[-1] if blocks else output
    continues = not blocks and written.lstrip("\n")[:1].isspace()
    if wanted is not None and wanted.search(written) and not continues:
        if not blocks:
            written = _code_of(written)
        # Imports and helpers above the head stay; the head itself is there again.
        written = f"{scoring.program[: heads[-1].start()]}\n{written}"
    else:
        if heads and scoring.program.rstrip().endswith((":", '"""', "'''")):
            written = _body(written)
        written = f"{scoring.program}{written}"
    return f"{written}\n\n{scoring.test}\n\n__import__('os')._exit({PASSED})\n"


def run_code(scoring: Scoring, output: str) -> float:
    """1 if the program and its test run to their end within the limits; else 0."""
    with tempfile.TemporaryDirectory(prefix="snapstream-code-", ignore_cleanup_errors=True) as directory:
        path = Path(directory) / "program.py"
        path.write_text(program(scoring, output), "utf-8", errors="replace")
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _CONFINED, str(path)],
            cwd=directory,
            env=dict.fromkeys(("HOME", "TMPDIR"), directory)
            | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
            | {"PATH": "/usr/bin:/bin"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return float(process.wait(2 * SECONDS) == PASSED)
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
            "--run-code: a test program did not run. A process cannot be cut off from the network here if user "
            "namespaces are disabled (see sysctl kernel.unprivileged_userns_clone and, on Ubuntu, "
            "kernel.apparmor_restrict_unprivileged_userns) or if a container does not allow them"
        )


def _code_of(written: str) -> str:
    """The longest code that begins with the first line that looks like code."""
    lines = written.splitlines()
    is_code = re.compile(r"(?:import|from|def|class|async)\s|@")
    start = next((at for at, line in enumerate(lines) if is_code.match(line)), 0)
    for end in range(len(lines), start, -1):
        code = "\n".join(lines[start:end])
        try:
            ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return code
    return written


def _body(written: str) -> str:
    """The indented lines that an output begins with, which continue the body of a function."""
    lines = written.splitlines()
    end = next((at for at, line in enumerate(lines) if at and line.strip() and not line[:1].isspace()), len(lines))
    return "\n".join(lines[:end])

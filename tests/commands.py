"""The ``snapstream`` command in tests: as a process, in this process, and one command by itself."""

import io
import logging
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from snapstream.cli import app, main


def process(*arguments, stdin=None):
    """A process, as a user starts it; it takes three seconds to import torch and others."""
    command = [sys.executable, "-m", "snapstream.cli", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, input=stdin or "", timeout=300)


def run(*arguments, stdin=None):
    """The same in this process: from the command line's arguments to the exit code, and all that is written."""
    streams = [io.TextIOWrapper(io.BytesIO(data), encoding="utf-8") for data in ((stdin or "").encode(), b"", b"")]
    _, out, err = streams
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            patch.setattr(sys, name, value)
        patch.setattr(sys, "argv", ["snapstream", *map(str, arguments)])
        patch.setattr(logging.root, "handlers", [])  # which the command sets up
        with pytest.raises(SystemExit) as ended:
            main()
        texts = []
        for stream in (out, err):
            stream.flush()
            texts.append(stream.buffer.getvalue().decode())
    return subprocess.CompletedProcess(arguments, ended.value.code or 0, *texts)


def here(*arguments):
    """A command by itself, without what turns errors into lines."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])

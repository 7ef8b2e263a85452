"""Standard input and output, which may be closed, full, not text, or of another encoding."""

from __future__ import annotations

import os
import sys
from typing import IO, Any

from snapstream.errors import RequestError


def is_terminal() -> bool:
    """Whether somebody types at standard input."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_standard_input() -> str:
    """All of standard input.

    Raises:
        RequestError: It is closed, cannot be read, or is not text.
    """
    try:
        return decoded(_input().read(), "standard input")
    except OSError as error:
        raise RequestError(f"standard input cannot be read: {error.strerror or error}") from error


def read_line() -> str | None:
    """One line of standard input, with its end; ``None`` if there are no more.

    Raises:
        RequestError: It is closed, cannot be read, or is not text.
    """
    try:
        line = _input().readline()
    except OSError as error:
        raise RequestError(f"standard input cannot be read: {error.strerror or error}") from error
    return decoded(line, "a line of standard input") if line else None


def decoded(data: bytes, source: str) -> str:
    """Bytes as UTF-8 text.

    Raises:
        RequestError: They are none.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{source} is not UTF-8 text (byte {error.start})") from error


def prepare_output(*, needed: bool) -> None:
    """Let standard output write characters that its encoding lacks, as escapes.

    Args:
        needed: Whether the result goes there.

    Raises:
        RequestError: It is closed.
    """
    if sys.stdout is None and needed:
        raise RequestError("standard output is closed; there is nowhere to write to")
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Write what is still buffered, so that an error shows while it can be reported.

    Raises:
        OSError: It cannot be written.
    """
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def drop_output() -> None:
    """Let what could not be written go, so that the interpreter does not try again at its end."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError, AttributeError):  # not a file of the system
        pass


def _input() -> IO[bytes]:
    if sys.stdin is None:
        raise RequestError("standard input is closed; give the text as an argument or a file")
    buffer: Any = getattr(sys.stdin, "buffer", None)
    if buffer is None:
        raise RequestError("standard input is not a file")
    return buffer  # type: ignore[no-any-return]

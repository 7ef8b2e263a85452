"""Standard input and output, which may be closed, full, binary, or in another encoding."""

from __future__ import annotations

import os
import sys
from typing import IO, Any

from snapstream.errors import RequestError


def is_terminal() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_standard_input() -> str:
    """Read all of standard input.

    Raises:
        RequestError: It is closed, cannot be read, or is not UTF-8 text.
    """
    try:
        return decoded(_input().read(), "standard input")
    except OSError as error:
        raise RequestError(f"standard input cannot be read: {error.strerror or error}") from error


def read_line() -> str | None:
    """Read one line of standard input, including its line end; ``None`` at the end of input.

    Raises:
        RequestError: It is closed, cannot be read, or is not UTF-8 text.
    """
    try:
        line = _input().readline()
    except OSError as error:
        raise RequestError(f"standard input cannot be read: {error.strerror or error}") from error
    return decoded(line, "a line of standard input") if line else None


def decoded(data: bytes, source: str) -> str:
    """Decode UTF-8 text.

    Raises:
        RequestError: The bytes are not UTF-8 text.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{source} is not UTF-8 text (byte {error.start})") from error


def prepare_output(*, needed: bool) -> None:
    """Make standard output write characters that its encoding lacks as escapes.

    Args:
        needed: Whether the command writes its result there.

    Raises:
        RequestError: It is needed, but closed.
    """
    if sys.stdout is None and needed:
        raise RequestError("standard output is closed; there is nowhere to write to")
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Write what is still buffered, while an error can still be reported.

    Raises:
        OSError: It cannot be written.
    """
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def drop_output() -> None:
    """Discard what could not be written, so that the interpreter does not try again at exit."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError, AttributeError):  # standard output is not an operating system file
        pass


def _input() -> IO[bytes]:
    if sys.stdin is None:
        raise RequestError("standard input is closed; give the text as an argument or a file")
    buffer: Any = getattr(sys.stdin, "buffer", None)
    if buffer is None:
        raise RequestError("standard input is not a file")
    return buffer  # type: ignore[no-any-return]

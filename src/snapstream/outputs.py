"""Output files at paths that users give: written atomically, and never in place of anything but a regular file."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from snapstream.errors import ConfigurationError

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def regular_file(path: str | Path, *others: str | Path) -> Path:
    """Resolve the path of an output file through symbolic links; the file need not exist yet.

    Args:
        path: Path of the output file.
        others: Files that must not be overwritten, such as the input.

    Raises:
        OSError: The path is not that of a regular file, its directory does not exist, or it is one of the others.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = os.stat(path).st_mode  # not of target: links such as /dev/stdout may lead to a pipe, which has no path
    except FileNotFoundError:
        if target.parent.is_dir():
            return target
        raise OSError(errno.ENOENT, f"there is no directory {target.parent}", str(path)) from None
    for is_kind, kind in _KINDS:
        if is_kind(mode):
            raise OSError(errno.EINVAL, f"it is {kind}; give the path of a regular file", str(path))
    for other in others:
        if os.path.exists(other) and os.path.samefile(target, other):
            raise OSError(errno.EEXIST, f"it is the same file as {other}; give another one", str(path))
    return target


def check_output(path: str | Path, *others: str | Path) -> None:
    """Check an output file before anything takes time; see :func:`regular_file`.

    Raises:
        ConfigurationError: Nothing may be written there.
    """
    try:
        regular_file(path, *others)
    except OSError as error:
        raise ConfigurationError(f"output: {path}: {error.strerror}") from error


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary file that replaces the one at ``path``, unless writing fails or is interrupted.

    Raises:
        OSError: ``path`` is not that of a regular file, or it cannot be written.
    """
    target = regular_file(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        os.close(handle)
        with contextlib.suppress(FileNotFoundError):
            os.chmod(name, stat.S_IMODE(target.stat().st_mode))
        yield Path(name)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically.

    Raises:
        OSError: ``path`` is not that of a regular file, or it cannot be written.
    """
    with replacing(path) as file:
        file.write_text(text, encoding="utf-8")

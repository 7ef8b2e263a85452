"""Finds, builds if need be, and loads the library of kernels for this processor."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from pathlib import Path

from snapstream.kernels.cpu.build import HERE, LEVELS, BuildError, Level, build, compiler, library_name

logger = logging.getLogger(__name__)

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS = {
    "best_instructions": ((), _NUMBER),
    "has_instructions": ((_NUMBER,), _NUMBER),
    "prefill_attention": ((_POINTER, _NUMBER, _NUMBER, _NUMBER), _NUMBER),
    "window_attention": ((_POINTER, _POINTER, _NUMBER, _NUMBER, _NUMBER), _NUMBER),
    "rows": ((_POINTER, _NUMBER, _NUMBER, _NUMBER), _NUMBER),
    "scratch": ((_POINTER, _NUMBER), _NUMBER),
    "run": ((_POINTER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _NUMBER), _NUMBER),
}


def supported_levels() -> list[Level]:
    """Levels that this processor has, best first."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # another system than Linux
        return []
    flags = set(next((line for line in lines if line.startswith(("flags", "Features"))), "").partition(":")[2].split())
    return [level for level in LEVELS if level.needs <= flags]


def cache_directory() -> Path:
    """Where libraries go that are built when they are first needed."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "snapstream"


@functools.cache
def load() -> ctypes.CDLL | None:
    """The best library there is, or that can be built; ``None``, with a warning that says why, if there is none."""
    levels = supported_levels()
    if not levels:
        logger.warning("This processor or system is not one the CPU kernels know: slower stock operations are used.")
        return None
    try:
        return open_library(_library(levels[0]))
    except (OSError, BuildError) as error:
        if compiler() is None:
            reason = "No C++ compiler found, and no kernels in this installation"
        else:
            reason = f"The CPU kernels could not be built or loaded ({error})"
        logger.warning("%s: slower stock operations are used. Install g++ 11 or newer to change that.", reason)
        return None


def native() -> ctypes.CDLL:
    """What :func:`load` returns.

    Raises:
        RuntimeError: There is none.
    """
    library = load()
    if library is None:
        raise RuntimeError("the CPU kernels are not available; see the warning above, and docs/install.md")
    return library


def available() -> bool:
    """Whether :func:`load` could succeed, without doing it: the library is there, or a compiler is."""
    levels = supported_levels()
    return bool(levels) and (compiler() is not None or any(path.exists() for path in _places(levels[0])))


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library.

    Raises:
        OSError: It cannot be loaded, or is another one.
    """
    library = ctypes.CDLL(str(path))
    for name, (arguments, result) in _FUNCTIONS.items():
        try:
            function = getattr(library, f"snapstream_{name}")
        except AttributeError as error:
            raise OSError(f"{path} is not a library of this package: {error}") from error
        function.argtypes, function.restype = arguments, result
    return library


def _places(level: Level) -> tuple[Path, Path]:
    return HERE / library_name(level), cache_directory() / library_name(level)


def _library(level: Level) -> Path:
    """Installations bring it; else it is compiled for this processor when it is first needed."""
    for path in _places(level):
        if path.exists():
            return path
    if compiler() is not None:
        print("Building the CPU kernels for this processor, once; about ten seconds.", file=sys.stderr, flush=True)
    return build(level, cache_directory())

"""Finds, builds if necessary, and loads the library of kernels for this processor."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from pathlib import Path

import torch

from snapstream.kernels.cpu.build import HERE, LEVELS, BuildError, Level, build, compiler, library_name, remove_others

logger = logging.getLogger(__name__)

KEPT = 30
"""Days for which :func:`cache_directory` keeps libraries of other versions."""

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS = {
    "best_instructions": ((), _NUMBER),
    "has_instructions": ((_NUMBER,), _NUMBER),
    "prefill_attention": ((_POINTER, _NUMBER, _NUMBER, _NUMBER), _NUMBER),
    "window_attention": ((_POINTER, _POINTER, _NUMBER, _NUMBER, _NUMBER), _NUMBER),
    "key_differences": ((_POINTER, _NUMBER, _NUMBER), _NUMBER),
    "encode": ((_POINTER, _NUMBER), _NUMBER),
    "smooth": ((_POINTER, _NUMBER), _NUMBER),
    "take_in_turn": ((_POINTER, _NUMBER), _NUMBER),
    "select_entries": ((_POINTER, _NUMBER), _NUMBER),
    "pack": ((_POINTER, _NUMBER), _NUMBER),
    "widen": ((_POINTER, _POINTER, _NUMBER), _NUMBER),
    "scratch": ((_POINTER, _NUMBER), _NUMBER),
    "run": ((_POINTER, _POINTER, _NUMBER, _NUMBER, _NUMBER, _NUMBER), _NUMBER),
}


def supported_levels() -> list[Level]:
    """Levels that this processor supports, best first."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return []
    flags = set(next((line for line in lines if line.startswith(("flags", "Features"))), "").partition(":")[2].split())
    return [level for level in LEVELS if level.needs <= flags]


def cache_directory() -> Path | None:
    """Directory of libraries that are built when first needed; ``None`` for a user without a home directory."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "snapstream"
    except RuntimeError:
        return None


@functools.cache
def load() -> ctypes.CDLL | None:
    """The best library that exists or can be built; ``None`` if there is none.

    A warning says why there is none, or why it is not the best one for this processor.
    """
    levels = supported_levels()
    if not levels:
        logger.warning("The CPU kernels do not support this processor or system: slower stock operations are used.")
        return None
    reason = ""
    for level in levels:
        try:
            library = _library(level)
        except (OSError, BuildError) as error:
            reason = reason or f"The CPU kernels for {level.name} could not be built or loaded ({error})"
        else:
            if reason:
                logger.warning("%s: those for %s are used.", reason, level.name)
            return library
    logger.warning("%s: slower stock operations are used. Install g++ 12 or newer to build the kernels.", reason)
    return None


def native() -> ctypes.CDLL:
    """The library that :func:`load` returns.

    Raises:
        RuntimeError: There is none.
    """
    library = load()
    if library is None:
        raise RuntimeError("the CPU kernels are not available; see the warning above, and docs/install.md")
    return library


def run(function: str, *arguments: ctypes.Structure | int, of: str) -> None:
    """Call a function of :func:`native` with torch's number of threads; structures are passed by reference.

    Raises:
        MemoryError: There is not enough memory for temporaries; ``of`` names the task in the message.
        RuntimeError: As for :func:`native`.
    """
    passed = (each if isinstance(each, int) else ctypes.byref(each) for each in arguments)
    if not getattr(native(), f"snapstream_{function}")(*passed, torch.get_num_threads()):
        raise MemoryError(f"not enough memory for the temporaries of {of}")


def available() -> bool:
    """Whether :func:`load` could succeed, without loading: there is a library or a compiler."""
    levels = supported_levels()
    if levels and compiler() is not None:
        return True
    return any(path.exists() for level in levels for path in _places(level))


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library.

    Raises:
        OSError: It cannot be loaded, or is not a library of this package.
    """
    library = ctypes.CDLL(str(path))
    for name, (arguments, result) in _FUNCTIONS.items():
        try:
            function = getattr(library, f"snapstream_{name}")
        except AttributeError as error:
            raise OSError(f"{path} is not a library of this package: {error}") from error
        function.argtypes, function.restype = arguments, result
    return library


def _places(level: Level) -> list[Path]:
    """Where the library of a level may be: in the installation, or in :func:`cache_directory`."""
    name = library_name(level)
    return [directory / name for directory in (HERE, cache_directory()) if directory is not None]


def _library(level: Level) -> ctypes.CDLL:
    """The library of a level: from the installation, or compiled for this processor when first needed."""
    problem: Exception | None = None
    for path in _places(level):
        if path.exists():
            try:
                return open_library(path)
            except OSError as error:  # for example, built for a newer C library, or just removed
                problem = error
                if path.parent != HERE:
                    path.unlink(missing_ok=True)  # so that it is rebuilt
    cache = cache_directory()
    if compiler() is None or cache is None:
        missing = "no home directory to build them in" if cache is None else "no C++ compiler"
        raise problem or BuildError(f"this installation has none, and there is {missing}")
    print("Building the CPU kernels for this processor (once, about a minute).", file=sys.stderr, flush=True)
    library = open_library(build(level, cache))
    remove_others(cache, days=KEPT)
    return library

"""Compiles the kernels in this folder: one library per instruction set level.

The kernels are plain C functions on pointers and use nothing from torch or Python. One library therefore works with
every version of both, and building needs only a C++ compiler. The structures that they take are declared by
``interface.py``. ``setup.py`` loads this file by its path, without the package, so it may import only the standard
library.

Each level is a separate library, not a set of functions in a common one. The linker would merge templates of the C++
library that several levels use into one copy, which might use instructions that an older processor lacks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import runpy
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-w"),
    *("-fno-math-errno", "-ffp-contract=fast"),
)
LINKING = ("-shared", "-s", "-static-libstdc++", "-static-libgcc")  # runs on machines without a compiler
MOST_OF_AN_ERROR = 1000
"""Characters of the compiler's output to report: the first error explains the others."""
_AVX512 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_VNNI = (*_AVX512, "-mavx512vnni")


@dataclass(frozen=True)
class Level:
    """The instruction set of a library.

    Attributes:
        name: Part of the library's file name.
        needs: Flags that ``/proc/cpuinfo`` must list.
        flags: Compiler flags.
    """

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_V3 = frozenset(("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_PAIRS = _V4 | {"avx512_vnni", "avx512_bf16"}
_X86 = (
    Level("amx", _PAIRS | {"amx_tile", "amx_bf16"}, (*_VNNI, "-mavx512bf16", "-mamx-tile", "-mamx-bf16")),
    Level("avx512-bf16", _PAIRS, (*_VNNI, "-mavx512bf16")),
    Level("avx512-vnni", _V4 | {"avx512_vnni"}, _VNNI),
    Level("avx512", _V4, _AVX512),
    Level("avx2", _V3, ("-march=x86-64-v3",)),
)
LEVELS = _X86 if platform.machine() in ("x86_64", "AMD64") else (Level("generic", frozenset(), ()),)
"""Best first."""


class BuildError(Exception):
    """The build failed; the message holds the compiler's output."""


def compiler() -> list[str] | None:
    """The command of the C++ compiler, from ``CXX`` or ``g++``; ``None`` if there is none."""
    try:
        command = shlex.split(os.environ.get("CXX") or "g++")
    except ValueError:  # unbalanced quotes
        return None
    return command if command and shutil.which(command[0]) else None


def library_name(level: Level) -> str:
    """File name of a level's library; it changes with the sources."""
    digest = hashlib.sha256(repr((FLAGS, LINKING, level.flags, _header())).encode())
    for path in _sources("*.cpp", "*.h"):
        digest.update(path.name.encode() + path.read_bytes())
    return f"libsnapstream-{level.name}-{digest.hexdigest()[:16]}.so"


def build(level: Level, directory: Path, workers: ThreadPoolExecutor | None = None) -> Path:
    """Compile a level's library into a directory, unless it exists, and return its path.

    The library is moved into place when it is complete, so an interrupted build leaves nothing that would be loaded.

    Args:
        level: The level.
        directory: Where the library goes.
        workers: Threads that wait for compilers; by default one per core, for this library alone.

    Raises:
        BuildError: There is no compiler, or it failed.
        OSError: The directory cannot be written to.
    """
    target = directory / library_name(level)
    if target.exists():
        return target
    program = compiler()
    if program is None:
        raise BuildError("no C++ compiler found")
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        workers = workers or stack.enter_context(ThreadPoolExecutor(os.cpu_count()))
        (folder / "interface.h").write_text(_header())
        compiling, flags = [*program, *FLAGS, *level.flags], ("-I", str(folder), "-c")
        # The largest source takes half of the time, so it goes first.
        sources = sorted(_sources("*.cpp"), key=lambda source: source.name != "step.cpp")
        objects = {source: folder / f"{source.stem}.o" for source in sources}
        waiting = [
            workers.submit(_run, [*compiling, *flags, str(source), "-o", str(made)]) for source, made in objects.items()
        ]
        for compiled in waiting:
            compiled.result()
        _run([*compiling, *LINKING, *map(str, objects.values()), "-o", str(folder / target.name)])
        os.replace(folder / target.name, target)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr.strip()[:MOST_OF_AN_ERROR]}")


def remove_others(directory: Path, *, days: float = 0.0) -> None:
    """Remove libraries that were built from other sources at least ``days`` ago."""
    current, oldest = {library_name(level) for level in LEVELS}, time.time() - days * 24 * 3600
    for path in directory.glob(f"libsnapstream-*-{'?' * 16}.so"):
        with contextlib.suppress(OSError):  # already removed, or not permitted
            if path.name not in current and path.stat().st_mtime <= oldest:
                path.unlink()


def build_all(directory: Path) -> tuple[list[Path], list[tuple[Level, Exception]]]:
    """Compile all levels that the compiler supports, and remove libraries of other sources from the directory.

    Returns:
        The libraries, and the levels that failed with their errors.
    """
    built: list[Path] = []
    failed: list[tuple[Level, Exception]] = []
    with ThreadPoolExecutor(os.cpu_count()) as workers, ThreadPoolExecutor(len(LEVELS)) as threads:
        waiting = [(level, threads.submit(build, level, directory, workers)) for level in LEVELS]
        for level, future in waiting:
            try:
                built.append(future.result())
            except (BuildError, OSError) as error:
                failed.append((level, error))
    remove_others(directory)
    return built, failed


@functools.cache
def _header() -> str:
    """The declarations that ``interface.py`` generates."""
    if __package__:
        from snapstream.kernels.cpu.interface import header

        return header()
    text: str = runpy.run_path(str(HERE / "interface.py"))["header"]()  # this file, too, was loaded by its path
    return text


def _sources(*patterns: str) -> Iterable[Path]:
    return sorted(path for pattern in patterns for path in HERE.glob(pattern))

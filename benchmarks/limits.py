"""What this machine can do at most: how fast it multiplies, and how fast it reads memory."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from snapstream.threads import SPINS


def _compile(source: str, target: str, *flags: str) -> None:
    compiler = os.environ.get("CXX") or "g++"
    path = Path(__file__).with_name(source)
    subprocess.run([compiler, "-O2", "-march=native", *flags, path, "-o", target], check=True)


def multiplications() -> dict[str, float]:
    """GFLOP/s by kind of multiplication, from limits.cpp."""
    with tempfile.TemporaryDirectory() as directory:
        program = f"{directory}/limits"
        _compile("limits.cpp", program, "-fopenmp")
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        found: dict[str, float] = json.loads(subprocess.check_output([program], env=os.environ | threads))
        return found


def as_the_command_does() -> None:
    """Start this program again with threads that sleep soon, where that was not asked for before torch was loaded."""
    if "GOMP_SPINCOUNT" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"GOMP_SPINCOUNT": SPINS})


class MemoryReader:
    """Reads as many bytes as a step reads, over and over: no program can do a step faster than that.

    A buffer of the same size, since what fits the processor's caches is read faster than memory is: of some machines
    these hold hundreds of megabytes.
    """

    def __init__(self, most: int) -> None:
        self.buffer = torch.ones(most // 4 + 1)
        with tempfile.TemporaryDirectory() as directory:
            library = f"{directory}/reader.so"
            _compile("reader.cpp", library, "-shared", "-fPIC", "-pthread")
            self._read = ctypes.CDLL(library).read_memory
        self._read.argtypes = (ctypes.c_void_p, *[ctypes.c_int64] * 3)
        self._read.restype = ctypes.c_float

    def __call__(self, size: int, passes: int = 1) -> None:
        """Read ``size`` bytes so many times."""
        assert size <= self.buffer.nbytes
        self._read(self.buffer.data_ptr(), size, passes, torch.get_num_threads())

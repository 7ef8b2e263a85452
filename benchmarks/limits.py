"""The limits of this machine: its multiplication rate, and its memory read bandwidth."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from snapstream.pages import tensors_of_zeros
from snapstream.threads import SPINS


def _compile(source: str, target: str, *flags: str) -> None:
    compiler = os.environ.get("CXX") or "g++"
    path = Path(__file__).with_name(source)
    subprocess.run([compiler, "-O2", "-march=native", *flags, path, "-o", target], check=True)


def multiplications() -> dict[str, float]:
    """GFLOP/s by kind of multiplication, measured by limits.cpp."""
    with tempfile.TemporaryDirectory() as directory:
        program = f"{directory}/limits"
        _compile("limits.cpp", program, "-fopenmp")
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        found: dict[str, float] = json.loads(subprocess.check_output([program], env=os.environ | threads))
        return found


def as_the_command_does() -> None:
    """Restart this program with threads that stop spinning early, as the ``snapstream`` command does.

    The setting must be in the environment before torch is loaded; if it is already there, nothing is done.
    """
    if "GOMP_SPINCOUNT" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"GOMP_SPINCOUNT": SPINS})


class MemoryReader:
    """Repeatedly reads as many bytes as a decode step does, a lower bound on the time of a step.

    The buffer has the same size as the data of the step, because the processor's caches, which hold hundreds of
    megabytes on some machines, are faster than memory.
    """

    def __init__(self, most: int) -> None:
        # On huge pages, as weights and caches are.
        (self.buffer,) = tensors_of_zeros([((most // 4 + 1,), torch.float32)])
        self.buffer.fill_(1.0)
        with tempfile.TemporaryDirectory() as directory:
            library = f"{directory}/reader.so"
            _compile("reader.cpp", library, "-shared", "-fPIC", "-pthread")
            self._read = ctypes.CDLL(library).read_memory
        self._read.argtypes = (ctypes.c_void_p, *[ctypes.c_int64] * 4)
        self._read.restype = ctypes.c_float
        self._streams = min((1, 8), key=self._time)  # what is faster depends on the processor

    def _time(self, streams: int) -> float:
        """Seconds of the fastest of three rounds with so many streams per thread."""
        self._streams, times = streams, []
        for _ in range(3):
            begin = time.perf_counter()
            self(self.buffer.nbytes)
            times.append(time.perf_counter() - begin)
        return min(times)

    def __call__(self, size: int, passes: int = 1) -> None:
        """Read ``size`` bytes ``passes`` times."""
        assert size <= self.buffer.nbytes
        self._read(self.buffer.data_ptr(), size, passes, torch.get_num_threads(), self._streams)

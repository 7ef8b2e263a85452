"""Builds and loads ``cpu.cpp``: decode attention and few-row matrix products that run at the speed of memory.

Compiled for this machine at first use (well under a minute) and kept in torch's extension cache. Without a C++
compiler everything still works, on slower stock operations.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu.cpp")
MULTIPLE = 32
"""Sizes the kernels read in one go: inner sizes must be multiples of it."""
SKINNY_ROWS = 16
"""Most rows of ``x`` for which :func:`skinny_linear` beats the library's matrix product."""


def compiler_available() -> bool:
    """Whether kernels and compiled graphs can be built: Linux, a C++ compiler and the headers of Python."""
    compiler = os.environ.get("CXX") or "g++"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return sys.platform.startswith("linux") and shutil.which(compiler) is not None and headers.exists()


loaded = False
"""Whether :func:`available` has loaded the kernels; products of models look here."""


@functools.cache
def available() -> bool:
    """Load the kernels, building them first if need be; ``False``, with a warning, where that is impossible."""
    if not compiler_available():
        logger.warning(
            "No C++ compiler or no Python headers found: decoding on the CPU falls back to slower stock kernels. "
            "Install g++ and python3-dev to change that."
        )
        return False
    try:
        torch.ops.load_library(str(_library()))  # type: ignore[no-untyped-call]
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        logger.warning("The CPU kernels could not be built; falling back to slower stock kernels. %s", error)
        return False
    _register_shapes()
    global loaded  # noqa: PLW0603 (like the registry of operations that it tells about)
    loaded = True
    return True


def _library() -> Path:
    """The compiled kernels, built in a directory of their own and then moved into place.

    So a build that is killed leaves nothing behind that another process would wait for or load.
    """
    import ninja
    from torch.utils import cpp_extension

    # The name carries source, torch version and processor: what differs in one of them is another file.
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    features = next((line for line in cpuinfo if line.startswith(("flags", "Features"))), "")
    digest = hashlib.sha256(f"{SOURCE.read_text()}{torch.__version__}{features}".encode()).hexdigest()[:16]
    name = f"snapstream_cpu_{digest}"
    # Loading a second time, from its final place, is the same file to the system.
    library = Path(cpp_extension.get_default_build_root()) / f"{name}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as directory:
            path = os.environ.get("PATH", "")
            os.environ["PATH"] = f"{ninja.BIN_DIR}{os.pathsep}{path}"  # the wheel's, whether or not one is installed
            try:
                cpp_extension.load(
                    name=name,
                    sources=[str(SOURCE)],
                    extra_cflags=["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast"],
                    build_directory=directory,
                    is_python_module=False,
                )
            finally:
                os.environ["PATH"] = path
            os.replace(Path(directory) / f"{name}.so", library)
    return library


def _register_shapes() -> None:
    """Tell the tracer of compiled graphs what the operations return."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x.new_empty(x.shape[0], weight.shape[0])

    def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return x.new_empty(x.shape[0], weight.shape[1])

    def attention(query: Tensor, keys: Tensor, values: Tensor, valid: Tensor, scale: float) -> Tensor:
        return query.new_empty(query.shape)

    torch.library.register_fake("snapstream_cpu::skinny_linear", linear)
    torch.library.register_fake("snapstream_cpu::grouped_linear", grouped)
    torch.library.register_fake("snapstream_cpu::decode_attention", attention)


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias`` for few rows, reading the weight once; sums in float32.

    Args:
        x: ``[M, K]``, float32 or bfloat16, ``K`` a multiple of 32.
        weight: ``[N, K]``, contiguous, of the same type.
        bias: ``[N]`` or ``None``.

    Returns:
        ``[M, N]``. Row ``m`` depends on row ``m`` of ``x`` alone, to the bit.
    """
    result: Tensor = torch.ops.snapstream_cpu.skinny_linear(x, weight, bias)
    return result


def decode_attention(query: Tensor, keys: Tensor, values: Tensor, valid: Tensor, scale: float) -> Tensor:
    """Attend from one token per sequence to the first ``valid`` entries of its cache, without expanding KV heads.

    Args:
        query: ``[B, H, D]``, float32 or bfloat16, ``D`` a multiple of 32.
        keys: ``[B, N, C, D]``, contiguous.
        values: ``[B, N, C, D]``, contiguous.
        valid: int64 ``[B]``; 0 gives zeros and reads nothing.
        scale: Factor on the logits.

    Returns:
        ``[B, H, D]``. Row ``b`` depends on sequence ``b`` alone, to the bit.
    """
    result: Tensor = torch.ops.snapstream_cpu.decode_attention(query, keys, values, valid, scale)
    return result

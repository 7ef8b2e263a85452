"""Builds and loads the kernels of this folder: attention, and products of few rows, at the speed of the processor.

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
from typing import Any

import torch
from torch import Tensor

from snapstream.compression.scoring import plain_window_attention, window_attention

logger = logging.getLogger(__name__)

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
_HEADERS = sorted(Path(__file__).parent.glob("*.h"))
MULTIPLE = 32
"""Sizes the kernels read in one go: inner sizes must be multiples of it."""
BLOCK = 64
"""Keys that prefill attention takes at a time; packed values come in blocks of as many."""
INSTRUCTIONS = ("portable", "pairs", "tiles")
"""How prefill attention multiplies: float32 on any processor, dot products of bfloat16 pairs, tile registers (AMX)."""
SKINNY_ROWS = 16
"""Most rows of ``x`` for which :func:`skinny_linear` beats the library's matrix product."""


def compiler_available() -> bool:
    """Whether kernels and compiled graphs can be built: Linux, a C++ compiler and the headers of Python."""
    compiler = os.environ.get("CXX") or "g++"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return sys.platform.startswith("linux") and shutil.which(compiler) is not None and headers.exists()


loaded = False
"""Whether :func:`available` has loaded the kernels; products of models look here."""
_best_instructions = "portable"  # for bfloat16; known once the kernels are loaded


@functools.cache
def available() -> bool:
    """Load the kernels, building them first if need be; ``False``, with a warning, where that is impossible."""
    if not compiler_available():
        logger.warning(
            "No C++ compiler or no Python headers found: prompts and decoding on the CPU fall back to slower stock "
            "kernels. Install g++ and python3-dev to change that."
        )
        return False
    try:
        torch.ops.load_library(str(_library()))  # type: ignore[no-untyped-call]
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        logger.warning("The CPU kernels could not be built; falling back to slower stock kernels. %s", error)
        return False
    _register_shapes()
    global loaded, _best_instructions
    loaded, _best_instructions = True, INSTRUCTIONS[torch.ops.snapstream_cpu.best_instructions()]
    logger.info("Prompts in bfloat16 are read with %s.", _best_instructions)
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
    text = "".join(path.read_text() for path in (*SOURCES, *_HEADERS))
    digest = hashlib.sha256(f"{text}{torch.__version__}{features}".encode()).hexdigest()[:16]
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
                    sources=[str(path) for path in SOURCES],
                    extra_cflags=["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast"],
                    build_directory=directory,
                    is_python_module=False,
                )
            finally:
                os.environ["PATH"] = path
            os.replace(Path(directory) / f"{name}.so", library)
    return library


@window_attention.register_kernel("cpu")
def _window_attention(queries: Tensor, keys: Tensor, *rest: Any) -> Tensor:
    """See :func:`snapstream.compression.scoring.plain_window_attention`, which does what there is no kernel for."""
    scale = rest[3]
    kernel_fits = (
        loaded
        and keys.dtype in (torch.float32, torch.bfloat16)
        and queries.dtype == keys.dtype
        and keys.shape[3] % MULTIPLE == 0
        and keys.stride(3) == queries.stride(3) == 1
        and keys.stride(2) % 2 == 0
        and scale > 0
    )
    if not kernel_fits:
        return plain_window_attention(queries, keys, *rest)
    name = INSTRUCTIONS.index(prefill_instructions(keys.dtype))
    result: Tensor = torch.ops.snapstream_cpu.window_attention(queries, keys, *rest[:-1], name)  # but for key_chunk
    return result


def _register_shapes() -> None:
    """Tell the tracer of compiled graphs what the operations return."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x.new_empty(x.shape[0], weight.shape[0])

    def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return x.new_empty(x.shape[0], weight.shape[1])

    def attention(query: Tensor, keys: Tensor, values: Tensor, valid: Tensor, scale: float) -> Tensor:
        return query.new_empty(query.shape)

    def chunk(query: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
        return query.new_empty(*query.shape[:2], values.shape[2])

    torch.library.register_fake("snapstream_cpu::prefill_attention", chunk)
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


def prefill_instructions(dtype: torch.dtype) -> str:
    """Which of :data:`INSTRUCTIONS` are fastest on this processor for numbers of a type."""
    return _best_instructions if dtype == torch.bfloat16 else "portable"


def has_instructions(name: str) -> bool:
    """Whether this processor, and its system, has one of :data:`INSTRUCTIONS`."""
    result: bool = torch.ops.snapstream_cpu.has_instructions(INSTRUCTIONS.index(name))
    return result


def packed_shape(values: torch.Size, instructions: str) -> tuple[int, ...]:
    """Shape of the packed form of values ``[N, L, V]``, ``[N, blocks, V, BLOCK]``; ``(0,)`` if it is not needed."""
    N, L, V = values
    return (0,) if instructions == "portable" else (N, -(-L // BLOCK), V, BLOCK)


def prefill_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    scale: float,
    *,
    packed: Tensor | None = None,
    packed_until: Tensor | None = None,
    instructions: str | None = None,
) -> Tensor:
    """Attend causally from a chunk of tokens to everything before it and to itself.

    What comes out for a token is the same to the bit however the prompt is cut into chunks.

    Args:
        query: ``[T, H, D]``, float32 or bfloat16, ``D`` a multiple of 32.
        keys: ``[N, L, D]``, of the same type; the last numbers of a row lie side by side, rows where they like.
        values: ``[N, L, V]``, ``V`` a multiple of 32; may be part of the keys.
        start: Entry of the first token, int64 scalar; entries ``start .. start + T`` hold the chunk itself.
        scale: Factor on the logits, positive.
        packed: Memory of :func:`packed_shape` for values in the order they are multiplied in; its own if ``None``.
        packed_until: How many entries are in ``packed`` since an earlier call, int64 scalar; the rest is added.
        instructions: One of :data:`INSTRUCTIONS`; the fastest ones if ``None``.

    Returns:
        ``[T, H, V]``.
    """
    name = prefill_instructions(query.dtype) if instructions is None else instructions
    if packed is None or packed_until is None:
        packed = values.new_empty(packed_shape(values.shape, name))
        packed_until = start.new_zeros(())
    result: Tensor = torch.ops.snapstream_cpu.prefill_attention(
        query, keys, values, start, scale, packed, packed_until, INSTRUCTIONS.index(name)
    )
    return result

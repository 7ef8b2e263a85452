"""Triton kernels for CUDA devices.

They cover decode attention, attention for prompts where torch's kernels are slower or do not run, votes, key
differences and selection of entries, norms, rotations, cache writes, and products with weights in blocks. Triton comes
with CUDA builds of torch. Without it everything still works, with slower stock operations and with widened weights. It
is not imported before it is needed.

With ``TRITON_INTERPRET=1`` in the environment, kernels run on the CPU in Triton's interpreter: slowly, but with the
same steps. This is how they are tested without a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from snapstream.kernels.formats import LANES
from snapstream.kernels.weight import BlockWeight, Weight

OLDEST = (8, 0)
"""Minimum compute capability, which products of bfloat16 require."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HOPPER = 9
"""Compute capability of the H100 and the H200. A device that is not present is assumed to be one."""
PROCESSORS = 132
"""Multiprocessors assumed for a device that is not present: those of an H100."""
MEMORY = 232_448
"""Shared memory per program, in bytes, assumed for a device that is not present: that of an H100."""
LATENTS_MEMORY = 160_000
"""Shared memory that heads of more than :data:`SMALL_HEAD` elements need."""
SMALL_HEAD, LARGEST_HEAD = 256, 576
"""Largest head size on every device, and on devices with enough shared memory."""
LEAST_ENTRIES = 128
"""Minimum cache entries per program in decoding."""
PROGRAMS_PER_PROCESSOR = 8
"""Target for decoding if slots are long enough: two or three run concurrently, and the last wave is rarely full."""
MOST_SPLITS = 32
"""Maximum number of parts into which decoding splits the entries of a slot."""
BLOCK_ROWS = 64
"""Rows of a weight in blocks per program, for many rows of ``x``; for few, programs have fewer."""
MOST_COLUMN_SPLITS, LEAST_COLUMNS = 16, 256
"""Maximum number of parts into which the columns of a weight in blocks are split, and minimum columns of a part."""

interpreting = False
"""Whether kernels run on CPU tensors in the interpreter; :func:`interpret` sets it."""


def missing(device: torch.device) -> str | None:
    """Why a device has no kernels, or ``None`` if it has. A device that is not present is assumed to have them."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return None
    if not _installed():
        return "triton is not installed (pip install triton)"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return f"the device is {device}, and TRITON_INTERPRET=1 is not set"
    return _missing_here(device.index or 0)


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _missing_here(index: int) -> str | None:
    found = torch.cuda.get_device_capability(index)
    if found < OLDEST:
        return f"the device has compute capability {found[0]}.{found[1]}; kernels need {OLDEST[0]}.{OLDEST[1]}"
    from triton.runtime import driver

    try:
        driver.active.get_current_target()  # compiles a helper module, which needs a C compiler
    except Exception as error:
        return f"triton cannot start here: {error}"
    return None


def reads_fast(device: torch.device, dtype: torch.dtype, size: int, value_size: int) -> bool:
    """Whether prefill attention of this package is faster than torch's flash kernels; measured on an H200."""
    if size != value_size or size not in (64, 128) or dtype == torch.float32:
        return False
    is_here = device.type == "cuda" and torch.cuda.is_available()
    return not is_here or torch.cuda.get_device_capability(device)[0] == HOPPER


@functools.cache
def memory_of_processor(device: torch.device) -> int:
    """Shared memory of a program on a device, in bytes; that of an H100 for a device that is not present."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return MEMORY
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", MEMORY))


def interpret() -> None:
    """From now on, run kernels on CPU tensors in the interpreter."""
    global interpreting  # noqa: PLW0603 (every call checks it)
    interpreting = True


def takes(x: Tensor) -> bool:
    """Whether kernels support the device and dtype of ``x``."""
    if x.device.type == "cpu":
        return interpreting and x.dtype in DTYPES
    is_right = x.device.type == "cuda" and x.dtype in DTYPES
    return is_right and _installed() and _missing_here(x.device.index or 0) is None


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """A context for launches on a device, because Triton launches on the thread's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def column_splits(rows: int, columns: int, device: torch.device) -> int:
    """Into how many parts the columns of a weight in blocks are split, so that there are enough programs.

    It does not depend on the rows that are multiplied.
    """
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors(device) // -(-rows // LANES))
    return max(1, min(wanted, MOST_COLUMN_SPLITS, columns // LEAST_COLUMNS))


def split_bytes(weight: Weight, device: torch.device) -> int:
    """Bytes of the sums of a product with such parts, per row of ``x``."""
    if len(weight.shape) > 2:  # experts: not split
        return 0
    rows = (part.shape[0] for part in weight.parts if isinstance(part, BlockWeight))
    splits = ((each, column_splits(each, weight.shape[1], device)) for each in rows)
    return max((each * count * 4 for each, count in splits if count > 1), default=0)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; those of an H100 for a device that is not present."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

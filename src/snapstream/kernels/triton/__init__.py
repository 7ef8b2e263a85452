"""Kernels for CUDA devices, in Triton.

They are for attention of decoding and of prompts that torch's kernels do not take, for votes and choice of entries, for
norms and rotations, and for writing to caches. Triton comes with CUDA builds of torch. Without it everything still
works, on slower stock operations; nothing of it is imported before it is needed.

With ``TRITON_INTERPRET=1`` in the environment kernels run in Triton's interpreter, on the CPU: slowly, but step by step
the same, which is how they are tested where there is no device.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

OLDEST = (8, 0)
"""Compute capability that kernels need at least, for products of bfloat16."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROCESSORS = 132
"""Multiprocessors of a device that is not here, as of an H100."""
MEMORY = 232_448
"""Bytes of a multiprocessor's own memory that a program may have, as of an H100."""
LATENTS_MEMORY = 160_000
"""What kernels for heads of more than :data:`SMALL_HEAD` numbers need of it."""
SMALL_HEAD, LARGEST_HEAD = 256, 576
"""Numbers of a head that kernels take on every device, and on those with enough memory."""
LEAST_ENTRIES = 128
"""Entries of a cache that are worth a program of their own in decoding."""
PROGRAMS_PER_PROCESSOR = 8
"""That decoding wants where slots are long enough: two or three run at a time, and the last round is rarely full."""
MOST_SPLITS = 32
"""Parts that decoding splits the entries of a slot into at most."""

interpreting = False
"""Whether kernels are for tensors on the CPU, in the interpreter; :func:`interpret` sets it."""


def missing(device: torch.device) -> str | None:
    """Why there are no kernels for a device, or ``None`` if there are. A device that is not here may have them."""
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
        driver.active.get_current_target()  # it compiles a module of its own, for which it needs a C compiler
    except Exception as error:
        return f"triton does not start here: {error}"
    return None


@functools.cache
def memory_of_processor(device: torch.device) -> int:
    """Bytes of its own that a program may have on a device; those of an H100 for a device that is not here."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return MEMORY
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", MEMORY))


def interpret() -> None:
    """From now on the interpreter runs kernels for tensors on the CPU."""
    global interpreting  # noqa: PLW0603 (rows and products ask it at every call)
    interpreting = True


def takes(x: Tensor) -> bool:
    """Whether kernels take such numbers where they are."""
    if x.device.type == "cpu":
        return interpreting and x.dtype in DTYPES
    is_right = x.device.type == "cuda" and x.dtype in DTYPES
    return is_right and _installed() and _missing_here(x.device.index or 0) is None


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Around launches on a device: Triton launches on the thread's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

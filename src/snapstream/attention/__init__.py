"""Attention over the staging cache of a prefill and over compressed caches, one file per backend.

=========  ====================  ==========================================================================
backend    devices               what it reads
=========  ====================  ==========================================================================
``sdpa``   any                   every entry of the (bucketed) cache, invalid ones masked
``cpu``    CPU with the kernels  valid entries only
=========  ====================  ==========================================================================
"""

from __future__ import annotations

import torch

from snapstream.attention.base import AttentionBackend
from snapstream.attention.cpu import CpuAttention
from snapstream.attention.sdpa import SdpaAttention
from snapstream.errors import ConfigurationError
from snapstream.kernels import cpu as cpu_kernels

__all__ = ["AttentionBackend", "CpuAttention", "SdpaAttention", "choose_backend"]


def choose_backend(name: str, device: torch.device, dtype: torch.dtype, *sizes: int) -> AttentionBackend:
    """The backend called ``name``, or for ``auto`` the fastest one that supports a device, a type and sizes of heads.

    Raises:
        ConfigurationError: An unknown backend, or one that cannot run here; the message says why.
    """
    backends: dict[str, type[AttentionBackend]] = {"cpu": CpuAttention, "sdpa": SdpaAttention}
    if name == "auto":
        unsupported = CpuAttention.unsupported(device, dtype, *sizes)
        return SdpaAttention() if unsupported or not cpu_kernels.available() else CpuAttention()
    if name not in backends:
        raise ConfigurationError(f"unknown attention backend {name!r}; allowed: auto, {', '.join(sorted(backends))}")
    reason = backends[name].unsupported(device, dtype, *sizes)
    if reason is None and name == "cpu" and not cpu_kernels.available():
        reason = "there are no kernels; the warning above says why"
    if reason:
        raise ConfigurationError(f"attention backend {name!r} cannot run here: {reason}")
    return backends[name]()

"""Attention over the staging cache of a prefill and over compressed caches, one file per backend.

=========  ====================  ==========================================================================
backend    devices               what it reads
=========  ====================  ==========================================================================
``sdpa``   any                   every entry of the cache, invalid ones masked
``cpu``    CPU with the kernels  valid entries only
``triton`` CUDA with triton      valid entries only
=========  ====================  ==========================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

import snapstream.kernels.compression  # noqa: F401 (registers the kernels of compression, too)
from snapstream.attention.base import AttentionBackend
from snapstream.attention.cpu import CpuAttention
from snapstream.attention.sdpa import SdpaAttention
from snapstream.attention.triton import TritonAttention
from snapstream.errors import ConfigurationError

__all__ = ["AttentionBackend", "CpuAttention", "SdpaAttention", "TritonAttention", "choose_backend"]

logger = logging.getLogger(__name__)

_BACKENDS: dict[str, type[AttentionBackend]] = {"cpu": CpuAttention, "sdpa": SdpaAttention, "triton": TritonAttention}


def choose_backend(
    name: str, device: torch.device, dtype: torch.dtype, *sizes: int, others: Iterable[int] = ()
) -> AttentionBackend:
    """The backend called ``name``, or for ``auto`` the fastest one that supports the device, dtype and head sizes.

    Args:
        name: ``auto``, or one of the table above.
        device: Device of the tensors; a CUDA device need not be present.
        dtype: Dtype of keys and values.
        sizes: Elements of a key, and of a value if they differ.
        others: Elements of smaller heads that other layers have.

    Raises:
        ConfigurationError: The backend is unknown or cannot run here; the message says why.
    """
    if name == "auto":
        fastest = "triton" if device.type == "cuda" else "cpu"
        reason = _reason_against(fastest, device, dtype, *sizes, *others)
        if reason and device.type == "cuda":
            logger.warning("This GPU runs stock operations, which are slower than SnapStream's kernels: %s.", reason)
        return _BACKENDS["sdpa" if reason else fastest].for_heads(device, dtype, *sizes)
    if name not in _BACKENDS:
        raise ConfigurationError(f"unknown attention backend {name!r}; allowed: auto, {', '.join(sorted(_BACKENDS))}")
    reason = _reason_against(name, device, dtype, *sizes, *others)
    if reason:
        raise ConfigurationError(f"attention backend {name!r} cannot run here: {reason}")
    return _BACKENDS[name].for_heads(device, dtype, *sizes)


def _reason_against(name: str, device: torch.device, dtype: torch.dtype, *sizes: int) -> str | None:
    """Why a backend cannot run, or ``None``; loads its kernels."""
    backend = _BACKENDS[name]
    return backend.unsupported(device, dtype, *sizes) or backend.load(device)

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

import torch

import snapstream.kernels.compression  # noqa: F401 (registers the kernels of compression, too)
from snapstream.attention.base import AttentionBackend
from snapstream.attention.cpu import CpuAttention
from snapstream.attention.sdpa import SdpaAttention
from snapstream.attention.triton import TritonAttention
from snapstream.errors import ConfigurationError
from snapstream.kernels import cpu as cpu_kernels
from snapstream.kernels import triton as triton_kernels

__all__ = ["AttentionBackend", "CpuAttention", "SdpaAttention", "TritonAttention", "choose_backend"]

logger = logging.getLogger(__name__)

_BACKENDS: dict[str, type[AttentionBackend]] = {"cpu": CpuAttention, "sdpa": SdpaAttention, "triton": TritonAttention}


def choose_backend(name: str, device: torch.device, dtype: torch.dtype, *sizes: int) -> AttentionBackend:
    """The backend called ``name``, or for ``auto`` the fastest one that supports the device, dtype and head sizes.

    Args:
        name: ``auto``, or one of the table above.
        device: Device of the tensors; a CUDA device need not be present.
        dtype: Dtype of keys and values.
        sizes: Elements of a key, and of a value if they differ.

    Raises:
        ConfigurationError: The backend is unknown or cannot run here; the message says why.
    """
    if name == "auto":
        fastest = "triton" if device.type == "cuda" else "cpu"
        reason = _reason_against(fastest, device, dtype, *sizes)
        if reason and device.type == "cuda":
            logger.warning("This GPU runs stock operations, which are slower than SnapStream's kernels: %s.", reason)
        return _make("sdpa" if reason else fastest, device, dtype, *sizes)
    if name not in _BACKENDS:
        raise ConfigurationError(f"unknown attention backend {name!r}; allowed: auto, {', '.join(sorted(_BACKENDS))}")
    reason = _reason_against(name, device, dtype, *sizes)
    if reason:
        raise ConfigurationError(f"attention backend {name!r} cannot run here: {reason}")
    return _make(name, device, dtype, *sizes)


def _reason_against(name: str, device: torch.device, dtype: torch.dtype, *sizes: int) -> str | None:
    """Why a backend cannot run, or ``None``; loads its kernels."""
    reason = _BACKENDS[name].unsupported(device, dtype, *sizes)
    if reason is None and name == "cpu" and not cpu_kernels.available():
        return "its kernels are not available; see the warning above"
    if reason is None and name == "triton" and device.type == "cpu":
        triton_kernels.interpret()
    return reason


def _make(name: str, device: torch.device, dtype: torch.dtype, *sizes: int) -> AttentionBackend:
    if name == "cpu":
        return CpuAttention()
    return (TritonAttention if name == "triton" else SdpaAttention).for_heads(device, dtype, *sizes)

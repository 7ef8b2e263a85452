"""Torch's flash attention for prefill chunks: grouped heads and any start, without masks or expanded keys."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor
from torch.nn import functional as F

logger = logging.getLogger(__name__)

MOST_HEAD_SIZE = 256


def attend(query: Tensor, keys: Tensor, values: Tensor, start: Tensor, scale: float, window: int = 0) -> Tensor:
    """Causal attention of one chunk, as :meth:`snapstream.attention.base.AttentionBackend.prefill` describes it.

    No temporary grows with ``L``. The chunk is passed as the only sequence of a variable-length batch (*varlen*), whose
    lengths are on the device. The mask is then causal from the end of the keys, so the host need not know ``start``.
    """
    T, L = query.shape[0], keys.shape[1]
    sequences = torch.arange(2, dtype=torch.int32, device=query.device)
    seen = sequences * (start + T).to(torch.int32)
    # The public function's arguments differ between versions of torch; those of the operation below it do not.
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        keys.transpose(0, 1),
        values.transpose(0, 1),
        sequences * T,
        seen,
        T,
        L,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=window - 1 if window else None,
        window_size_right=0 if window else None,
    )[0]
    return out


def fits(device: torch.device, dtype: torch.dtype, size: int, value_size: int) -> bool:
    """Whether torch has a flash kernel for such heads; if a GPU is present, also whether its results are right."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if size != value_size or size % 8 or size > MOST_HEAD_SIZE:
        return False
    return _is_right(device, dtype, size, 0) if torch.cuda.is_available() else True


def has_windows(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether the kernel is right with a sliding window, too."""
    return _is_right(device, dtype, size, 2)


@functools.cache
def _is_right(device: torch.device, dtype: torch.dtype, size: int, window: int) -> bool:
    """Run it once: some builds of torch lack it, and the heads that it supports depend on the device."""
    generator, start, scale = torch.Generator().manual_seed(0), 3, 0.1
    query, keys, values = (torch.randn(n, m, size, generator=generator) for n, m in ((5, 4), (2, 8), (2, 8)))
    mask = torch.ones(5, 8, dtype=torch.bool).tril(start)
    if window:
        mask = mask.triu(start + 1 - window)
    want = F.scaled_dot_product_attention(
        query.transpose(0, 1),
        keys.repeat_interleave(2, 0),
        values.repeat_interleave(2, 0),
        attn_mask=mask,
        scale=scale,
    ).transpose(0, 1)
    # Entries past the chunk must not be read: they would dominate the result.
    longer = [torch.cat((each, torch.full_like(each, 30.0)), 1).to(device, dtype) for each in (keys, values)]
    at = torch.tensor(start, device=device)
    what = "Torch's flash attention" + (" with a window" if window else "")
    try:
        got = attend(query.to(device, dtype), longer[0], longer[1], at, scale, window)
    except (RuntimeError, TypeError) as error:
        logger.warning("%s does not work here, so prefill does not use it: %s", what, error)
        return False
    if torch.allclose(got.float().cpu(), want, atol=3e-2):
        return True
    logger.warning("%s gives wrong results here, so prefill does not use it.", what)
    return False

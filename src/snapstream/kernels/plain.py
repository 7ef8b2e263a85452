"""What kernels do, in torch alone: for wherever there is no kernel, and what they are tested against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """See :func:`snapstream.kernels.rows.norm`; float64 stays as it is."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(x.dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, *, pairs: bool) -> Tensor:
    """See :func:`snapstream.kernels.rows.rotate`."""
    if pairs:
        half = x.shape[-1] // 2
        cosine, sine = cosine[..., :half], sine[..., :half]
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def gate(x: Tensor) -> Tensor:
    """See :func:`snapstream.kernels.rows.gate`."""
    first, second = x.chunk(2, -1)
    return F.silu(first).mul_(second)

"""What the layers of all models are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from snapstream.kernels.products import linear


class Linear(nn.Linear):
    """A linear layer, by whatever kernel is fastest (:mod:`snapstream.kernels.products`)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[T, K]`` to ``[T, out]``."""
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise; shape and dtype stay."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU with gate and up projection in one product."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[T, hidden]`` to ``[T, hidden]``."""
        gate, up = self.gate_up(x).chunk(2, -1)
        inner = F.silu(gate).mul_(up)
        del gate, up  # the widest there is, while a prompt is read
        result: Tensor = self.down(inner)
        return result

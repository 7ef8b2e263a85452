"""Weights as they are stored, in a format of their own, whatever the type of the rows that they multiply."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, eq=False)
class Weight:
    """One matrix, or several of equal shape.

    Attributes:
        stored: What is in memory: ``[out, in]``, or ``[n, out, in]``. Rows are contiguous, and follow each other.
    """

    stored: Tensor

    @property
    def shape(self) -> torch.Size:
        """``[out, in]`` or ``[n, out, in]``."""
        return self.stored.shape

    @property
    def format(self) -> str:
        """Name of the format."""
        return f"{self.stored.dtype}".removeprefix("torch.")

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype that holds its numbers exactly."""
        return self.stored.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.stored.nbytes

    def dense(self, dtype: torch.dtype) -> Tensor:
        """All numbers; a view if they are stored in this dtype."""
        return self.stored.to(dtype)

    def rows(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows of a matrix, ``[T, in]``; ``numbers`` is int64 ``[T]``."""
        return self.stored[numbers].to(dtype)

    def matrix(self, number: int) -> Weight:
        """One of several matrices."""
        return Weight(self.stored[number])

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``x @ weight.T + bias`` by torch, in the wider of both types.

        Args:
            x: ``[T, in]``.
            bias: ``[out]`` or ``None``.

        Returns:
            ``[T, out]``, in the dtype of ``x``.
        """
        wide = torch.promote_types(x.dtype, self.dtype)
        added = None if bias is None else bias.to(wide)
        return F.linear(x.to(wide), self.dense(wide), added).to(x.dtype)

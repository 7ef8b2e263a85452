"""The interface of attention backends."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Self

from snapstream.attention.operation import with_backend
from snapstream.kernels.buffers import PromptChunk, StepBuffers
from snapstream.kernels.counting import peak_of
from snapstream.kernels.operations import Attend, Operation
from snapstream.kernels.stock import Program, program_for_rows


class AttentionBackend(ABC):
    """Attention of a prefill chunk and of a decode step; pure functions of fixed shape."""

    reads_all_keys_in_prefill: bool
    """Whether prefill reads the whole staging cache it is given, so that the caller should give no more than needed."""
    narrow_values: bool = False
    """Whether values may be shorter than keys; else values of latents are passed in full, and results are truncated."""

    in_loop: bool = False
    """Whether it is the attention of the native loop of :mod:`snapstream.kernels.cpu`."""

    @staticmethod
    @abstractmethod
    def unsupported(device: torch.device, dtype: torch.dtype, *sizes: int) -> str | None:
        """Why the backend cannot run with these, or ``None`` if it can.

        Args:
            device: Device of the tensors.
            dtype: Dtype of keys and values.
            sizes: Elements of a key, and of a value if they differ.
        """

    @classmethod
    def load(cls, device: torch.device) -> str | None:
        """Load its kernels; returns why that is impossible, or ``None``."""
        return None

    @classmethod
    def for_heads(cls, device: torch.device, dtype: torch.dtype, size: int, value_size: int | None = None) -> Self:
        """The fastest variant for a device, a dtype, and the sizes of keys and values."""
        return cls()

    def program(self, operations: Sequence[Operation], work: StepBuffers) -> Program:
        """What runs decode steps, of one or several tokens per slot, with this attention.

        By default, the native loop and torch run all operations but attention, for which they call :meth:`decode`.

        Args:
            operations: The operations of a step.
            work: The buffers, slots and caches that they work on.
        """
        return program_for_rows(with_backend(operations, self), work)

    def packed_shape(self, values: torch.Size, dtype: torch.dtype) -> tuple[int, ...]:
        """Shape of prefill's copy of values ``[N, L, V]`` in multiplication order; ``(0,)`` if it keeps none."""
        return (0,)

    def prefill_bytes(self, o: Attend, chunk: PromptChunk) -> int:
        """Bytes of temporaries that :meth:`prefill` needs besides the result.

        Args:
            o: The operation.
            chunk: The chunk of a prompt, on the meta device.
        """
        return 0

    def decode_bytes(self, o: Attend, m: StepBuffers) -> int:
        """Bytes of temporaries that the attention of a step needs.

        Args:
            o: The operation.
            m: What it works on, on the meta device.
        """
        return peak_of(functools.partial(o.run, m))

    @abstractmethod
    def prefill(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        start: Tensor,
        scale: float,
        *,
        window: int = 0,
        cap: float = 0.0,
        sinks: Tensor | None = None,
        packed: Tensor | None = None,
        packed_until: Tensor | None = None,
    ) -> Tensor:
        """Attend causally from one chunk of a prompt to what comes before it and to itself.

        Args:
            query: Rotated queries of tokens ``start .. start + T``, ``[T, H, D]``.
            keys: Staging cache, ``[N, L, D]``, which already holds the chunk's keys at ``start .. start + T``.
            values: ``[N, L, V]``; for latents, the first elements of the keys.
            start: Entry of the first token, int64 scalar tensor.
            scale: Factor on the logits.
            window: How many tokens a token attends to, itself included; 0 for all.
            cap: Soft cap of the logits; 0 for none.
            sinks: One extra logit per head, without a value, float32 ``[H]``.
            packed: Buffer of :meth:`packed_shape` that the chunks of one layer share.
            packed_until: Entries that earlier chunks have packed, int64 scalar tensor.

        Returns:
            ``[T, H, V]``.
        """

    @abstractmethod
    def decode(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor,
        scale: float,
        *,
        cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend from one token per slot to the first ``valid`` entries of its cache; KV heads are not expanded.

        Args:
            query: ``[B, H, D]``.
            keys: ``[B, N, C, D]``.
            values: ``[B, N, C, D]``.
            valid: Valid entries of each slot, int64 ``[B]``; 0 for a free slot, whose result is undefined.
            scale: Factor on the logits.
            cap: As for :meth:`prefill`.
            sinks: Likewise.

        Returns:
            ``[B, H, D]``.
        """

"""The state of one layer with linear attention (Gated DeltaNet, arXiv 2412.06464), which has a fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from snapstream.cache.codes import EntryType, dense_dtype
from snapstream.cache.layer import LayerCache


@dataclass(frozen=True)
class StateShape:
    """The shape of a layer's state, and of what one token feeds to it.

    Attributes:
        heads: Value heads, each of which has a matrix.
        key_heads: Heads of queries and keys, each of which serves several value heads.
        key: Elements of a query or key head; rows of a matrix.
        value: Elements of a value head; columns of a matrix.
    """

    heads: int
    key_heads: int
    key: int
    value: int

    @property
    def channels(self) -> int:
        """Elements of a token's queries, keys and values, which a short convolution mixes with those before."""
        return 2 * self.key_heads * self.key + self.heads * self.value

    @property
    def size(self) -> int:
        """Elements that a token feeds: its channels, then what decides strengths and decays of all value heads."""
        return self.channels + 2 * self.heads

    def tensors(self, rows: int, entries: int, entry_type: EntryType) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the tensors of a cache that holds ``entries`` latest inputs of ``rows`` sequences."""
        dtype = dense_dtype(entry_type)
        matrices = (rows, self.heads, self.key, self.value), torch.promote_types(dtype, torch.float32)
        return [matrices, ((rows, 1, entries, self.size), dtype)]

    def made_of(self, tensors: Sequence[Tensor], entry_type: EntryType) -> StateCache:
        """A cache of tensors that :meth:`tensors` describes."""
        return StateCache(tensors)

    def empty(
        self, rows: int, entries: int, *, entry_type: EntryType, device: torch.device | str = "cpu"
    ) -> StateCache:
        """A cache for ``rows`` sequences, all zero."""
        shapes = self.tensors(rows, entries, entry_type)
        return StateCache([torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes])

    def of(self, tensors: Sequence[Tensor], entry_type: EntryType) -> StateCache:
        """A cache of one row from its tensors.

        Raises:
            ValueError: The tensors have another shape or dtype.
        """
        given = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        if len(given) != 2 or tensors[1].dim() != 4 or given != self.tensors(1, tensors[1].shape[2], entry_type):
            raise ValueError(f"tensors of {[tuple(t.shape) for t in tensors]} are not a state of {self}")
        return StateCache(tensors)

    def nbytes(self, entry_type: EntryType) -> int:
        """Bytes of one token's input."""
        return self.size * dense_dtype(entry_type).itemsize

    def fixed_nbytes(self, entry_type: EntryType) -> int:
        """Bytes of the matrices of one sequence, which are float32."""
        return self.heads * self.key * self.value * torch.promote_types(dense_dtype(entry_type), torch.float32).itemsize


class StateCache(LayerCache):
    """States of ``B`` sequences in one layer, and the latest inputs to each; no entries that could be left out.

    ``matrices`` is ``[B, heads, key, value]``. ``inputs`` is ``[B, 1, E, size]``: the input of the token at position
    ``p`` is entry ``p mod E``. The convolution of the next token reads the last few. Slots have more: a state can be
    taken back to an earlier token by feeding an older one the inputs since then.
    """

    stored = 2

    def _refuse(self, *given: object, **named: object) -> NoReturn:
        raise TypeError("a state has no entries")

    write = write_stored = read = pending = span = take = gather = gathered = joined = _refuse

    @property
    def matrices(self) -> Tensor:
        """The states, ``[B, heads, key, value]``."""
        return self.tensors[0]

    @property
    def inputs(self) -> Tensor:
        """The latest inputs, ``[B, E, size]``."""
        return self.tensors[1][:, 0]

    @property
    @override
    def values(self) -> Tensor:
        return self.tensors[1]

    @property
    @override
    def entry_type(self) -> torch.dtype:
        return self.tensors[1].dtype

    @property
    @override
    def entries(self) -> int:
        return self.tensors[1].shape[2]

    @override
    def row(self, row: int, entries: int | None = None) -> StateCache:
        """A view of one sequence; all of its inputs, however many ``entries``."""
        return StateCache([tensor[row : row + 1] for tensor in self.tensors])

    @override
    def first(self, entries: int) -> StateCache:
        return self

    @override
    def copy_to(self, target: LayerCache, first: int, end: int) -> None:
        """Copy the states and their inputs as they are now."""
        for mine, theirs in zip(self.tensors, target.tensors, strict=True):
            theirs.copy_(mine)

    @override
    def put(self, other: LayerCache, tokens: int = 0) -> None:
        """Copy the state of a cache with one row after ``tokens`` tokens to this one, which has one row, too."""
        self._require_same_type(other)
        assert isinstance(other, StateCache)
        self.matrices.copy_(other.matrices)
        for token in range(max(0, tokens - min(self.entries, other.entries)), tokens):
            self.inputs[:, token % self.entries].copy_(other.inputs[:, token % other.entries])

    @override
    def converted(self, entry_type: EntryType, like: LayerCache | None = None) -> StateCache:
        dtype = dense_dtype(entry_type)
        return self if self.entry_type == dtype else StateCache([self.matrices, self.tensors[1].to(dtype)])


def no_positions(device: torch.device | str = "cpu") -> Tensor:
    """True positions of the entries of a layer with a state, which has none, int32 ``[0, 0]``."""
    return torch.empty(0, 0, dtype=torch.int32, device=device)

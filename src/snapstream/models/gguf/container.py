"""Reads the contents of a GGUF file: metadata by name, and where each tensor is stored.

The format is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Files are untrusted: all counts
and sizes are checked against the length of the file before anything is allocated for them.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from snapstream.errors import CheckpointError, missing_extra
from snapstream.models.gguf.parts import part_paths

MAGIC, VERSIONS = b"GGUF", (2, 3)
# Kinds of values, by number; all are little-endian.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is stored.

    Attributes:
        file: The file.
        shape: Its shape in torch's order; elements along the last dimension are adjacent.
        kind: Number of its ``GGMLQuantizationType``.
        offset: Offset of its first byte in the file.
        row_bytes: Bytes of each of its rows.
    """

    file: Path
    shape: tuple[int, ...]
    kind: int
    offset: int
    row_bytes: int


@dataclass(frozen=True)
class StoredStrings:
    """Where a list of strings is stored: a vocabulary has hundreds of thousands, which only the tokenizer needs.

    Attributes:
        file: The file.
        offset: Offset of the first string in the file.
        count: How many there are.
    """

    file: Path
    offset: int
    count: int

    def read(self) -> list[str]:
        """The strings.

        Raises:
            CheckpointError: The file is damaged, or was changed.
        """
        with self.file.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            cursor = _Cursor(self.file, memory, self.offset)
            return [cursor.decoded(each) for each in cursor.pieces(self.count)]


@dataclass(frozen=True)
class Container:
    """The header of a file, or of all files of a split model.

    Attributes:
        path: The file, or the first file.
        metadata: Numbers, strings, lists of numbers, and where lists of strings are stored, by key.
        tensors: Tensors by name.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def rows(self, name: str, rows: NDArray[numpy.int64]) -> NDArray[numpy.float32]:
        """Dequantize some rows of a tensor ``[rows, columns]``; a tensor of one dimension has one row.

        Raises:
            CheckpointError: The tensor's quantization is not supported.
        """
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        stored = self.tensors[name]
        try:
            some = self._mapped(name)[rows]
            numbers: NDArray[numpy.float32] = dequantize(some, GGMLQuantizationType(stored.kind))
        except NotImplementedError as error:
            kind = GGMLQuantizationType(stored.kind).name
            raise CheckpointError(f"{self.path}: {name} is stored as {kind}, which is not supported") from error
        return numbers

    def stored_rows(self, name: str) -> Tensor:
        """A tensor's rows as they are stored, uint8 ``[rows, row_bytes]``: a view of the file."""
        return torch.from_numpy(self._mapped(name))

    def _mapped(self, name: str) -> NDArray[numpy.uint8]:
        stored = self.tensors[name]
        # Torch wants memory that it could write to; nothing that is written would reach the file.
        shape = (math.prod(stored.shape[:-1]), stored.row_bytes)
        return numpy.memmap(stored.file, numpy.uint8, "c", stored.offset, shape)

    def require(self, name: str) -> Any:
        """The value of a metadata key that must exist.

        Raises:
            CheckpointError: It does not exist.
        """
        if name not in self.metadata:
            raise CheckpointError(f"{self.path} has no metadata {name}; it is damaged, or not a language model")
        return self.metadata[name]

    def strings(self, name: str) -> list[str]:
        """The list of strings of a metadata key that must exist.

        Raises:
            CheckpointError: It does not exist, or is something else.
        """
        stored = self.require(name)
        if not isinstance(stored, StoredStrings):
            raise CheckpointError(f"{self.path} is damaged: {name} is {type(stored).__name__}, not a list of strings")
        return stored.read()


def open_container(path: Path) -> Container:
    """Read the header of a file; the result is cached.

    Raises:
        CheckpointError: The file cannot be read, is damaged, or has another version.
        ConfigurationError: The ``gguf`` package is not installed.
    """
    try:
        from gguf import GGML_QUANT_SIZES  # noqa: F401
    except ImportError as error:
        raise missing_extra(f"{path} needs the gguf package", "gguf") from error
    try:
        whole = _open(*_version(path))
        count = _split_number(whole, "count", 1)
        return whole if count < 2 else _open_parts(tuple(_version(part) for part in part_paths(path, count)))
    except OSError as error:
        raise CheckpointError(f"{path} could not be read: {error.strerror}") from error


_Version = tuple[Path, int, int]


def _version(path: Path) -> _Version:
    """The current version of a file, as a key for caches."""
    state = path.stat()
    return path, state.st_mtime_ns, state.st_size


def _split_number(part: Container, name: str, otherwise: int) -> int:
    value = part.metadata.get(f"split.{name}", otherwise)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"{part.path} is damaged: split.{name} is {value!r}")
    return value


@functools.lru_cache(maxsize=2)
def _open_parts(versions: tuple[_Version, ...]) -> Container:
    """One header for all parts of a model: the metadata of the first part, and the tensors of all."""
    parts = [_open.__wrapped__(*version) for version in versions]
    tensors: dict[str, StoredTensor] = {}
    for number, part in enumerate(parts):
        if _split_number(part, "count", 1) != len(parts) or _split_number(part, "no", -1) != number:
            raise CheckpointError(
                f"{part.path} is not part {number + 1} of {len(parts)}: its metadata has split.no "
                f"{part.metadata.get('split.no')} and split.count {part.metadata.get('split.count')}; was it renamed?"
            )
        twice = sorted(tensors.keys() & part.tensors)
        if twice:
            raise CheckpointError(
                f"{part.path}: tensor {twice[0]} is also in another part; the parts are from different models"
            )
        tensors |= part.tensors
    wanted = _split_number(parts[0], "tensors.count", len(tensors))
    if wanted != len(tensors):
        raise CheckpointError(
            f"{parts[0].path}: the {len(parts)} parts have {len(tensors)} tensors, but should have {wanted}; the parts "
            "are from different models"
        )
    return Container(parts[0].path, parts[0].metadata, tensors)


@functools.lru_cache(maxsize=2)
def _open(path: Path, changed: int, size: int) -> Container:
    if not size:
        raise CheckpointError(f"{path} is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        cursor = _Cursor(path, memory)
        if cursor.take(4) != MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file")
        version = cursor.number("I")
        if version not in VERSIONS:
            raise CheckpointError(
                f"{path} has GGUF version {version} or another byte order; supported: versions "
                f"{', '.join(map(str, VERSIONS))}, little-endian"
            )
        tensor_count, value_count = cursor.number("Q"), cursor.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(cursor.count(value_count, 13)):
            name = cursor.string()
            if name in metadata:
                raise cursor.damaged(f"{name!r} occurs twice")
            metadata[name] = cursor.value(cursor.number("I"))
        described: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(cursor.count(tensor_count, 32)):
            name = cursor.string()
            dimensions = cursor.number("I")
            if not 1 <= dimensions <= _MOST_DIMENSIONS or name in described:
                raise cursor.damaged(f"tensor {name!r} has {dimensions} dimensions, or occurs twice")
            shape = tuple(reversed([cursor.number("Q") for _ in range(dimensions)]))
            described[name] = shape, cursor.number("I"), cursor.number("Q")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**16:
            raise cursor.damaged(f"general.alignment is {alignment!r}")
        start = -(-cursor.at // alignment) * alignment
        return Container(path, metadata, _placed(cursor, described, start, size))


def _placed(
    cursor: _Cursor, described: dict[str, tuple[tuple[int, ...], int, int]], start: int, size: int
) -> dict[str, StoredTensor]:
    """Locate all tensors, and check that they lie within the file."""
    from gguf import GGML_QUANT_SIZES

    sizes = {int(kind): both for kind, both in GGML_QUANT_SIZES.items()}
    placed = {}
    for name, (shape, kind, offset) in described.items():
        if kind not in sizes:
            raise cursor.damaged(f"tensor {name!r} has the unknown type {kind}")
        block, block_bytes = sizes[kind]
        if not math.prod(shape) or shape[-1] % block:
            raise cursor.damaged(f"tensor {name!r} of shape {list(shape)} does not consist of blocks of {block}")
        row_bytes = shape[-1] // block * block_bytes
        if start + offset + math.prod(shape[:-1]) * row_bytes > size:
            raise cursor.damaged(f"tensor {name!r} extends past the end of the file, which was truncated")
        placed[name] = StoredTensor(cursor.path, shape, kind, start + offset, row_bytes)
    return placed


class _Cursor:
    """Reads a header, never past the end of the file."""

    def __init__(self, path: Path, memory: mmap.mmap, at: int = 0) -> None:
        self.path, self._memory, self.at = path, memory, at

    def damaged(self, how: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged: {how}")

    def take(self, size: int) -> bytes:
        if size > len(self._memory) - self.at:
            raise self.damaged("it ends in the middle of its header")
        self.at += size
        return self._memory[self.at - size : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, count: int, least: int) -> int:
        """Check a count of items with at least ``least`` bytes each."""
        if count > (len(self._memory) - self.at) // least:
            raise self.damaged(f"it is too short for the {count} items that it declares")
        return count

    def string(self) -> str:
        return self.decoded(self.take(self.number("Q")))

    def decoded(self, string: bytes) -> str:
        try:
            return string.decode()
        except UnicodeDecodeError:
            raise self.damaged("a string is not UTF-8") from None

    def pieces(self, count: int) -> Iterator[bytes]:
        """The bytes of a list of strings, one after another."""
        memory, at, end, length_at = self._memory, self.at, len(self._memory), struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = at + 8
            at = start + length_at(memory, at)[0] if start <= end else end + 1
            if at > end:
                raise self.damaged("it ends in the middle of its header")
            yield memory[start:at]
        self.at = at

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(self._code(kind))
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            stored = StoredStrings(self.path, self.at, self.count(count, 8))
            deque(self.pieces(count), maxlen=0)  # goes past them
            return stored
        code = self._code(kind)  # no model has nested lists
        size = struct.calcsize(f"<{code}")
        return numpy.frombuffer(self.take(self.count(count, size) * size), f"<{code}").tolist()

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self.damaged(f"it has a value of the unknown type {kind}")
        return _SCALARS[kind]

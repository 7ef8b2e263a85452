"""What is in a GGUF file: metadata by name, and where each tensor is stored.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file may come from anywhere, so nothing it says
is believed before it is compared with how long the file is: counts are checked before anything is made for them.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

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
        shape: As torch has it; numbers of the last dimension are adjacent.
        kind: ``GGMLQuantizationType`` by number.
        offset: Of its first byte in the file.
        row_bytes: Of each of its rows.
    """

    file: Path
    shape: tuple[int, ...]
    kind: int
    offset: int
    row_bytes: int


@dataclass(frozen=True)
class Container:
    """The header of a file, or of all files of a split model.

    Attributes:
        path: The file, or the first of them.
        metadata: Numbers, strings, and lists of them.
        tensors: By name.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def rows(self, name: str, rows: NDArray[numpy.int64]) -> NDArray[numpy.float32]:
        """Some rows of a tensor ``[rows, columns]`` (one of one dimension has one), as numbers.

        Raises:
            CheckpointError: They are stored in a way that is not known.
        """
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        stored = self.tensors[name]
        count = math.prod(stored.shape[:-1])
        whole = numpy.memmap(stored.file, numpy.uint8, "r", stored.offset, (count, stored.row_bytes))
        try:
            numbers: NDArray[numpy.float32] = dequantize(whole[rows], GGMLQuantizationType(stored.kind))
        except NotImplementedError as error:
            kind = GGMLQuantizationType(stored.kind).name
            raise CheckpointError(f"{self.path}: {name} is stored as {kind}, which is not supported") from error
        return numbers

    def require(self, name: str) -> Any:
        """Metadata that must be there.

        Raises:
            CheckpointError: It is not.
        """
        if name not in self.metadata:
            raise CheckpointError(f"{self.path} does not say {name}; it is damaged, or not a language model")
        return self.metadata[name]


def open_container(path: Path) -> Container:
    """Read the header of a file; once, however often it is asked for.

    Raises:
        CheckpointError: It cannot be read, is damaged, or of another version.
        ConfigurationError: The ``gguf`` package is missing.
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
    """A file as it is now."""
    state = path.stat()
    return path, state.st_mtime_ns, state.st_size


def _split_number(part: Container, name: str, otherwise: int) -> int:
    value = part.metadata.get(f"split.{name}", otherwise)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"{part.path} is damaged: split.{name} is {value!r}")
    return value


@functools.lru_cache(maxsize=2)
def _open_parts(versions: tuple[_Version, ...]) -> Container:
    """One header for all parts of a model: metadata of the first, tensors of all."""
    parts = [_open.__wrapped__(*version) for version in versions]
    tensors: dict[str, StoredTensor] = {}
    for number, part in enumerate(parts):
        if _split_number(part, "count", 1) != len(parts) or _split_number(part, "no", -1) != number:
            raise CheckpointError(
                f"{part.path} is not part {number + 1} of {len(parts)} by what it says of itself (split.no "
                f"{part.metadata.get('split.no')}, split.count {part.metadata.get('split.count')}); was it renamed?"
            )
        twice = sorted(tensors.keys() & part.tensors)
        if twice:
            raise CheckpointError(f"{part.path}: tensor {twice[0]} is in another part, too; they are not of one model")
        tensors |= part.tensors
    wanted = _split_number(parts[0], "tensors.count", len(tensors))
    if wanted != len(tensors):
        raise CheckpointError(
            f"{parts[0].path}: the {len(parts)} parts have {len(tensors)} tensors, and should have {wanted}; they are "
            "not of one model"
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
                f"{path} is GGUF of version {version} or of another byte order; supported: versions "
                f"{', '.join(map(str, VERSIONS))}, little-endian"
            )
        tensor_count, value_count = cursor.number("Q"), cursor.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(cursor.count(value_count, 13)):
            name = cursor.string()
            if name in metadata:
                raise cursor.damaged(f"{name!r} is there twice")
            metadata[name] = cursor.value(cursor.number("I"))
        described: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(cursor.count(tensor_count, 32)):
            name = cursor.string()
            dimensions = cursor.number("I")
            if not 1 <= dimensions <= _MOST_DIMENSIONS or name in described:
                raise cursor.damaged(f"tensor {name!r} has {dimensions} dimensions, or is there twice")
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
    """Tensors that lie within the file."""
    from gguf import GGML_QUANT_SIZES

    sizes = {int(kind): both for kind, both in GGML_QUANT_SIZES.items()}
    placed = {}
    for name, (shape, kind, offset) in described.items():
        if kind not in sizes:
            raise cursor.damaged(f"tensor {name!r} is of the unknown kind {kind}")
        block, block_bytes = sizes[kind]
        if not math.prod(shape) or shape[-1] % block:
            raise cursor.damaged(f"tensor {name!r} of the shape {list(shape)} does not consist of blocks of {block}")
        row_bytes = shape[-1] // block * block_bytes
        if start + offset + math.prod(shape[:-1]) * row_bytes > size:
            raise cursor.damaged(f"tensor {name!r} reaches behind its end; it was cut off")
        placed[name] = StoredTensor(cursor.path, shape, kind, start + offset, row_bytes)
    return placed


class _Cursor:
    """Goes through a header; never behind the file's end."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path, self._memory, self.at = path, memory, 0

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
        """A count of things that have at least so many bytes each."""
        if count > (len(self._memory) - self.at) // least:
            raise self.damaged(f"it is too short for the {count} things that it names")
        return count

    def string(self) -> str:
        length = self.number("Q")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.damaged("a name or a text is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(self._code(kind))
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return [self.string() for _ in range(self.count(count, 8))]
        code = self._code(kind)  # lists of lists are in no model
        size = struct.calcsize(f"<{code}")
        return numpy.frombuffer(self.take(self.count(count, size) * size), f"<{code}").tolist()

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self.damaged(f"it has a value of the unknown kind {kind}")
        return _SCALARS[kind]

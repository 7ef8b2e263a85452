"""The native loop, which runs a list of operations for all layers and several tokens in one launch (``step.cpp``)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from snapstream.kernels import operations as ops
from snapstream.kernels.cpu.checks import MULTIPLE, TYPES, require
from snapstream.kernels.cpu.library import native
from snapstream.kernels.operations import Operation
from snapstream.kernels.parts import Machine, Part

MOST_ROTATED = 2048
"""Largest head size that can be rotated, given by a buffer in ``step_rows.h``."""


class _Part(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("row", "heads", "size", "stride")))


class _Operation(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int64),
        *((name, _Part) for name in ("source", "target", "other")),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("number", ctypes.c_int64 * 6),
        ("real", ctypes.c_double),
    )


class _Cache(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("keys", "values", "pending_keys", "pending_values"))


class _Program(ctypes.Structure):
    _fields_ = (
        ("operations", ctypes.POINTER(_Operation)),
        ("count", ctypes.c_int64),
        ("caches", ctypes.POINTER(_Cache)),
        *((name, ctypes.c_int64) for name in ("type", "instructions", "slots", "tokens")),
        *((name, ctypes.c_int64) for name in ("kv_heads", "entries", "size", "most_steps")),
        *((name, ctypes.c_void_p) for name in ("token", "position")),
        ("token_row", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("base", "cached", "limit", "active", "forced", "taken")),
        *((name, ctypes.c_void_p) for name in ("drafted", "accepted")),
    )


def unsupported(operations: Sequence[Operation], dtype: torch.dtype) -> str | None:
    """Why the loop cannot run some operations in a dtype, or ``None`` if it can."""
    if dtype not in TYPES:
        return f"the dtype is {dtype}; float32 and bfloat16 are supported"
    for operation in operations:
        sizes = _sizes_to_fit(operation)
        if any(size % MULTIPLE for size in sizes):
            name = type(operation).__name__
            return f"{name} has sizes {', '.join(map(str, sizes))}; multiples of {MULTIPLE} are supported"
        if isinstance(operation, ops.Rotate) and operation.source.size > MOST_ROTATED:
            return f"{operation.source.size} elements of a head are rotated; at most {MOST_ROTATED} are supported"
    return None


def _sizes_to_fit(operation: Operation) -> list[int]:
    match operation:
        case ops.Norm(source=source) | ops.Combine(source=source):
            return [source.size]
        case ops.Product(source=source) | ops.GatedProduct(source=source) | ops.ExpertProduct(source=source):
            return [source.size]
        case ops.HeadProduct(source=source, target=target):
            return [target.size if operation.transposed else source.size]
        case ops.Attend(query=query, target=target):
            return [query.size, target.size]
    return []


class CpuProgram:
    """Runs a list of operations on the CPU; see :class:`snapstream.kernels.operations.PlainProgram`.

    A slot's results depend only on that slot, bit for bit: not on other slots, on threads or on the steps per launch.
    """

    def __init__(self, operations: Sequence[Operation], machine: Machine, *, instructions: int | None = None) -> None:
        """Translate the list. The tensors that it refers to must keep their addresses.

        Args:
            operations: The list.
            machine: The buffers, slots and caches that it works on.
            instructions: Index of the instructions that multiply bfloat16; ``None`` for the fastest.

        Raises:
            ValueError: The loop cannot run the operations.
        """
        dtype = machine.caches[0].keys.dtype if machine.caches else next(iter(machine.buffers.values())).dtype
        reason = unsupported(operations, dtype)
        if reason:
            raise ValueError(reason)
        library = native()
        self._dtype = dtype
        self._library, self.operations, self.machine = library, tuple(operations), machine
        self._instructions = library.snapstream_best_instructions() if instructions is None else instructions
        translated = (_Operation * len(self.operations))(*(self._translate(each) for each in self.operations))
        caches = (_Cache * max(1, len(machine.caches)))()
        for layer, cache in enumerate(machine.caches):
            caches[layer].keys, caches[layer].values = _address(cache.keys), _address(cache.values)
            if machine.pending:
                pending = machine.pending[layer]
                caches[layer].pending_keys, caches[layer].pending_values = map(_address, (pending.keys, pending.values))
        slots = machine.slots
        self._steps, B = slots.taken.shape
        shape = machine.caches[0].keys.shape if machine.caches else (B, 0, 0, 0)
        self._program = _Program(
            operations=translated,
            count=len(self.operations),
            caches=caches,
            type=TYPES.index(dtype),
            instructions=self._instructions,
            slots=B,
            tokens=slots.tokens,
            kv_heads=shape[1],
            entries=shape[2],
            size=shape[3],
            most_steps=self._steps,
            token=_address(slots.token),
            position=_address(slots.position),
            token_row=slots.token.stride(0),
            base=_address(slots.base),
            cached=_address(slots.count),
            limit=_address(slots.limit),
            active=_address(slots.active),
            forced=_address(slots.forced),
            taken=_address(slots.taken),
            drafted=_address(slots.drafted),
            accepted=_address(slots.accepted),
        )
        self._threads = 0
        self._scratch = torch.empty(0)

    def run(self, steps: int = 1, first: int = 0, last: int | None = None) -> None:
        """Run operations ``first .. last``, a slice of the list, ``steps`` times in one launch.

        Raises:
            MemoryError: There is not enough memory for temporaries.
        """
        assert 0 < steps <= self._steps
        threads = torch.get_num_threads()
        if threads != self._threads:
            size = self._library.snapstream_scratch(ctypes.byref(self._program), threads)
            if size < 0:
                raise MemoryError("not enough memory to plan the temporaries of decoding")
            self._scratch, self._threads = torch.empty(size, dtype=torch.uint8), threads
        begin, end, _ = slice(first, last).indices(len(self.operations))
        assert begin < end
        scratch = self._scratch.data_ptr()
        if not self._library.snapstream_run(ctypes.byref(self._program), scratch, begin, end, steps, threads):
            raise MemoryError("not enough memory for the temporaries of decoding")

    def _part(self, part: Part | None) -> _Part:
        if part is None:
            return _Part()
        view = part.of(self.machine.buffers)
        return _Part(_address(view), view.stride(0), part.heads, part.size, part.step)

    def _translate(self, operation: Operation) -> _Operation:
        """The structure that ``step.h`` declares."""
        kind, parts, weight, bias, numbers, real = _encode(operation, self.machine)
        wanted = torch.float32 if kind in ("angles", "choose") else self._dtype
        for tensor in (weight, None if kind in ("sort", "expert gated", "expert") else bias):
            if tensor is not None:
                require(tensor.dtype == wanted, f"{kind} has weights in {tensor.dtype}; they must be {wanted}")
                rows = tensor[0] if kind == "heads" else tensor  # heads need not be contiguous
                require(rows.is_contiguous(), f"{kind} has weights that are not contiguous")
        return _Operation(
            kind=_KINDS.index(kind),
            source=self._part(parts[0]),
            target=self._part(parts[1]),
            other=self._part(parts[2]),
            weight=_address(weight),
            bias=_address(bias),
            number=(ctypes.c_int64 * 6)(*map(int, numbers)),
            real=real,
        )


_KINDS = (
    *("embed", "angles", "norm", "product", "gated", "heads", "rotate", "store", "attend", "choose", "sort"),
    *("expert gated", "expert", "combine", "take", "gate", "verify", "commit", "advance"),
)
_Encoded = tuple[
    str, tuple[Part | None, Part | None, Part | None], Tensor | None, Tensor | None, tuple[int, ...], float
]


@functools.singledispatch
def _encode(operation: Operation, machine: Machine) -> _Encoded:
    """Kind, parts (source, target, other), weight, bias (or a tensor in its place), integers, and a factor."""
    raise ValueError(f"the loop does not support {type(operation).__name__}")


@_encode.register
def _(o: ops.Embed, machine: Machine) -> _Encoded:
    return "embed", (None, o.target, None), o.table, None, (), 0.0


@_encode.register
def _(o: ops.Angles, machine: Machine) -> _Encoded:
    return "angles", (None, o.target, None), o.frequencies, None, (), o.scaling


@_encode.register
def _(o: ops.Norm, machine: Machine) -> _Encoded:
    return "norm", (o.source, o.target, None), o.weight, None, (), o.epsilon


@_encode.register
def _(o: ops.Product, machine: Machine) -> _Encoded:
    wide = o.target.dtype is not None
    ending = 1 if o.add else (3 if o.rounded else 2) if wide else 0
    return "product", (o.source, o.target, None), o.weight, o.bias, (ending,), 0.0


@_encode.register
def _(o: ops.GatedProduct, machine: Machine) -> _Encoded:
    return "gated", (o.source, o.target, None), o.weight, o.bias, (), 0.0


@_encode.register
def _(o: ops.HeadProduct, machine: Machine) -> _Encoded:
    return "heads", (o.source, o.target, None), o.weight, None, (o.weight.stride(0), o.transposed), 0.0


@_encode.register
def _(o: ops.Rotate, machine: Machine) -> _Encoded:
    return "rotate", (o.source, o.target, o.angles), None, None, (o.pairs,), 0.0


@_encode.register
def _(o: ops.Store, machine: Machine) -> _Encoded:
    return "store", (o.key, o.value, None), None, None, (o.layer,), 0.0


@_encode.register
def _(o: ops.Attend, machine: Machine) -> _Encoded:
    return "attend", (o.query, o.target, None), None, None, (o.layer,), o.scale


@_encode.register
def _(o: ops.Choose, machine: Machine) -> _Encoded:
    numbers = (o.groups, o.chosen_groups, o.corrected, o.normalize)
    return "choose", (o.logits, o.weights, o.experts), None, o.correction, numbers, o.scale


@_encode.register
def _(o: ops.Sort, machine: Machine) -> _Encoded:
    return "sort", (o.source, o.target, o.experts), None, machine.buffers[o.ends.buffer], (o.count,), 0.0


@_encode.register
def _(o: ops.ExpertProduct, machine: Machine) -> _Encoded:
    ends, kind = machine.buffers[o.ends.buffer], "expert gated" if o.gated else "expert"
    return kind, (o.source, o.target, None), o.weight, ends, (len(o.weight),), 0.0


@_encode.register
def _(o: ops.Combine, machine: Machine) -> _Encoded:
    # The experts are not read again: sorting has recorded where each row went.
    return "combine", (o.source, o.target, o.weights), None, None, (), 0.0


@_encode.register
def _(o: ops.Take, machine: Machine) -> _Encoded:
    return "take", (o.logits, None, None), None, None, (), 0.0


@_encode.register
def _(o: ops.Verify, machine: Machine) -> _Encoded:
    return "verify", (o.logits, None, None), None, None, (), 0.0


@_encode.register
def _(o: ops.Commit, machine: Machine) -> _Encoded:
    return "commit", (None, None, None), None, None, (len(machine.caches),), 0.0


@_encode.register
def _(o: ops.Advance, machine: Machine) -> _Encoded:
    return "advance", (None, None, None), None, None, (), 0.0


def run_rows(kind: str, source: Tensor, target: Tensor, *, other: Tensor | None = None, **fields: Any) -> None:
    """Run one row-wise operation.

    Args:
        kind: Which operation.
        source: ``[T, heads, size]``; the elements of a head must be contiguous.
        target: As ``source``, of the same dtype.
        other: As ``source``, float32.
        **fields: Further fields of the structure.

    Raises:
        MemoryError: There is not enough memory for temporaries.
    """
    parts = (
        _Part()
        if each is None
        else _Part(each.data_ptr(), each.stride(0), each.shape[1], each.shape[2], each.stride(1))
        for each in (source, target, other)
    )
    operation = _Operation(_KINDS.index(kind), *parts, **fields)
    rows, threads = source.shape[0], torch.get_num_threads()
    if not native().snapstream_rows(ctypes.byref(operation), TYPES.index(source.dtype), rows, threads):
        raise MemoryError("not enough memory for temporaries")


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    require(tensor.device.type == "cpu", f"a tensor is on {tensor.device}; it must be on the CPU")
    return tensor.data_ptr()

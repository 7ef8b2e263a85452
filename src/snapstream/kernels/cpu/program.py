"""The native loop, which runs a list of operations for all layers and several tokens in one launch (``step.cpp``)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from snapstream.cache import EntryType, LayerCache, QuantizedCache, QuantizedType, StateCache, type_name
from snapstream.kernels import operations as ops
from snapstream.kernels.buffers import BufferView, PromptChunk, StepBuffers
from snapstream.kernels.cpu import interface
from snapstream.kernels.cpu.checks import MULTIPLE, TYPES, require
from snapstream.kernels.cpu.interface import KINDS
from snapstream.kernels.cpu.library import native
from snapstream.kernels.formats import LANES
from snapstream.kernels.operations import Operation
from snapstream.kernels.recurrence import Recur
from snapstream.kernels.sampling import SamplingState
from snapstream.kernels.weight import BlockWeight, Weight

MOST_ROTATED = 2048
"""Largest head size that can be rotated, given by a buffer in ``step_rows.h``."""


def unsupported(operations: Sequence[Operation], *types: EntryType) -> str | None:
    """Why the loop cannot run some operations, or ``None`` if it can.

    Args:
        operations: The operations.
        types: Types of activations and of cache entries.
    """
    values = (value for each in operations for value in vars(each).values())
    numbers = (each for each in types if not isinstance(each, QuantizedType))
    for dtype in (*numbers, *(value.dtype for value in values if isinstance(value, Weight | Tensor))):
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
        case Recur(key_size=key, target=target):
            return [key, target.size]
    return []


class CpuProgram:
    """Runs a list of operations on the CPU; see :class:`snapstream.kernels.operations.PlainProgram`.

    A slot's results depend only on that slot, bit for bit: not on other slots, on threads or on the steps per launch.
    """

    draws, captured = True, False

    def __init__(self, operations: Sequence[Operation], work: StepBuffers, *, instructions: int | None = None) -> None:
        """Translate the list. The tensors that it refers to must keep their addresses.

        Args:
            operations: The list.
            work: The buffers, slots and caches that it works on. On the meta device, the program only says how much
                memory it needs.
            instructions: Index of the instructions that multiply bfloat16; ``None`` for the fastest.

        Raises:
            ValueError: The loop cannot run the operations.
        """
        reason = unsupported(operations, work.dtype, *(cache.entry_type for cache in work.caches))
        if reason:
            raise ValueError(reason)
        library = native()
        self._library, self.operations, self.work = library, tuple(operations), work
        slots, layers = work.slots, len(work.caches)
        self._steps, B = slots.taken.shape
        self._others: list[ctypes.Structure] = []  # that structures of weights refer to
        translated = (_MADE["Operation"] * len(operations))(*map(self._translate, operations))
        caches = (_MADE["Cache"] * layers)(*map(_cache, work.caches, map(work.group_of, range(layers))))
        for cache, pending in zip(caches, work.pending, strict=False):
            if not cache.is_state:
                cache.pending_keys, cache.pending_values = map(_address, (pending.keys, pending.values))
        self._held = translated, caches
        self._program = _MADE["Program"](
            operations=ctypes.addressof(translated),
            count=len(self.operations),
            caches=ctypes.addressof(caches),
            layers=layers,
            type=_number(work.dtype),
            instructions=library.snapstream_best_instructions() if instructions is None else instructions,
            groups=len(slots.base),
            slots=B,
            tokens=slots.tokens,
            most_steps=self._steps,
            token=_address(slots.token),
            token_row=slots.token.stride(0),
            position=_address(slots.position),
            base=_address(slots.base),
            cached=_address(slots.count),
            limit=_address(slots.limit),
            active=_address(slots.active),
            forced=_address(slots.forced),
            taken=_address(slots.taken),
            drafted=_address(slots.drafted),
            accepted=_address(slots.accepted),
            certain=isinstance(work, PromptChunk),
        )
        self._reserve(torch.get_num_threads())

    def _reserve(self, threads: int) -> None:
        """Allocate the temporaries of so many threads."""
        size = self._library.snapstream_scratch(ctypes.byref(self._program), threads)
        if size < 0:
            raise MemoryError("not enough memory to plan the temporaries of decoding")
        device = self.work.slots.token.device
        self._scratch, self._threads = torch.empty(size, dtype=torch.uint8, device=device), threads

    def run(self, steps: int = 1, first: int = 0, last: int | None = None) -> None:
        """Run operations ``first .. last``, a slice of the list, ``steps`` times in one launch.

        Raises:
            MemoryError: There is not enough memory for temporaries.
        """
        assert 0 < steps <= self._steps
        assert not self._scratch.is_meta, "a plan cannot be run"
        threads = torch.get_num_threads()
        if threads != self._threads:
            self._reserve(threads)
        begin, end, _ = slice(first, last).indices(len(self.operations))
        assert begin < end
        scratch = self._scratch.data_ptr()
        if not self._library.snapstream_run(ctypes.byref(self._program), scratch, begin, end, steps, threads):
            raise MemoryError("not enough memory for the temporaries of decoding")

    def _translate(self, operation: Operation) -> ctypes.Structure:
        """The structure of an operation, with the fields of its dataclass."""
        name, dtype = type(operation).__name__, self.work.dtype
        if name not in KINDS:
            raise ValueError(f"the loop does not support {name}")
        for field, wanted in _WANTED.get(name, {}).items():
            dtype_of = getattr(getattr(operation, field), "dtype", wanted)  # of what may be missing, none
            require(dtype_of == wanted, f"{field} of {name} must be {wanted}, not {dtype_of}")
        for field, value in vars(operation).items():
            if isinstance(value, BufferView) and field not in _OWN_TYPE.get(name, ()):
                require(value.dtype in (None, dtype), f"{field} of {name} is {value.dtype}; activations are {dtype}")
        if isinstance(operation, ops.Attend) and operation.sinks is not None:
            require(operation.sinks.shape == (operation.query.heads,), f"sinks of {name} are not one per query head")
        if isinstance(operation, ops.GatedProduct) or (isinstance(operation, ops.ExpertProduct) and operation.gated):
            in_blocks = any(isinstance(part, BlockWeight) for part in operation.weight.parts)
            require(not in_blocks or operation.target.size % LANES == 0, f"gates of {name} end within a tile")
        given = {
            field: value if isinstance(value, int | float) else self._operand(value, f"{field} of {name}")
            for field, value in vars(operation).items()
            if value is not None
        }
        return _of_kind(name, _MADE[name](**given))

    def _operand(self, value: BufferView | Weight | Tensor | SamplingState, name: str) -> ctypes.Structure:
        if isinstance(value, BufferView):
            return structure_of_rows(value.of(self.work.buffers))
        if isinstance(value, SamplingState):
            pointers = ((field, _address(getattr(value, field))) for field in interface.FIELDS["SamplingState"])
            return _MADE["SamplingState"](**dict(pointers))
        if isinstance(value, Weight):
            first, *others = structure_of_weight(value, name)
            self._others += others
            return first
        return structure_of_vector(value, name)


_MADE = interface.STRUCTURES
_WANTED = {
    "Angles": {"frequencies": torch.float32},
    "Attend": {"sinks": torch.float32},
    "Choose": {"correction": torch.float32, "factors": torch.float32},
    "Recur": {"rates": torch.float32, "shifts": torch.float32},
}
"""Vectors of one type only; others may be float32 or bfloat16."""
_OWN_TYPE = {
    "Angles": ("target",),
    "Cap": ("target",),
    "Product": ("target",),
    "Rotate": ("angles",),
    "Choose": ("logits", "weights", "experts"),
    "Sort": ("experts", "ends"),
    "ExpertProduct": ("ends",),
    "Combine": ("weights", "experts"),
    "Draw": ("logits",),
    "Verify": ("logits",),
}
"""Parts whose type is not that of activations."""


def _of_kind(name: str, fields: ctypes.Structure) -> ctypes.Structure:
    """An operation: which, and its fields."""
    return _MADE["Operation"](kind=KINDS[name], **{interface.member(name): fields})


def structure_of_rows(view: Tensor) -> ctypes.Structure:
    """The structure of a part: a view ``[rows, heads, size]``."""
    return _MADE["BufferView"](_address(view), _number(view.dtype), view.stride(0), *view.shape[1:], view.stride(1))


def structure_of_vector(numbers: Tensor, name: str) -> ctypes.Structure:
    """The structure of numbers in a row; ``name`` says in errors whose they are."""
    require(numbers.dtype in TYPES, f"{name} is {numbers.dtype}; float32 and bfloat16 are supported")
    require(numbers.is_contiguous(), f"{name} is not contiguous")
    return _MADE["Vector"](_address(numbers), _number(numbers.dtype))


def structure_of_weight(weight: Weight, name: str) -> list[ctypes.Structure]:
    """The structure of a weight, and those that it refers to, which must live as long."""
    made: list[ctypes.Structure] = []
    *before, _ = weight.parts
    require(
        not any(part.shape[-2] % LANES for part in before), f"{name} changes its format between multiples of {LANES}"
    )
    types = {part.dtype for part in weight.parts if not isinstance(part, BlockWeight)}
    require(len(types) < 2, f"{name} has numbers of several types")
    for part in reversed(weight.parts):
        rows, columns = part.shape[-2:]
        own = part.stored if len(part.shape) == 2 else part.stored[0]
        require(own.is_contiguous(), f"{name} is not contiguous")
        if isinstance(part, BlockWeight):
            kind, step = interface.TYPES.index(part.kind.name), own.shape[0] * LANES
        else:
            kind, step = _number(part.dtype), part.stored.stride(0) // columns if len(part.shape) == 3 else rows
        more = ctypes.addressof(made[0]) if made else None
        made.insert(0, _MADE["Weight"](_address(part.stored), kind, rows, columns, step, more))
    return made


def _cache(cache: LayerCache, group: int) -> ctypes.Structure:
    heads, (_, _, entries, size) = cache.heads, cache.values.shape
    is_state = isinstance(cache, StateCache)
    types = (
        [each.name for each in cache.formats] if isinstance(cache, QuantizedCache) else [type_name(cache.entry_type)]
    )
    require(
        not is_state or cache.keys.dtype == torch.float32, f"matrices of states are {cache.keys.dtype}, not float32"
    )
    return _MADE["Cache"](
        keys=_address(cache.keys),
        values=_address(cache.values),
        frames=_address(cache.frames) if isinstance(cache, QuantizedCache) else None,
        type=interface.TYPES.index(types[0]),
        value_type=interface.TYPES.index(types[-1]),
        group=group,
        kv_heads=heads,
        entries=entries,
        size=size if is_state else cache.size,
        is_state=is_state,
        key_row=cache.keys.shape[3] * cache.keys.itemsize,
        value_row=cache.values.shape[3] * cache.values.itemsize,
        rotation=cache.rotation if isinstance(cache, QuantizedCache) else 1,
    )


def _number(dtype: torch.dtype) -> int:
    return interface.TYPES.index(f"{dtype}".removeprefix("torch."))


def run_rows(name: str, source: Tensor, target: Tensor, **fields: Tensor | float) -> None:
    """Run an operation on rows that are not in buffers.

    Args:
        name: Which operation.
        source: ``[T, heads, size]``; the elements of a head must be contiguous.
        target: As ``source``, of the same dtype.
        **fields: Its other fields: parts as ``source``, vectors, and numbers.

    Raises:
        MemoryError: There is not enough memory for temporaries.
        ValueError: A vector has another type than the kernels support.
    """
    given = {
        field: value
        if isinstance(value, int | float)
        else structure_of_vector(value, f"{field} of {name}")
        if interface.OPERATIONS[name][field] == "Vector"
        else structure_of_rows(value)
        for field, value in fields.items()
    }
    operation = _of_kind(name, _MADE[name](source=structure_of_rows(source), target=structure_of_rows(target), **given))
    rows, threads = source.shape[0], torch.get_num_threads()
    if not native().snapstream_rows(ctypes.byref(operation), _number(source.dtype), rows, threads):
        raise MemoryError("not enough memory for temporaries")


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None or tensor.is_meta:
        return None
    require(tensor.device.type == "cpu", f"a tensor is on {tensor.device}; it must be on the CPU")
    return tensor.data_ptr()

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
from snapstream.kernels.cpu.interface import INSTRUCTIONS, KINDS
from snapstream.kernels.cpu.library import native
from snapstream.kernels.cpu.prefill import packed_shape
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


class Scratch:
    """Memory for the temporaries of programs that run one after another."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int, device: torch.device) -> None:
        """Have room for so many bytes; what was in the memory is lost if there was less."""
        if size > len(self._memory) or self._memory.device != device:
            self._memory = torch.empty(0, dtype=torch.uint8)  # never both
            self._memory = torch.empty(size, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._memory.nbytes

    @property
    def address(self) -> int:
        """Where the memory begins."""
        assert not self._memory.is_meta, "a plan cannot be run"
        return self._memory.data_ptr()


class CpuProgram:
    """Runs a list of operations on the CPU; see :class:`snapstream.kernels.operations.PlainProgram`.

    A slot's results depend only on that slot, bit for bit: not on other slots, on threads or on the steps per launch.
    Those of a prompt's token depend only on the tokens before it: not on those of its chunk that follow. Where there
    are tile registers, slots with room for more than four tokens add up products of bfloat16 in another order.
    """

    draws, captured = True, False

    def __init__(
        self,
        operations: Sequence[Operation],
        work: StepBuffers,
        *,
        instructions: int | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        """Translate the list. The tensors that it refers to must keep their addresses.

        Args:
            operations: The list.
            work: The buffers, slots and caches that it works on. On the meta device, the program only says how much
                memory it needs. If it is a chunk of several tokens of a prompt, products are those of many rows,
                however many rows there are after a :meth:`rebind`.
            instructions: Index of the instructions that multiply bfloat16; ``None`` for the fastest.
            scratch: Memory for temporaries; ``None`` for some of its own.

        Raises:
            ValueError: The loop cannot run the operations.
        """
        reason = unsupported(operations, work.dtype, *(cache.entry_type for cache in work.caches))
        if reason:
            raise ValueError(reason)
        library = native()
        self._library, self.operations, self.work = library, tuple(operations), work
        slots, layers = work.slots, len(work.caches)
        (self._steps, B), is_prompt = slots.taken.shape, isinstance(work, PromptChunk)
        if instructions is None:
            instructions = library.snapstream_best_instructions()
        self._others: list[ctypes.Structure] = []  # that structures of weights refer to
        translated = (_MADE["Operation"] * len(operations))(*map(self._translate, operations))
        caches = (_MADE["Cache"] * layers)(*map(_cache, work.caches, map(work.group_of, range(layers))))
        for cache, pending in zip(caches, work.pending, strict=False):
            if not cache.is_state:
                cache.pending_keys, cache.pending_values = map(_address, (pending.keys, pending.values))
        packed = _packed(operations, work, INSTRUCTIONS[instructions]) if isinstance(work, PromptChunk) else {}
        for layer, values in packed.items():
            caches[layer].packed, caches[layer].packed_head = _address(values), values.stride(0)
        until = work.packed_until if isinstance(work, PromptChunk) else None
        self._until = slots.count.new_zeros(()) if until is None else until
        self._held = translated, caches, packed
        self._views: dict[str, list[tuple[ctypes.Structure, BufferView]]] = {}
        self._places: dict[str, tuple[int, int]] = {}  # of buffers: address, and elements from row to row
        for structure, each in zip(translated, operations, strict=True):
            fields = getattr(structure, interface.member(type(each).__name__))
            for field, value in vars(each).items():
                if isinstance(value, BufferView):
                    self._views.setdefault(value.buffer, []).append((getattr(fields, field), value))
        self._program = _MADE["Program"](
            operations=ctypes.addressof(translated),
            count=len(self.operations),
            caches=ctypes.addressof(caches),
            layers=layers,
            type=_number(work.dtype),
            instructions=instructions,
            groups=len(slots.base),
            slots=B,
            tokens=slots.tokens,
            room=slots.tokens if is_prompt else B * slots.room,
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
            certain=is_prompt,
            many=is_prompt and slots.tokens > 1,
            packed_until=_address(self._until),
        )
        self._scratch, self._most_tokens = Scratch() if scratch is None else scratch, slots.tokens
        self._reserve(torch.get_num_threads())

    def rebind(self, work: StepBuffers) -> None:
        """Work on other rows of buffers, at most as many as at first, with the same slots and caches."""
        slots, program = work.slots, self._program
        assert slots.tokens <= self._most_tokens
        self.work = work
        program.tokens, program.token, program.token_row = slots.tokens, _address(slots.token), slots.token.stride(0)
        for name, views in self._views.items():
            buffer = work.buffers[name]
            place = buffer.data_ptr(), buffer.stride(0)
            if self._places.get(name) == place:
                continue
            self._places.pop(name, None)
            for structure, view in views:
                structure.data, structure.row = place[0] + view.offset * buffer.itemsize, place[1]
            self._places[name] = place  # only now: an exception may have come in between

    def _reserve(self, threads: int) -> None:
        """Have room for the temporaries of so many threads."""
        program, tokens = self._program, self._program.tokens
        program.tokens = self._most_tokens
        size = self._library.snapstream_scratch(ctypes.byref(program), threads)
        program.tokens = tokens
        if size < 0:
            raise MemoryError("not enough memory to plan the temporaries of a program")
        self._scratch.reserve(size, self.work.slots.token.device)
        self._threads, self._bytes = threads, size

    def run(self, steps: int = 1, first: int = 0, last: int | None = None) -> None:
        """Run operations ``first .. last``, a slice of the list, ``steps`` times in one launch.

        Raises:
            MemoryError: There is not enough memory for temporaries.
        """
        assert 0 < steps <= self._steps
        threads = torch.get_num_threads()
        if threads != self._threads or self._scratch.nbytes < self._bytes:
            self._reserve(threads)
        begin, end, _ = slice(first, last).indices(len(self.operations))
        assert begin < end
        scratch = self._scratch.address
        if not self._library.snapstream_run(ctypes.byref(self._program), scratch, begin, end, steps, threads):
            raise MemoryError("not enough memory for the temporaries of a program")

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
            return structure_of_rows(self.work.buffers[value.buffer], value)
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


def structure_of_rows(buffer: Tensor, view: BufferView) -> ctypes.Structure:
    """The structure of a part of a buffer's rows."""
    first, number = _address(buffer), _number(buffer.dtype)
    data = None if first is None else first + view.offset * buffer.itemsize
    return _MADE["BufferView"](data, number, buffer.stride(0), view.heads, view.size, view.step)


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
    require(cache.keys.is_contiguous() and cache.values.is_contiguous(), "a cache is not contiguous")
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


def _packed(operations: Sequence[Operation], work: PromptChunk, instructions: str) -> dict[int, Tensor]:
    """By layer, where attention keeps a copy of values in the order in which it multiplies them."""
    made: dict[int, Tensor] = {}
    if work.dtype != torch.bfloat16 or instructions == "portable":
        return made
    for each in operations:
        if isinstance(each, ops.Attend):
            values = work.caches[each.layer].values[0]
            shape = packed_shape(torch.Size((*values.shape[:2], each.target.size)), instructions)
            made[each.layer] = work.packed[work.group_of(each.layer)] if work.packed else values.new_empty(shape)
    return made


def _number(dtype: torch.dtype) -> int:
    return interface.TYPES.index(f"{dtype}".removeprefix("torch."))


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None or tensor.is_meta:
        return None
    require(tensor.device.type == "cpu", f"a tensor is on {tensor.device}; it must be on the CPU")
    return tensor.data_ptr()

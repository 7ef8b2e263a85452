"""Every structure that Python hands to the kernels: here it becomes a ctypes class, and a declaration in C++.

An operation has one structure with the fields of its dataclass in :mod:`snapstream.kernels.operations` or
:mod:`snapstream.kernels.recurrence`, under the same names. The others are listed here. :mod:`.build` compiles the
kernels with the header that :func:`header` returns. It asserts the sizes and offsets that ctypes uses. ``python -m
snapstream.kernels.cpu.interface`` prints it.

``build.py`` loads this file by its path, without the package, so it may import only the standard library.
"""

from __future__ import annotations

import ast
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

TYPES = ("float32", "bfloat16", "int64", "int8", "int4", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
"""Types of numbers in memory, by their number; ``int8`` and ``int4`` are codes of cache entries, and those from
``q4_0`` on formats of weights in blocks."""
INSTRUCTIONS = ("portable", "pairs", "tiles")
"""How kernels multiply: float32 on any processor, dot products of bfloat16 pairs, tile registers (AMX)."""
ACTIVATIONS = ("silu", "gelu", "clamped")
"""Activations of gated products, by their number in :class:`snapstream.kernels.plain.Activation`."""

_STRUCTURES = {
    # A range of elements in every row of a buffer: `heads` times `size` of them. `row` and `stride` are the distances
    # between rows and between heads, in elements. No data: the operation has no such part.
    "BufferView": "void* data; int64_t type, row, heads, size, stride",
    # Matrices of `rows` times `columns` numbers, one after the other; `step` rows from one to the next. More rows, in
    # another format, may follow: `more` is then another Weight.
    "Weight": "const void* data; int64_t type, rows, columns, step; const void* more",
    # Numbers in a row; no data: there are none.
    "Vector": "const void* data; int64_t type",
    # What the requests in the slots want, [slots] or [slots, vocabulary]; see snapstream/kernels/sampling.py.
    "SamplingState": (
        "const float* temperature, top_p, min_p, presence, frequency, repetition, bias;"
        "const int64_t* top_k, seed, end_from;"
        "const bool* biased, in_prompt, ends, masked;"
        "const uint32_t* allowed;"  # [tokens, slots, words], one bit per token
        "int32_t* output_counts"
    ),
    # One layer's cache, [slots, kv_heads, entries, size]; `values` may be `keys`. Tokens that are not certain yet are
    # in the pending tensors, [slots, kv_heads, tokens, size]. `group` is the layer's group. Of a state, `keys` are the
    # matrices, float32 [slots, kv_heads, key, value], and `values` the latest inputs, [slots, entries, size]. A key and
    # a value have `key_row` and `value_row` bytes. Codes have frames, [slots, kv_heads, 2, size]; a `rotation` mixes
    # so many channels. A prompt's values are packed for its attention: heads are `packed_head` numbers apart.
    "Cache": (
        "void* keys, values, pending_keys, pending_values, packed; const float* frames;"
        "int64_t type, value_type, group, kv_heads, entries, size, is_state, key_row, value_row, rotation, packed_head"
    ),
    # Rows of numbers [heads, entries, size], `head` and `row` numbers apart, that become codes of type `codes`,
    # `out_head` and `out_row` bytes apart. Without a pointer there are no frames.
    "Encoding": (
        "const void* numbers; const float* frames; uint8_t* out;"
        "int64_t type, codes, heads, entries, size, rotation, head, row, out_head, out_row"
    ),
    # Rows of a weight as GGUF stores them, in blocks of `block` columns and `bytes` bytes, to be brought into tiles.
    "Stored": (
        "const uint8_t* rows_from; const int64_t* order;"  # order: which row is first, second, ...; no pointer: as is
        "uint8_t* tiles;"
        "int64_t type, rows, columns, block, bytes, fields;"
        "const int64_t* counts, widths"  # of the fields of a block
    ),
    "Program": (
        "const Operation* operations; int64_t count;"
        "const Cache* caches; int64_t layers;"
        "int64_t type, instructions;"  # of activations; how bfloat16 is multiplied
        "int64_t groups, slots, tokens, most_steps;"  # groups of layers; tokens per slot; steps per launch
        "int64_t room;"  # tokens of all slots that any program of theirs has room for
        "int64_t* token; int64_t token_row;"  # [slots, tokens], with slots token_row elements apart
        "int64_t* position;"  # [slots]
        "int64_t* base, cached, limit;"  # [groups, slots], see snapstream/compression/layout.py
        "const bool* active;"  # [slots]; no pointer: all are
        "int64_t* forced;"  # [slots, most_steps]: tokens that must be taken next, -1 for none
        "int64_t* taken;"  # [most_steps, slots]: tokens that were taken
        "const int64_t* drafted;"  # [slots]: guesses after each first token; no pointer: as many as there is room for
        "int64_t* accepted;"  # [slots]: how many of the tokens taken are certain
        "int64_t certain;"  # whether all tokens are, as those of a prompt
        "int64_t many;"  # whether products are those of many rows, however many there are
        "const int64_t* packed_until"  # entries of a prompt's caches whose values are packed
    ),
    # Attention of the tokens of a prompt, or of its last queries. Strides are in elements.
    "Problem": (
        "const T* query, keys, values; T* out, packed;"
        "int64_t tokens, heads, kv_heads, size, columns;"  # elements of a key, and of a value
        "int64_t query_token, query_head, key_head, key_row, value_head, value_row, packed_head, out_token, out_head;"
        "int64_t start, readable;"  # position of the first token; entries that memory holds
        "int64_t packed_until;"  # entries that are already packed
        "int64_t window;"  # keys that a token sees, its own included; 0: all
        "const float* sinks;"  # one extra logit per head, [heads]; no pointer: there are none
        "double scale, cap"  # factor on logits, and their soft cap; 0: none
    ),
    # The votes of the last queries, for all sequences of a batch.
    "Voting": (
        "const int64_t* length, first_voter, candidate_end;"  # [sequences]
        "float* votes;"  # [sums, largest][sequences][kv_heads][readable], zeros
        "int64_t sequences, query_sequence, key_sequence;"  # how many, and elements from one to the next
        "int64_t sink, everything;"  # candidates begin at `sink`; whether the softmax of sums includes all other tokens
        "int64_t summed, largest"  # how many of the last queries vote by their sum, and how many by the largest share
    ),
    "Lists": (
        "const float* const* scores;"  # of each list: [sequences][heads][length]
        "const int64_t* every;"  # [lists][sequences]: rounds from one token to the next
        "const int64_t* candidate_end;"  # [sequences]
        "float* out;"  # [sequences][heads][length], zeros
        "int64_t lists, sequences, heads, length, sink, most"
    ),
    "Smoothing": "const float* votes; float* out; int64_t rows, length, largest, width, shift",  # both [rows][length]
    "Selection": (
        "const float* scores;"  # [sequences][heads][length]
        "const int64_t* base, count, lengths;"  # [sequences]
        "int64_t* positions;"  # [sequences][heads][capacity]
        "int64_t sequences, heads, length, sink, top_k, capacity"
    ),
    "Differences": (
        "const void* keys; const int64_t* candidate_end;"  # [sequences]
        "float* out;"  # [sequences][heads][length], zeros
        "int64_t sequences, heads, length, size, key_sequence, key_head, key_row, sink;"
        "int64_t near;"  # block size; a key is compared with its block and those beside it, or with all keys if 0
        "double shortest"  # lower bound on the norm of a key
    ),
}
_OF_ANNOTATION = {
    "BufferView": "BufferView",
    "BufferView | None": "BufferView",
    "Weight": "Weight",
    "SamplingState": "SamplingState",
    "Tensor": "Vector",
    "Tensor | None": "Vector",
    "int": "int64_t",
    "Activation": "int64_t",
    "bool": "int64_t",
    "float": "double",
}
"""The type in C++ of a field of an operation."""
_NUMBERS = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}

_Fields = dict[str, str]


def _declared(text: str) -> _Fields:
    """Names and types of fields; a type holds for all names after it."""
    fields = _Fields()
    for declaration in text.split(";"):
        first, *names = declaration.split(",")
        kind, name = first.rsplit(maxsplit=1)
        fields |= {each.strip(): kind.strip() for each in (name, *names)}
    return fields


def _operations() -> Iterator[tuple[str, _Fields]]:
    """Names and fields of the operations, in the order of their classes."""
    folder = Path(__file__).parent.parent
    sources = (ast.parse((folder / f"{name}.py").read_text()) for name in ("operations", "recurrence", "taking"))
    for each in (statement for source in sources for statement in source.body):
        if isinstance(each, ast.ClassDef) and any(ast.unparse(base) == "Operation" for base in each.bases):
            fields = [one for one in each.body if isinstance(one, ast.AnnAssign)]
            yield each.name, {ast.unparse(one.target): _OF_ANNOTATION[ast.unparse(one.annotation)] for one in fields}


FIELDS: dict[str, _Fields] = {name: _declared(text) for name, text in _STRUCTURES.items()}
"""Fields of every structure, and their types in C++."""
OPERATIONS: dict[str, _Fields] = dict(_operations())
"""The same of every operation; one without fields has one that is not used."""


def member(name: str) -> str:
    """The name of an operation's structure in the union of all."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _classes() -> dict[str, type[ctypes.Structure]]:
    made: dict[str, type[ctypes.Structure]] = {}

    def kind_of(kind: str) -> type:
        return ctypes.c_void_p if kind.endswith("*") else made[kind] if kind in made else _NUMBERS[kind]

    for name, fields in (FIELDS | OPERATIONS).items():
        listed = [(field, kind_of(kind)) for field, kind in fields.items()]
        made[name] = type(name, (ctypes.Structure,), {"_fields_": listed or [("unused", ctypes.c_int64)]})
    union = type("Fields", (ctypes.Union,), {"_fields_": [(member(name), made[name]) for name in OPERATIONS]})
    listed = [("kind", ctypes.c_int64), ("fields", union)]
    made["Operation"] = type("Operation", (ctypes.Structure,), {"_anonymous_": ("fields",), "_fields_": listed})
    return made


STRUCTURES = _classes()
"""The ctypes classes of all structures, by name. Pointers are addresses."""
KINDS = {name: number for number, name in enumerate(OPERATIONS)}
"""The number of each operation."""


def header() -> str:
    """The declarations of all structures in C++."""
    lines = ["// Written by snapstream/kernels/cpu/interface.py.", "#pragma once", "#include <cstddef>"]
    lines += ["#include <cstdint>", '#define EXPORT extern "C" __attribute__((visibility("default")))']
    lines += ["namespace snapstream {", "struct Operation;"]
    for name, listed in (("Type", TYPES), ("Instructions", INSTRUCTIONS), ("Activation", ACTIVATIONS)):
        lines.append(f"enum {name} : int64_t {{ {', '.join(each.upper() for each in listed)} }};")
    for name, fields in (FIELDS | OPERATIONS).items():
        lines += _declaration(name, fields)
    lines.append(f"enum class Kind : int64_t {{ {', '.join(OPERATIONS)} }};")
    lines.append("struct Operation { Kind kind; union {")
    lines += [f"  {name} {member(name)};" for name in OPERATIONS]
    lines += ["}; };", *_assertions("Operation", "Operation", ["kind", *map(member, OPERATIONS)])]
    # The caller's function is overloaded for the types of all operations.
    lines.append("template <typename F> auto visit(const Operation& o, F&& function) { switch (o.kind) {")
    first, *others = OPERATIONS
    lines += [f"  case Kind::{name}: return function(o.{member(name)});" for name in others]
    lines += [f"  default: return function(o.{member(first)});", "} }", "}"]
    return "\n".join(lines) + "\n"


def _declaration(name: str, fields: _Fields) -> list[str]:
    is_template = any(kind.endswith("T*") for kind in fields.values())
    lines = [("template <typename T> " if is_template else "") + f"struct {name} {{"]
    lines += [f"  {kind} {field};" for field, kind in fields.items()] or ["  int64_t unused;"]
    return [*lines, "};", *_assertions(name, name + ("<float>" if is_template else ""), list(fields))]


def _assertions(name: str, written: str, fields: list[str]) -> list[str]:
    made = STRUCTURES[name]
    lines = [f"static_assert(sizeof({written}) == {ctypes.sizeof(made)});"]
    offsets = ((field, getattr(made, field).offset) for field in fields)
    return lines + [f"static_assert(offsetof({written}, {field}) == {offset});" for field, offset in offsets]


if __name__ == "__main__":
    print(header(), end="")

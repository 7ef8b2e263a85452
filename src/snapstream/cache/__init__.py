"""KV caches: one layer's entries or state, groups of layers, and one sequence's compressed cache.

They hold prompts during prefill, slots during decoding, sessions between two turns, and files on disk. Shapes use the
letters of :mod:`snapstream.compression`.
"""

from snapstream.cache.codes import CODES, EntryType, QuantizedType, dense_dtype, type_name
from snapstream.cache.compressed import CompressedSequence
from snapstream.cache.directory import SequenceDirectory
from snapstream.cache.groups import CacheSizes, LayerGroup, make_caches, reported_layers
from snapstream.cache.layer import EntryShape, GroupedCache, LatentCache, LayerCache
from snapstream.cache.quantized import QuantizedCache
from snapstream.cache.state import StateCache, StateShape, no_positions
from snapstream.cache.store import SequenceStore, Stored, StoreFullError

__all__ = [
    "CODES",
    "CacheSizes",
    "CompressedSequence",
    "EntryShape",
    "EntryType",
    "GroupedCache",
    "LatentCache",
    "LayerCache",
    "LayerGroup",
    "QuantizedCache",
    "QuantizedType",
    "SequenceDirectory",
    "SequenceStore",
    "StateCache",
    "StateShape",
    "StoreFullError",
    "Stored",
    "dense_dtype",
    "make_caches",
    "no_positions",
    "reported_layers",
    "type_name",
]

"""KV caches: one layer's entries or state, groups of layers, and one sequence's compressed cache.

They hold prompts during prefill, slots during decoding, sessions between two turns, and files on disk. Shapes use the
letters of :mod:`snapstream.compression`.
"""

from snapstream.cache.compressed import CompressedSequence
from snapstream.cache.groups import CacheSizes, LayerGroup, reported_layers
from snapstream.cache.layer import EntryShape, GroupedCache, LatentCache, LayerCache
from snapstream.cache.state import StateCache, StateShape, no_positions

__all__ = [
    "CacheSizes",
    "CompressedSequence",
    "EntryShape",
    "GroupedCache",
    "LatentCache",
    "LayerCache",
    "LayerGroup",
    "StateCache",
    "StateShape",
    "no_positions",
    "reported_layers",
]

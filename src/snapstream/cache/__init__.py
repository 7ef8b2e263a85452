"""KV caches: one layer's entries, and one sequence's compressed cache.

They hold prompts during prefill, slots during decoding, sessions between two turns, and files on disk. Shapes use the
letters of :mod:`snapstream.compression`.
"""

from snapstream.cache.compressed import CompressedSequence
from snapstream.cache.layer import EntryShape, GroupedCache, LatentCache, LayerCache

__all__ = ["CompressedSequence", "EntryShape", "GroupedCache", "LatentCache", "LayerCache"]

"""The cache as a thing: one layer's entries, and one sequence's compressed cache.

A prompt that is read, the slots that decode, the sessions between two turns and the files on a disk are four uses of
it. Shapes have the letters of :mod:`snapstream.compression`.
"""

from snapstream.cache.compressed import CompressedSequence
from snapstream.cache.layer import EntryShape, GroupedCache, LatentCache, LayerCache

__all__ = ["CompressedSequence", "EntryShape", "GroupedCache", "LatentCache", "LayerCache"]

"""The compression method as pure functions on plain tensors: cache layout, votes, selection.

Shapes use the same letters everywhere: ``B`` sequences or slots, ``T`` query tokens, ``L`` prompt length (padded),
``H`` query heads, ``N`` KV heads, ``G = H / N``, ``D`` head size, ``C`` cache entries, ``S`` sinks, ``R`` recent,
``K`` top-K, ``W`` observation window.
"""

from snapstream.compression.compress import choose_entries, select_entries
from snapstream.compression.layout import (
    Layout,
    LayoutTensors,
    entry_of,
    lay_out,
    lay_out_window,
    layout_tensors,
    next_entry,
    surviving_tokens,
)
from snapstream.compression.pins import end_of_pins, most_pinned, pinned_levels
from snapstream.compression.scoring import kept_attention, observation_votes, pool_votes, random_votes

__all__ = [
    "Layout",
    "LayoutTensors",
    "choose_entries",
    "end_of_pins",
    "entry_of",
    "kept_attention",
    "lay_out",
    "lay_out_window",
    "layout_tensors",
    "most_pinned",
    "next_entry",
    "observation_votes",
    "pinned_levels",
    "pool_votes",
    "random_votes",
    "select_entries",
    "surviving_tokens",
]

"""The method, as pure functions on plain tensors: layout of a compressed cache, votes, compression.

Letters for shapes, the same everywhere: ``B`` sequences or slots, ``T`` query tokens, ``L`` prompt length (padded),
``H`` query heads, ``N`` KV heads, ``G = H / N``, ``D`` head size, ``C`` cache entries, ``S`` sinks, ``R`` recent,
``K`` top-K, ``W`` observation window.
"""

from snapstream.compression.compress import CompressedKV, choose_entries, compress, select_entries
from snapstream.compression.layout import (
    PlanTensors,
    PromptPlan,
    entry_of,
    next_slot,
    plan_prompt,
    plan_tensors,
    surviving_tokens,
)
from snapstream.compression.scoring import kept_attention, observation_votes, pool_votes, random_votes

__all__ = [
    "CompressedKV",
    "PlanTensors",
    "PromptPlan",
    "choose_entries",
    "compress",
    "entry_of",
    "kept_attention",
    "next_slot",
    "observation_votes",
    "plan_prompt",
    "plan_tensors",
    "pool_votes",
    "random_votes",
    "select_entries",
    "surviving_tokens",
]

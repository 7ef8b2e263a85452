"""User settings: the cache budget of a sequence, the sampling parameters of a request, and the engine's settings."""

from snapstream.config.budget import MIN_CAPACITY, CacheBudget, Ring
from snapstream.config.engine import EngineConfig
from snapstream.config.memory import MemoryBudget
from snapstream.config.policy import (
    DEFAULT_POLICY,
    KEPT_QUERIES,
    WINDOW,
    LayerPrompt,
    Normalize,
    Policy,
    Pooling,
    make_policy,
    policy_names,
)
from snapstream.config.sampling import SamplingParams
from snapstream.config.structured_outputs import StructuredOutputs

__all__ = [
    "DEFAULT_POLICY",
    "KEPT_QUERIES",
    "MIN_CAPACITY",
    "WINDOW",
    "CacheBudget",
    "EngineConfig",
    "LayerPrompt",
    "MemoryBudget",
    "Normalize",
    "Policy",
    "Pooling",
    "Ring",
    "SamplingParams",
    "StructuredOutputs",
    "make_policy",
    "policy_names",
]

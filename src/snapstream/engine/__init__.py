"""The built-in engine: static graphs and continuous batching on one device. It knows nothing about HTTP."""

from snapstream.cache import CompressedSequence
from snapstream.engine.context import Context
from snapstream.engine.llm import LLM
from snapstream.engine.memory.plan import EnginePlan, MemoryPlan
from snapstream.engine.memory.planner import plan_engine
from snapstream.engine.requests.output import CacheUse, RequestOutput, SlotUse, TokenLogprobs

__all__ = [
    "LLM",
    "CacheUse",
    "CompressedSequence",
    "Context",
    "EnginePlan",
    "MemoryPlan",
    "RequestOutput",
    "SlotUse",
    "TokenLogprobs",
    "plan_engine",
]

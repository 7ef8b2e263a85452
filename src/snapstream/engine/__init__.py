"""The built-in engine: static graphs, continuous batching, one device. Nothing about HTTP."""

from snapstream.engine.engine import LLM
from snapstream.engine.memory import MemoryPlan, plan_memory
from snapstream.engine.request import CacheUse, RequestOutput, TokenLogprobs

__all__ = ["LLM", "CacheUse", "MemoryPlan", "RequestOutput", "TokenLogprobs", "plan_memory"]

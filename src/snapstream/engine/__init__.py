"""The built-in engine: static graphs, continuous batching, one device. Nothing about HTTP."""

from snapstream.engine.conversation import SavedSequence
from snapstream.engine.llm import LLM
from snapstream.engine.memory import MemoryPlan, plan_memory
from snapstream.engine.output import CacheUse, RequestOutput, SlotUse, TokenLogprobs

__all__ = ["LLM", "CacheUse", "MemoryPlan", "RequestOutput", "SavedSequence", "SlotUse", "TokenLogprobs", "plan_memory"]

"""LLM inference with a KV cache of fixed size per sequence (SnapStream, arXiv 2511.03092)."""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from snapstream.config import CacheBudget, EngineConfig, MemoryBudget, SamplingParams
from snapstream.errors import (
    CacheFileError,
    CheckpointError,
    ConfigurationError,
    MemoryPlanError,
    RequestError,
    SnapStreamError,
)
from snapstream.threads import sleep_while_waiting

if TYPE_CHECKING:
    from snapstream.engine import LLM, Context, RequestOutput

try:
    __version__ = version("snapstream-llm")
except PackageNotFoundError:  # running from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "LLM",
    "CacheBudget",
    "CacheFileError",
    "CheckpointError",
    "ConfigurationError",
    "Context",
    "EngineConfig",
    "MemoryBudget",
    "MemoryPlanError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SnapStreamError",
    "__version__",
]


def __getattr__(name: str) -> object:
    """Load the engine, which imports torch, on first access."""
    if name in ("LLM", "Context", "RequestOutput"):
        sleep_while_waiting()
        from snapstream import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'snapstream' has no attribute {name!r}")


def __dir__() -> list[str]:
    """All public names, including those that are not loaded yet."""
    return sorted({*globals(), *__all__})

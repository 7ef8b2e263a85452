"""The parts of one server that answer requests."""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.engine import LLM
from snapstream.serving.contexts import ContextStore
from snapstream.serving.driver import EngineDriver
from snapstream.serving.metrics import ServerMetrics
from snapstream.serving.prompts import PromptReader
from snapstream.serving.sessions import SessionStore
from snapstream.serving.settings import ServerSettings


@dataclass(frozen=True)
class Parts:
    """What :func:`~snapstream.serving.app.create_app` puts together.

    Attributes:
        llm: The engine; after the start only the driver runs it.
        settings: The operator's.
        driver: The engine's thread.
        reader: Reads prompts.
        sessions: Kept conversations.
        contexts: Texts that were read once and are asked many times.
        metrics: Counts.
    """

    llm: LLM
    settings: ServerSettings
    driver: EngineDriver
    reader: PromptReader
    sessions: SessionStore
    contexts: ContextStore
    metrics: ServerMetrics

"""The parts of one server, which answer requests together."""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.engine import LLM
from snapstream.serving.contexts import ContextStore
from snapstream.serving.driver import EngineDriver
from snapstream.serving.metrics import ServerMetrics
from snapstream.serving.prompts import PromptReader
from snapstream.serving.sessions import SessionStore
from snapstream.serving.settings import ServerSettings
from snapstream.serving.tools.formats import AnswerFormat


@dataclass(frozen=True)
class Parts:
    """The parts that :func:`~snapstream.serving.app.create_app` creates.

    Attributes:
        llm: The engine; once the server has started, only the driver runs it.
        settings: The operator's settings.
        driver: The engine's thread.
        reader: Tokenizes prompts.
        sessions: The store of sessions.
        contexts: The store of contexts.
        metrics: The server's metrics.
        answers: How the model writes reasoning and calls of tools.
    """

    llm: LLM
    settings: ServerSettings
    driver: EngineDriver
    reader: PromptReader
    sessions: SessionStore
    contexts: ContextStore
    metrics: ServerMetrics
    answers: AnswerFormat

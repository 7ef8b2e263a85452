"""Assembles the server's parts into an ASGI application."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from snapstream import __version__
from snapstream.cache import SequenceDirectory, SequenceStore
from snapstream.engine import LLM
from snapstream.errors import ConfigurationError
from snapstream.serving import context_routes, errors, operation, page, routes
from snapstream.serving.apis import routes as api_routes
from snapstream.serving.bodies import BodyMiddleware
from snapstream.serving.completions import Completions
from snapstream.serving.contexts import ContextStore
from snapstream.serving.driver import EngineDriver
from snapstream.serving.metrics import ServerMetrics
from snapstream.serving.middleware import AccessMiddleware, ErrorMiddleware, HeadMiddleware, KeyMiddleware
from snapstream.serving.parts import Parts
from snapstream.serving.prompts import PromptReader
from snapstream.serving.sessions import SessionStore
from snapstream.serving.settings import ServerSettings
from snapstream.serving.tools.formats import find_answers

logger = logging.getLogger(__name__)


def create_app(llm: LLM, settings: ServerSettings, *, on_death: Callable[[], None] = lambda: None) -> FastAPI:
    """Create the application, which starts the engine's thread at startup and ends it at shutdown.

    Args:
        llm: The engine; from now on only the application may use it.
        settings: The operator's settings.
        on_death: Called when the engine has failed permanently.

    Returns:
        The application; its parts are in ``app.state.parts``.

    Raises:
        ConfigurationError: A directory is set for sessions or contexts that are disabled, or cannot be written to.
    """
    metrics = ServerMetrics()
    driver = EngineDriver(llm, max_queue=settings.max_queue, listener=metrics, on_death=on_death)
    stores = _stores(llm, settings)
    sessions, contexts = SessionStore(stores[0]), ContextStore(stores[1])
    answers = find_answers(llm, settings)
    reader = PromptReader(llm, settings.template_timeout, answers.form.describe)
    parts = Parts(llm, settings, driver, reader, sessions, contexts, metrics, answers)
    metrics.watch(lambda: operation.gauges(parts))

    async def sweep() -> None:
        while True:
            await anyio.sleep(min(settings.session_ttl / 4, 30))
            try:
                await anyio.to_thread.run_sync(sessions.store.sweep)
            except Exception:  # the next one tries again
                logger.exception("expired sessions could not be deleted")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        driver.start()
        async with anyio.create_task_group() as group:
            group.start_soon(sweep)
            yield
            group.cancel_scope.cancel()
        await driver.stop()
        for close in (*(store.close for store in stores), llm.engine.close):
            try:
                await anyio.to_thread.run_sync(close)
            except Exception:  # others may still be saved
                logger.exception("something could not be saved")

    app = FastAPI(
        title="SnapStream",
        version=__version__,
        description="LLM inference with a KV cache of fixed size per sequence, behind OpenAI's API.",
        lifespan=lifespan,
        responses=errors.DOCUMENTED,
        redirect_slashes=False,  # a path with an empty name at its end does not exist
        # The framework's documentation pages load code from other hosts.
        docs_url=None,
        redoc_url=None,
    )
    app.state.parts = parts
    errors.install(app)
    completions = Completions(parts)
    app.include_router(routes.router(parts, completions))
    app.include_router(api_routes.router(parts, completions))
    app.include_router(context_routes.router(parts, completions))
    app.include_router(operation.router(parts))
    app.include_router(page.router(settings.example))
    # The last one added is the outermost, so every response has a request id, and browsers may read all of them.
    app.add_middleware(BodyMiddleware, max_bytes=settings.max_body_bytes, seconds=settings.body_timeout)
    app.add_middleware(KeyMiddleware, api_keys=settings.api_keys)
    app.add_middleware(ErrorMiddleware)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(HeadMiddleware)
    app.add_middleware(AccessMiddleware, metrics=metrics)
    return app


def _stores(llm: LLM, settings: ServerSettings) -> tuple[SequenceStore, SequenceStore]:
    """The stores of sessions and of contexts.

    Raises:
        ConfigurationError: A directory is set for what is disabled, or cannot be written to.
    """
    plan, files, seconds = llm.engine.plan, llm.engine.files, settings.session_ttl

    def directory(kind: str, path: Path | None, planned: int, disk: int, seconds: float) -> SequenceDirectory | None:
        if path is None:
            return None
        if not planned:
            raise ConfigurationError(f"a {kind} directory needs {kind}s; start the server with --{kind}s SIZE")
        return SequenceDirectory(path, files, kind=kind, max_bytes=disk, seconds=seconds)

    of_sessions = directory("session", settings.session_dir, plan.sessions, settings.session_disk, seconds)
    of_contexts = directory("context", settings.context_dir, plan.contexts, settings.context_disk, math.inf)
    return (
        SequenceStore(plan.sessions, of_sessions, seconds=seconds, lists_files=False),
        SequenceStore(plan.contexts, of_contexts),
    )

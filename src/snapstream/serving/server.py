"""Start, and a stop that finishes what runs, or says clearly that it does not."""

from __future__ import annotations

import asyncio
import logging
import socket

import uvicorn

from snapstream.engine import LLM
from snapstream.serving.app import create_app
from snapstream.serving.settings import ServerSettings

logger = logging.getLogger(__name__)

_LAST_WORDS = 5
"""Seconds for error messages to reach clients after the drain."""


class Server(uvicorn.Server):
    """One server in one process.

    Args:
        llm: The engine.
        settings: The operator's.
    """

    def __init__(self, llm: LLM, settings: ServerSettings) -> None:
        self.failed = False
        self.settings = settings
        self.application = create_app(llm, settings, on_death=self._engine_died)
        self._driver = self.application.state.parts.driver
        super().__init__(
            uvicorn.Config(
                self.application,
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=int(settings.drain_timeout) + _LAST_WORDS,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no new connections, let requests end or fail them, then stop."""
        logger.info("stopping: %d sequences are running", self._driver.unfinished)
        drain = asyncio.create_task(self._driver.drain(self.settings.drain_timeout))
        try:
            await super().shutdown(sockets)
        finally:
            drain.cancel()
        logger.info("stopped")

    def _engine_died(self) -> None:
        self.failed = True
        self.should_exit = True

    def address(self) -> str:
        """Where it listens, once it does."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        if self.started:
            logger.info("listening on %s", self.address())


def serve(llm: LLM, settings: ServerSettings, listener: socket.socket) -> bool:
    """Serve until a signal says to stop.

    Args:
        llm: The engine.
        settings: The operator's.
        listener: A bound socket.

    Returns:
        Whether it ended well; ``False`` if the engine failed.
    """
    server = Server(llm, settings)
    server.run(sockets=[listener])
    return server.started and not server.failed

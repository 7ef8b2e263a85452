"""Starts the server, and stops it so that running requests are finished or fail with a clear error."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
import webbrowser
from types import FrameType
from typing import Any

import uvicorn

from snapstream.engine import LLM
from snapstream.serving.app import create_app
from snapstream.serving.settings import ServerSettings

logger = logging.getLogger(__name__)

_FLUSHES = 10
"""Multiple of ``flush_timeout`` that a finished answer may take to reach a client that reads it slowly."""

_LAST_WORDS = 5
"""Seconds for error messages to reach clients after the drain."""


class Server(uvicorn.Server):
    """One server in one process.

    Args:
        llm: The engine.
        settings: The operator's settings.
        open_page: Whether to open the page in a browser once the server listens.
    """

    def __init__(self, llm: LLM, settings: ServerSettings, *, open_page: bool = False) -> None:
        self.failed = False
        self._open_page = open_page
        # Per closing connection: unsent bytes, since when their number has not changed, and since when it is closing.
        self._stuck: dict[Any, tuple[int, float, float]] = {}
        self.llm, self.settings = llm, settings
        self.application = create_app(llm, settings, on_death=self._engine_died)
        self._driver = self.application.state.parts.driver
        self._warming = threading.Thread(target=_warm_up_chat_template, args=(llm,), daemon=True)
        super().__init__(
            uvicorn.Config(
                self.application,
                # h11 reads bodies of requests that offer another protocol, as Java's client does, and answers HTTP/1.0
                # without chunks; httptools does neither.
                http="h11",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=int(settings.drain_timeout) + _LAST_WORDS,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no new connections, let running requests finish or fail, then stop."""
        logger.info("stopping: %d sequences are running", self._driver.unfinished)
        drain = asyncio.create_task(self._driver.drain(self.settings.drain_timeout))
        try:
            await super().shutdown(sockets)
        finally:
            drain.cancel()
            if self._warming.is_alive():  # an import must not go on while the interpreter ends
                await asyncio.to_thread(self._warming.join, _LAST_WORDS)
        logger.info("stopped")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop gracefully at the first signal, and immediately at the second, of whatever kind."""
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Once a second, abort closing connections whose clients no longer read."""
        if counter % 10 == 0:
            self._break_off_stuck()
        return await super().on_tick(counter)

    def _break_off_stuck(self) -> None:
        now, limit, stuck = time.monotonic(), self.settings.flush_timeout, {}
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is None or not transport.is_closing():
                continue
            left = transport.get_write_buffer_size()
            before, moved, began = self._stuck.get(connection, (left, now, now))
            stuck[connection] = left, moved if left == before else now, began
            if now - stuck[connection][1] > limit or now - began > _FLUSHES * limit:
                transport.abort()
        self._stuck = stuck

    def _engine_died(self) -> None:
        self.failed = True
        self.should_exit = True

    def address(self) -> str:
        """The URL that the server listens on, once it does."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, and log the address."""
        await super().startup(sockets)
        if self.started:
            logger.info("listening on %s", self.address())
            self._warming.start()
            if self._open_page:  # in a thread, as starting a browser may block
                threading.Thread(target=webbrowser.open, args=(self.address(),), daemon=True).start()


def _warm_up_chat_template(llm: LLM) -> None:
    """Apply the chat template once: what it needs is imported now, not when the first conversation waits for it."""
    try:
        llm.chat_text([{"role": "user", "content": "."}])
    except Exception:  # requests that need it say what is wrong
        logger.debug("the chat template cannot be applied", exc_info=True)


def serve(llm: LLM, settings: ServerSettings, listener: socket.socket, *, open_page: bool = False) -> bool:
    """Serve until a signal stops the server.

    Args:
        llm: The engine.
        settings: The operator's settings.
        listener: A bound socket.
        open_page: Whether to open the page in a browser once the server listens.

    Returns:
        Whether it ended normally; ``False`` if it could not start or the engine failed.
    """
    server = Server(llm, settings, open_page=open_page)
    server.run(sockets=[listener])
    return server.started and not server.failed

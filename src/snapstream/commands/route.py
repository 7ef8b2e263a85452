"""``snapstream route``: the proxy in front of vLLM instances for prefill and decode."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from snapstream.errors import missing_extra
from snapstream.routing.settings import RouterSettings, parse_urls


def route(
    decode: Annotated[list[str], typer.Option(help="URLs of decode instances, separated by commas; can be repeated.")],
    prefill: Annotated[
        list[str] | None,
        typer.Option(help="URLs of prefill instances. Without any, decode instances do everything."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes any free one.")] = 8000,
    attempts: Annotated[
        int, typer.Option(min=1, help="Instances to try before the first byte of an answer is sent.")
    ] = 3,
    check_seconds: Annotated[float, typer.Option(help="Seconds between health checks of an instance.")] = 2.0,
    keep_alive_seconds: Annotated[
        float, typer.Option(help="Seconds of silence after which a stream sends a comment; 0 turns this off.")
    ] = 5.0,
) -> None:
    """Serve separate vLLM instances for prefill and decode under one address. Needs the extra "serve"."""
    settings = RouterSettings(
        prefill=parse_urls(prefill or []),
        decode=parse_urls(decode),
        attempts=attempts,
        check_seconds=check_seconds,
        keep_alive_seconds=keep_alive_seconds,
    )
    try:
        import uvicorn

        from snapstream.routing.app import create_app
    except ImportError as error:
        raise missing_extra("the router needs FastAPI and other packages", "serve") from error
    logging.getLogger("snapstream").setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    uvicorn.run(create_app(settings), host=host, port=port, http="h11", access_log=False, server_header=False)

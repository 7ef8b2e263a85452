"""``snapstream route``."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from snapstream.errors import missing_extra
from snapstream.routing.settings import RouterSettings, parse_urls


def route(
    decode: Annotated[list[str], typer.Option(help="URLs of instances that decode, by commas; may be given again.")],
    prefill: Annotated[
        list[str] | None,
        typer.Option(help="URLs of instances that read prompts. Without any, decode instances do everything."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes any free one.")] = 8000,
    attempts: Annotated[
        int, typer.Option(min=1, help="Instances that are tried before the first byte of an answer is sent.")
    ] = 3,
    check_seconds: Annotated[float, typer.Option(help="Between two looks at an instance's health.")] = 2.0,
    keep_alive_seconds: Annotated[
        float, typer.Option(help="Seconds of silence after which a stream gets a comment; 0: never.")
    ] = 5.0,
) -> None:
    """One address for vLLM instances that read prompts and others that decode them. Needs the extra "serve"."""
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
        raise missing_extra("the router needs FastAPI and others", "serve") from error
    logging.getLogger("snapstream").setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    uvicorn.run(create_app(settings), host=host, port=port, http="h11", access_log=False, server_header=False)

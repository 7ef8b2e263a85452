"""``snapstream route``: the proxy in front of several servers."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from snapstream.errors import missing_extra
from snapstream.routing.settings import RouterSettings, parse_urls


def route(
    decode: Annotated[
        list[str],
        typer.Option("--replica", "--decode", help="URLs of servers, separated by commas; can be repeated."),
    ],
    prefill: Annotated[
        list[str] | None,
        typer.Option(help="URLs of vLLM instances that prefill for the others. Without any, these do everything."),
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
    affinity: Annotated[
        float,
        typer.Option(
            help="How many requests more than others a server may have and still get a prompt whose beginning it has "
            "read; 0 turns this off."
        ),
    ] = 8.0,
) -> None:
    """Serve several servers under one address: replicas, or vLLM instances for prefill and decode.

    A conversation goes on where its beginning has been read. Needs the extra "serve".
    """
    settings = RouterSettings(
        prefill=parse_urls(prefill or []),
        decode=parse_urls(decode),
        attempts=attempts,
        check_seconds=check_seconds,
        keep_alive_seconds=keep_alive_seconds,
        affinity=affinity,
    )
    try:
        import uvicorn

        from snapstream.routing.app import create_app
    except ImportError as error:
        raise missing_extra("the router needs FastAPI and other packages", "serve") from error
    logging.getLogger("snapstream").setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    uvicorn.run(create_app(settings), host=host, port=port, http="h11", access_log=False, server_header=False)

"""``snapstream serve``."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, get_args

import typer

from snapstream.assets import EXAMPLE, PLAIN_CHAT, SHIPPED, TASK_MODEL
from snapstream.config import EngineConfig
from snapstream.errors import ConfigurationError
from snapstream.options import Budget, Device, Dtype, MaxLength, Model, Policy, parse_budget, quiet
from snapstream.serving.logs import LogFormat, configure
from snapstream.serving.settings import Example, ServerSettings

logger = logging.getLogger(__name__)


def serve(
    model: Model = TASK_MODEL.name,
    budget: Budget = None,
    policy: Policy = "snapstream",
    slots: Annotated[int, typer.Option(help="Sequences decoded at a time.")] = 8,
    sessions: Annotated[int, typer.Option(help="Conversations that may keep their cache between turns.")] = 8,
    session_ttl: Annotated[float, typer.Option(help="Seconds a session is kept after its last turn.")] = 600,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes any free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: the directory's name, or the hub id.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that clients must send; may be given again. Or SNAPSTREAM_API_KEY: keys by commas."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Web origin that browsers may call from; may be given again.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja chat template, for a model that has none or another one.")
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Sequences that may wait; more are answered 429.")] = 256,
    max_choices: Annotated[int, typer.Option(help="Most sequences of one request: prompts times n.")] = 128,
    max_body: Annotated[float, typer.Option(min=0.001, max=4096, help="Longest request body, in MiB.")] = 16,
    request_timeout: Annotated[float, typer.Option(help="Seconds a request may take, waiting included.")] = 600,
    drain_timeout: Annotated[float, typer.Option(help="Seconds that requests may go on after SIGTERM.")] = 30,
    max_model_len: MaxLength = None,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens per prefill launch.")] = 512,
    decode_steps: Annotated[int, typer.Option(help="Tokens decoded per launch.")] = 4,
    dtype: Dtype = "auto",
    device: Device = "auto",
    compiled: Annotated[
        bool, typer.Option("--compile/--eager", help="Compile the graphs: starts later, decodes faster.")
    ] = True,
    log_format: Annotated[str, typer.Option(help="text, or json: one object per line.")] = "text",
) -> None:
    """Serve a model over HTTP: OpenAI's API, a page at /, metrics. Needs the extra "serve"."""
    style = _log_format(log_format)
    shipped = Path(model) in SHIPPED.values() or (model in SHIPPED and not Path(model).is_dir())
    settings = ServerSettings(
        model_name=served_model_name or (Path(model).resolve().name if Path(model).exists() else model),
        api_keys=tuple(api_key or _keys_of_environment()),
        cors_origins=tuple(cors_origin or ()),
        max_body_bytes=int(max_body * 2**20),
        max_queue=max_queue,
        max_choices=max_choices,
        request_timeout=request_timeout,
        drain_timeout=drain_timeout,
        session_ttl=session_ttl,
        example=Example(**json.loads(EXAMPLE.read_text())) if shipped else None,
    )
    config = EngineConfig(
        max_model_len=max_model_len,
        slots=slots,
        sessions=sessions,
        prefill_chunk=prefill_chunk,
        decode_steps=decode_steps,
        dtype=dtype,
        device=device,
        enforce_eager=not compiled,
    )
    parsed = parse_budget(budget, policy)
    template = _read_template(chat_template, shipped)
    try:
        from snapstream.serving import server
    except ImportError as error:
        raise ConfigurationError(f'the server needs {error.name}: pip install "snapstream[serve]"') from error
    configure(style)
    with _listening(host, port) as listener:
        from snapstream.engine import LLM

        logger.info("loading %s%s", model, "; compiling takes a minute, --eager starts at once" if compiled else "")
        if not settings.api_keys:
            logger.info("no API key is needed to use this server")
        with quiet():
            llm = LLM(model, budget=parsed, config=config, report_plan=lambda plan: logger.info("%s", plan.summary()))
        if template is not None:
            llm.tokenizer.chat_template = template
        if not server.serve(llm, settings, listener):
            raise typer.Exit(1)


def _keys_of_environment() -> list[str]:
    """Keys by commas; a variable that is there but empty is refused, as it would open the server."""
    value = os.environ.get("SNAPSTREAM_API_KEY")
    return [] if value is None else [key.strip() for key in value.split(",")]


def _log_format(name: str) -> LogFormat:
    for allowed in get_args(LogFormat):
        if name == allowed:
            return allowed  # type: ignore[no-any-return]
    raise ConfigurationError(f"log format is {name!r}; allowed: {', '.join(get_args(LogFormat))}")


def _read_template(path: Path | None, shipped: bool) -> str | None:
    if path is None:
        return PLAIN_CHAT.read_text() if shipped else None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the chat template {path} could not be read: {error}") from error


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Take the address before the model is loaded: whether it is free is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigurationError(f"{host}:{port} cannot be listened on: {error.strerror or error}") from error
        yield listener

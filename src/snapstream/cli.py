"""The ``snapstream`` command: collects the subcommands, and reports errors that a user can fix in one line."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer
from rich.logging import RichHandler
from rich.markup import escape

from snapstream.commands import terminal
from snapstream.commands.chat import chat
from snapstream.commands.context import ask, read
from snapstream.commands.demo import demo
from snapstream.commands.evaluate import evaluate
from snapstream.commands.generate import generate
from snapstream.commands.options import MOVED, messages
from snapstream.commands.plan import plan
from snapstream.commands.route import route
from snapstream.commands.serve import serve
from snapstream.errors import ConfigurationError, SnapStreamError
from snapstream.threads import sleep_while_waiting

logger = logging.getLogger(__name__)

app = typer.Typer(
    help="LLM inference with a KV cache of fixed size per sequence.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the engine does.")] = False,
) -> None:
    """Options that are given before the subcommand."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=messages, show_path=False, show_time=False)],
    )
    if version:
        from snapstream import __version__

        print(f"snapstream {__version__}")
        raise typer.Exit


app.command()(demo)
app.command()(generate)
app.command()(chat)
app.command()(read)
app.command()(ask)
app.command()(plan)
app.command("serve")(serve)
app.command()(route)
app.command("eval")(evaluate)


def main() -> None:
    """Run the command. An error that a user can fix prints one line and exits with a non-zero code."""
    sleep_while_waiting()
    try:
        _refuse_options_of_others(sys.argv[1:])
        terminal.prepare_output(needed=not {"serve", "route"}.intersection(sys.argv[1:]))
        try:
            app(prog_name="snapstream")
        finally:
            terminal.flush_output()
    except SnapStreamError as error:
        _fail(str(error))
    except OSError as error:  # for example standard output on a full disk
        logger.debug("failed", exc_info=error)
        terminal.drop_output()
        _fail(f"{error.filename or 'standard output'}: {error.strerror or error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str) -> None:
    messages.print(f"[bold red]error:[/bold red] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(1)


def _refuse_options_of_others(arguments: list[str]) -> None:
    for argument in arguments:
        if argument == "--":
            return
        name = argument.partition("=")[0]
        if name in MOVED:
            raise ConfigurationError(f"there is no option {name}: {MOVED[name]}")


if __name__ == "__main__":
    main()

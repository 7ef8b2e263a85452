"""``snapstream chat``: a conversation in the terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from snapstream.commands.generate import read_text
from snapstream.commands.options import (
    Budget,
    DecodingOptions,
    MaxLength,
    Model,
    ModelArgument,
    Policy,
    chosen_model,
    longest_of,
    max_length,
    messages,
    parse_budget,
    quiet,
    say_what_a_shipped_model_is,
    with_options,
)
from snapstream.commands.terminal import is_terminal, read_line
from snapstream.config import DEFAULT_POLICY, SamplingParams
from snapstream.errors import RequestError

if TYPE_CHECKING:
    from snapstream.engine import LLM, SlotUse

HELP = "/file PATH puts a file before your next message, /new starts a new conversation, /quit or Ctrl-D exits."


@with_options
def chat(
    model: ModelArgument = None,
    model_option: Model = None,
    budget: Budget = None,
    policy: Policy = DEFAULT_POLICY,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="A text file to put before the first message.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum length of an answer in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens that reach this probability.")] = 1.0,
    max_model_len: MaxLength = None,
    *,
    options: DecodingOptions,
) -> None:
    """Chat with a model in the terminal. The prompt line shows what the cache holds; Ctrl-C stops an answer."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    name, length = chosen_model(model, model_option), max_length(max_model_len)
    pending = [] if file is None else [read_text(file)]
    config = options.config(max_model_len=length, slots=1)
    parsed = parse_budget(budget, policy, longest_of(name, length))
    say_what_a_shipped_model_is(name)
    from snapstream.engine import LLM

    with quiet(), messages.status("loading"):
        llm = LLM(name, budget=parsed, config=config, report_plan=lambda _: None)
    if not llm.has_chat_template:
        raise RequestError("this model has no chat template, which a conversation needs; use snapstream generate")
    messages.print(HELP, highlight=False, style="dim")
    begin = [] if system is None else [{"role": "system", "content": system}]
    history = list(begin)
    while (line := _ask(llm.engine.slots()[0] if len(history) > len(begin) else None, bool(pending))) is not None:
        command, _, rest = line.strip().partition(" ")
        if line.strip() == "/quit":
            return
        if line.strip() == "/new":
            history, pending = list(begin), []
        elif command == "/file":
            try:
                pending = [read_text(Path(rest.strip()).expanduser())]
            except RequestError as error:
                _complain(error)
        elif command.startswith("/") and command[1:].isalpha():
            messages.print(f"There is no command {line.strip()}. {HELP}", highlight=False)
        elif line.strip():
            history.append({"role": "user", "content": "\n".join([*pending, line])})
            answer = _answer(llm, history, params)
            if answer is None:
                history.pop()
            else:
                history.append({"role": "assistant", "content": answer})
                pending = []


def _ask(use: SlotUse | None, has_text: bool) -> str | None:
    """Read the next line; ``None`` at the end of input. Ctrl-C clears the line."""
    state = "" if use is None else _state(use)
    prompt = f"[{state}] > " if state else "> "
    prompt = f"(with a file) {prompt}" if has_text else prompt
    while True:
        try:
            if is_terminal():
                return input(prompt)
            messages.print(escape(prompt), end="", highlight=False)
            line = read_line()
            return None if line is None else line.rstrip("\n")
        except KeyboardInterrupt:
            messages.print("\n/quit or Ctrl-D exits.", highlight=False, style="dim")
        except EOFError:
            print()
            return None


def _state(use: SlotUse) -> str:
    """Describe what the cache holds after the last answer."""
    ring = max(use.held - use.sink - use.pinned, 0)
    return (
        f"{use.seen:,} tokens seen; {use.held:,} of {use.limit:,} entries: {use.sink} first, {use.pinned:,} chosen, "
        f"{ring:,} recent"
    )


def _answer(llm: LLM, history: list[dict[str, str]], params: SamplingParams) -> str | None:
    """Print the answer while it is generated and return it; ``None`` if it is empty or failed."""
    made: list[str] = []
    try:
        pinned = replace(params, pin=llm.chat_pins(history))
        for output in llm.stream(llm.chat_prompt(history), pinned):
            made.append(output.new_text)
            print(output.new_text if "".join(made[:-1]).strip() else output.new_text.lstrip(), end="", flush=True)
            if output.error is not None:
                raise RequestError(output.error)
    except KeyboardInterrupt:
        messages.print(" (stopped)", highlight=False, style="dim", end="")
    except RequestError as error:
        _complain(error)
        return None
    print()
    return "".join(made).strip() or None


def _complain(error: RequestError) -> None:
    messages.print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)

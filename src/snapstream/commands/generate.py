"""``snapstream generate``: one answer to one prompt."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from snapstream.commands.options import (
    Budget,
    DecodingOptions,
    Json,
    MaxLength,
    NamedModel,
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
from snapstream.commands.terminal import decoded, is_terminal, read_standard_input
from snapstream.config import DEFAULT_POLICY, SamplingParams
from snapstream.errors import RequestError

if TYPE_CHECKING:
    from snapstream.engine import LLM, CacheUse, RequestOutput


@with_options
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; with --file, the question after the text. '-' reads stdin.")
    ] = None,
    prompt_option: Annotated[str | None, typer.Option("--prompt", "-p", help="The same as the argument.")] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", help="A text file that begins the prompt. '-' reads stdin.")
    ] = None,
    model: NamedModel = None,
    budget: Budget = None,
    policy: Policy = DEFAULT_POLICY,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens that reach this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample among this many likeliest tokens; 0 means all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the output. Repeat for several.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    max_model_len: MaxLength = None,
    as_json: Json = False,
    *,
    options: DecodingOptions,
) -> None:
    """Generate text. The answer streams to stdout; progress and cache statistics go to stderr."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=tuple(stop or ())
    )
    if prompt is not None and prompt_option is not None:
        raise RequestError("two prompts were given, as an argument and with --prompt; leave one out")
    text = read_prompt(prompt if prompt_option is None else prompt_option, file)
    name, length = chosen_model(None, model), max_length(max_model_len)
    # Check everything that a user can get wrong before the model is loaded.
    parsed = parse_budget(budget, policy, lambda: tokens_of(text, name, length))
    config = options.config(max_model_len=length, slots=1, prefix_cache=0)  # there is one prompt
    say_what_a_shipped_model_is(name)
    from snapstream.engine import LLM

    with quiet():
        with messages.status("loading"):
            llm = LLM(
                name,
                budget=parsed,
                config=config,
                report_plan=lambda plan: messages.print(plan.summary(), highlight=False),
            )
        request = llm.engine.add_request(llm.chat_prompt([{"role": "user", "content": text}]) if chat else text, params)
        output = show_reading(llm, request)
        while True:
            if not as_json:
                print(output.new_text, end="", flush=True)
            if output.finished:
                break
            output = llm.engine.step()[0]
    if output.error is not None:
        raise RequestError(f"generation failed: {output.error}")
    use = output.cache
    assert use is not None
    if as_json:
        made = {"text": output.text, "token_ids": output.token_ids, "finish_reason": output.finish_reason}
        print(json.dumps(made | {"cache": asdict(use)}))
        return
    print()
    messages.print(_what_was_kept(use, full=parsed is None), highlight=False)
    if output.drafted:
        messages.print(f"{output.accepted} of {output.drafted} draft tokens were accepted", highlight=False)


def show_reading(llm: LLM, request: str) -> RequestOutput:
    """Run an engine's only request until prefill has ended, with a progress bar; returns its first output."""
    output = None
    progress = Progress(
        TextColumn("reading the prompt"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=messages,
        transient=True,
    )
    with progress:
        task = progress.add_task("", total=llm.engine.prefill_progress(request)[1])
        while output is None:
            outputs = llm.engine.step()
            output = outputs[0] if outputs else None
            if output is None or not output.finished:
                progress.update(task, completed=llm.engine.prefill_progress(request)[0])
    return output


def read_prompt(prompt: str | None, file: str | None) -> str:
    """Read the prompt: a file, an argument, standard input, or a file followed by one of the other two.

    Raises:
        RequestError: There is no prompt, it cannot be read, or it is empty.
    """
    if prompt == "-" and file == "-":
        raise RequestError("standard input can be read once only: give '-' for the prompt or for --file, not for both")
    parts = []
    if file is not None:
        parts.append(read_standard_input() if file == "-" else read_text(Path(file)))
    if prompt == "-" or (prompt is None and file is None and not is_terminal()):
        parts.append(read_standard_input())
    elif prompt is not None:
        parts.append(prompt)
    if not parts:
        raise RequestError("no prompt: give it as an argument, with --file, or on stdin")
    text = "\n".join(part.rstrip("\n") for part in parts)
    if not text.strip():
        raise RequestError("the prompt is empty; give at least one word")
    return text


def read_text(path: Path) -> str:
    """Read a text file.

    Raises:
        RequestError: It cannot be read, or is not UTF-8 text.
    """
    try:
        return decoded(path.read_bytes(), str(path))
    except OSError as error:
        raise RequestError(f"{path} could not be read: {error.strerror}") from error


def tokens_of(text: str, model: str, max_model_len: int | None) -> int:
    """Count a text's tokens for a model.

    Raises:
        ContextLengthError: The text does not fit.
    """
    from snapstream.engine.requests.tokenizing import PromptTokenizer
    from snapstream.engine.settings import load_tokenizer
    from snapstream.models import resolve_checkpoint

    longest = longest_of(model, max_model_len)()
    with quiet():
        return len(PromptTokenizer(load_tokenizer(str(resolve_checkpoint(model))), longest).encode(text).tokens)


def _what_was_kept(use: CacheUse, *, full: bool) -> str:
    from snapstream.engine.memory.plan import gigabytes

    if full and not use.dropped:
        return f"prompt of {use.prompt_tokens} tokens: all kept in a full cache, {gigabytes(use.bytes_full)} by now"
    held = f"the cache of {use.limit} entries takes {gigabytes(use.bytes_held)}"
    if not use.dropped:
        return f"prompt of {use.prompt_tokens} tokens: all kept; {held}"
    return (
        f"prompt of {use.prompt_tokens} tokens: kept {use.sink} first + {use.pinned} chosen + {use.recent} recent, "
        f"dropped {use.dropped}; {held}, a full one would take {gigabytes(use.bytes_full)} by now"
    )

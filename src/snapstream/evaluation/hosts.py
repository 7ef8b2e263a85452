"""Hosts, which answer questions: their interface, and how a sample becomes the input of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from snapstream.errors import ConfigurationError
from snapstream.evaluation.policies import Variant
from snapstream.evaluation.tasks import Sample, Task


@dataclass(frozen=True)
class Job:
    """One question for one variant.

    Attributes:
        task: Its task.
        length: Nominal length of the prompt.
        seed: Seed of the sample.
        depth: Depth of the answer, if the task has one.
        variant: The cache.
        sample: The question.
    """

    task: Task
    length: int
    seed: int
    depth: float | None
    variant: Variant
    sample: Sample


@dataclass(frozen=True)
class Answer:
    """The answer of a host to a job.

    Attributes:
        text: What the model generated after the scored question.
        prompt_tokens: Length of the prompt as it was processed.
        output_tokens: Tokens generated, without forced ones.
        finish_reason: ``stop`` or ``length``.
        settings: All fields of the cache budget, or ``None`` if the host does not report them.
        mass: Share of the observation window's attention that was kept, per layer, if known.
        kept: Share of tokens kept in each hundredth of the prompt, per layer and KV head, if known.
        drafted: Guesses of speculative decoding that were verified.
        accepted: Guesses that were right.
    """

    text: str
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    settings: dict[str, Any] | None = None
    mass: tuple[float, ...] | None = None
    kept: list[list[list[float]]] | None = None
    drafted: int = 0
    accepted: int = 0


class Host(Protocol):
    """Something that answers jobs."""

    max_length: int | None
    """Longest prompt plus output, in tokens; ``None`` if unknown."""
    overhead: int
    """Tokens that every prompt has besides its text: special tokens, chat template."""
    chat: bool
    """Whether it formats prompts with a chat template."""

    def refuses(self, task: Task) -> str | None:
        """Why it cannot run a task, or ``None`` if it can."""

    def describe(self) -> dict[str, Any]:
        """What identifies the model and how it is run, for the record."""

    def count(self, text: str) -> int:
        """Tokens of a text."""

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Answer]]:
        """Answer jobs, in any order, each as soon as it is done."""


class Prompts:
    """Turns samples into token ids, plain or formatted with the model's chat template."""

    def __init__(self, tokenizer: Any, *, chat: bool | None) -> None:
        """Wrap a transformers tokenizer.

        Args:
            tokenizer: The model's tokenizer.
            chat: Use its chat template; ``None`` uses it if there is one.

        Raises:
            ConfigurationError: ``chat`` is true, but there is no template.
        """
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if chat and not has_template:
            raise ConfigurationError("this model's tokenizer has no chat template; leave --chat out")
        self.tokenizer = tokenizer
        self.chat = has_template if chat is None else chat
        empty = len(self.first(Sample("", 0, "a", "", "", "", "", ())))
        self.overhead = empty - self.count("a")

    def count(self, text: str) -> int:
        """Tokens of a text, without special ones."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def first(self, sample: Sample) -> list[int]:
        """Tokens that are prefilled, and then compressed."""
        if not self.chat:
            between = "\n" if sample.opening and not sample.second else ""
            return list(self.tokenizer.encode(sample.prompt + sample.lead + between))
        begins = sample.lead.lstrip() or sample.begins
        text = self._render([{"role": "user", "content": sample.prompt}]) + begins
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def then(self, sample: Sample) -> list[int]:
        """Tokens that are forced in the compressed cache, before the model generates freely."""
        if not sample.second:
            return self.opening(sample)
        text = sample.reply + sample.second
        if self.chat:
            user = {"role": "user", "content": sample.prompt}
            reply = (sample.lead + sample.reply).strip()
            begin = self._render([user])
            whole = self._render(
                [user, {"role": "assistant", "content": reply}, {"role": "user", "content": sample.second.strip()}]
            )
            if not whole.startswith(begin):
                raise ConfigurationError(
                    "this model's chat template rewrites earlier turns, so a second turn does not continue the first; "
                    "use --no-chat for tasks with a second turn"
                )
            text = whole[len(begin) :].removeprefix(sample.lead.lstrip())
        return list(self.tokenizer.encode(text, add_special_tokens=False)) + self.opening(sample)

    def opening(self, sample: Sample) -> list[int]:
        """Tokens that the scored answer begins with."""
        return list(self.tokenizer.encode(sample.opening, add_special_tokens=False)) if sample.opening else []

    def truncated(self, tokens: list[int], room: int) -> list[int]:
        """The first and last half of ``room`` tokens: instructions and question stay, the middle is dropped."""
        if len(tokens) <= room:
            return tokens
        return tokens[: room // 2] + tokens[len(tokens) - (room - room // 2) :]

    def _render(self, messages: list[dict[str, str]]) -> str:
        import jinja2

        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except (ValueError, TypeError, jinja2.TemplateError) as error:
            raise ConfigurationError(f"this model's chat template fails ({error}); use --no-chat") from error

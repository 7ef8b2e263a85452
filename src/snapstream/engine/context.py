"""Contexts: texts that are prefilled once and asked many times."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snapstream.cache import CompressedSequence
from snapstream.errors import CacheFileError, RequestError

PLACE = "\ue000text\ue001"
"""Placeholder for the text in a chat template; it uses private characters, so real text does not contain it."""

Render = Callable[[Sequence[Mapping[str, Any]]], str]
"""Applies the model's chat template to a conversation."""


@dataclass(frozen=True)
class Context:
    """The compressed cache of a text. It never changes, so any number of requests can use it concurrently.

    Attributes:
        sequence: The compressed cache; its last token is the text's.
        opening: What the model's chat template puts before the text, which begins the first message of a conversation.
            ``None`` for plain text, which prompts continue directly.
        system: The system message of that conversation; ``None`` for the template's default.
        model: Name or path of the model at the time the text was prefilled.
    """

    sequence: CompressedSequence
    opening: str | None
    system: str | None = None
    model: str = ""

    @property
    def chat(self) -> bool:
        """Whether the text begins a conversation."""
        return self.opening is not None

    @property
    def tokens(self) -> int:
        """Number of tokens of the text, including what a chat template puts before it."""
        return len(self.sequence.tokens)

    @property
    def entries(self) -> int:
        """Number of cache entries per layer and KV head."""
        return self.sequence.entries

    @property
    def nbytes(self) -> int:
        """Bytes of its cache."""
        return self.sequence.nbytes

    def about(self) -> dict[str, Any]:
        """Everything except the sequence, for a file."""
        return {"opening": self.opening, "system": self.system, "model": self.model}

    @classmethod
    def of(cls, sequence: CompressedSequence, about: Mapping[str, Any] | None = None) -> Context:
        """Restore a context.

        Args:
            sequence: Its sequence.
            about: What :meth:`about` said; by default, the sequence's note says it.

        Raises:
            CacheFileError: The sequence is not a context.
        """
        try:
            said = json.loads(sequence.note) if about is None else about
            opened, system, model = said["opening"], said["system"], str(said["model"])
            if not all(one is None or isinstance(one, str) for one in (opened, system)):
                raise TypeError("neither text nor null")
        except (ValueError, LookupError, TypeError) as error:
            raise CacheFileError("this file holds a conversation, not a context") from error
        return cls(sequence, opened, system, model)


def opening(system: str | None, render: Render) -> str:
    """What the chat template puts before a text that begins a conversation.

    Raises:
        RequestError: The template does not output the text exactly once.
    """
    return _around([*_system(system), {"role": "user", "content": PLACE}], render)[0]


def continuation(context: Context, messages: Sequence[Mapping[str, Any]], render: Render) -> str:
    """What follows the text of a context, up to where the answer begins.

    Args:
        context: The context.
        messages: The conversation, without the text; its first message is the one that the text begins.
        render: Applies the chat template.

    Raises:
        RequestError: The messages cannot continue this context.
    """
    if context.opening is None:
        raise RequestError("this context is plain text; give a prompt, not messages")
    first, *others = messages or [{}]
    own = _system(context.system)
    if first.get("role") in ("system", "developer"):
        if [first] != own:
            raise RequestError("this context was created with another system message; leave it out here")
        first, *others = others or [{}]
    if first.get("role") != "user" or not isinstance(first.get("content"), str):
        raise RequestError("the first message must be the user's, because the text of the context begins it")
    asked = dict(first) | {"content": f"{PLACE}\n\n{first['content']}"}
    before, after = _around([*own, asked, *others], render)
    if before != context.opening:
        raise RequestError(
            "the chat template now begins this conversation differently than when the context was created; leave its "
            "variables out, or create the context again"
        )
    return after


def _system(message: str | None) -> list[dict[str, Any]]:
    return [] if message is None else [{"role": "system", "content": message}]


def _around(messages: Sequence[Mapping[str, Any]], render: Render) -> tuple[str, str]:
    before, *after = render(messages).split(PLACE)
    if len(after) != 1:
        raise RequestError(
            "this model's chat template does not output each message text exactly once; use plain text instead"
        )
    return before, after[0]

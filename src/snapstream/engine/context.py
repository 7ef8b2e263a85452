"""A text that is read once and asked many times: its compressed cache, and how questions are put behind it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snapstream.cache import CompressedSequence
from snapstream.errors import CacheFileError, RequestError

PLACE = "\ue000text\ue001"
"""Stands for the text while a chat template lays out what is around it; private characters, so it is no text itself."""

Render = Callable[[Sequence[Mapping[str, Any]]], str]
"""Lays a conversation out with the model's chat template."""


@dataclass(frozen=True)
class Context:
    """What is left of a text when it has been read and compressed. It never changes, so any number may ask it at once.

    Attributes:
        sequence: The compressed cache; its last token is the text's.
        opening: What the model's chat template puts before the text, which begins the first message of a conversation;
            ``None``: there is no conversation, and a question is put behind the text as it is.
        system: The system message of that conversation; ``None``: what the template does without one.
        model: What the model was called when the text was read.
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
        """Tokens of the text, with what a chat template puts before it."""
        return len(self.sequence.tokens)

    @property
    def entries(self) -> int:
        """Tokens that are left, per layer and KV head."""
        return self.sequence.entries

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.sequence.nbytes

    def note(self, **more: Any) -> str:
        """All but the sequence, and more, for a file."""
        return json.dumps(more | {"opening": self.opening, "system": self.system, "model": self.model})

    @classmethod
    def of(cls, sequence: CompressedSequence) -> Context:
        """The context that was written to a file with its :meth:`note`.

        Raises:
            CacheFileError: The file holds something else.
        """
        try:
            said = json.loads(sequence.note)
            opened, system, model = said["opening"], said["system"], str(said["model"])
            if not all(one is None or isinstance(one, str) for one in (opened, system)):
                raise TypeError("neither text nor nothing")
        except (ValueError, LookupError, TypeError) as error:
            raise CacheFileError("this file holds a conversation, not a text that was read to be asked") from error
        return cls(sequence, opened, system, model)


def opening(system: str | None, render: Render) -> str:
    """What the chat template puts before the text that begins a conversation.

    Raises:
        RequestError: The template has no place for it, or more than one.
    """
    return _around([*_system(system), {"role": "user", "content": PLACE}], render)[0]


def continuation(context: Context, messages: Sequence[Mapping[str, Any]], render: Render) -> str:
    """What comes after a text, up to where the answer begins.

    Args:
        context: The text.
        messages: What is asked, from the first message on, which the text belongs to.
        render: The chat template.

    Raises:
        RequestError: They do not go on after this text.
    """
    if context.opening is None:
        raise RequestError("this context was read as plain text; give a prompt, not messages")
    first, *others = messages or [{}]
    own = _system(context.system)
    if first.get("role") in ("system", "developer"):
        if [first] != own:
            raise RequestError("this context was read with another system message; leave it out here")
        first, *others = others or [{}]
    if first.get("role") != "user" or not isinstance(first.get("content"), str):
        raise RequestError("the first message has to be the user's: the text of the context belongs to it")
    asked = dict(first) | {"content": f"{PLACE}\n\n{first['content']}"}
    before, after = _around([*own, asked, *others], render)
    if before != context.opening:
        raise RequestError(
            "the chat template now begins this conversation in another way than when the text was read; leave its "
            "variables out, or read the text again"
        )
    return after


def _system(message: str | None) -> list[dict[str, Any]]:
    return [] if message is None else [{"role": "system", "content": message}]


def _around(messages: Sequence[Mapping[str, Any]], render: Render) -> tuple[str, str]:
    before, *after = render(messages).split(PLACE)
    if len(after) != 1:
        raise RequestError(
            "this model's chat template does not lay a message out in one piece; read the text as plain text instead"
        )
    return before, after[0]

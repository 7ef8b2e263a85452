"""Which parts of a prompt a request pins: by name, by message, by text, or by position."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from snapstream.config.pins import MOST_SPANS, Span, read_spans
from snapstream.engine.context import Render
from snapstream.errors import ConfigurationError
from snapstream.prompt_parts import PromptParts, find_parts, token_spans
from snapstream.serving.body import Body, Text
from snapstream.serving.errors import ApiError

RenderWith = Callable[[Sequence[Mapping[str, Any]]], Render]
"""Returns the chat template for some tools."""
REMEMBERED = 64
"""Number of combinations of system messages and tools whose place in the chat template is remembered."""


class PinnedText(Body):
    """Text that is pinned wherever it stands in the prompt."""

    text: Annotated[Text, Field(min_length=1)]


Slice = Annotated[str, Field(pattern=r"^[0-9]{1,9}:[0-9]{1,9}$")]
Place = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Pin = (
    Literal["system", "tools"] | Slice | Place | Annotated[list[Place], Field(min_length=2, max_length=2)] | PinnedText
)
Pins = bool | Annotated[list[Pin], Field(max_length=MOST_SPANS, fail_fast=True)]


class Pinned(NamedTuple):
    """A span that is pinned, of the characters or of the tokens of a prompt."""

    start: int
    end: int
    by_token: bool = False


@dataclass(frozen=True)
class Rendered:
    """A conversation in the form of the chat template.

    Attributes:
        messages: The messages, as the template gets them.
        tools: The tools that the template gets.
        text: The text it makes of them.
        own: Number of messages that the request has.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    text: str
    own: int


class PinFinder:
    """Finds what requests pin."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[str, PromptParts]] = OrderedDict()

    def in_chat(self, asked: Pins | None, chat: Rendered, render: RenderWith, variables: Any) -> list[Pinned]:
        """What is pinned in a conversation, in the order of the request.

        Raises:
            ApiError: There is no such message, or it cannot be found in the prompt.
        """
        items: Sequence[Any] = asked if isinstance(asked, list) else () if asked is False else ("system", "tools")
        numbers = [self._index(item, chat) for item in items if isinstance(item, int)]
        standing = [item for item in items if item in ("system", "tools")]
        parts = self._standing(chat, render, variables) if standing else PromptParts({})
        others = _find(chat, render, numbers) if numbers else PromptParts({})
        spans: list[Pinned] = []
        for item in items:
            if item == "system":
                spans += [Pinned(*span) for span in parts.system]
            elif item == "tools":  # they may be described in the system message
                spans += [Pinned(*span) for span in ([parts.tools] if parts.tools else parts.system)]
            elif isinstance(item, int):
                index = self._index(item, chat)
                if index not in others.messages:
                    raise ApiError(400, f"pin: message {item} is empty, or cannot be found in the prompt", param="pin")
                spans.append(Pinned(*others.messages[index]))
            else:
                spans += _given(item, chat.text)
        return spans

    def _index(self, item: int, chat: Rendered) -> int:
        """The place of a message among those that the template gets."""
        index = item + chat.own if item < 0 else item
        if not 0 <= index < chat.own:
            raise ApiError(400, f"pin: there is no message {item}; there are {chat.own} messages", param="pin")
        more = len(chat.messages) - chat.own
        if more < 0:
            message = "pin: this model's template joins messages, so they cannot be pinned by number; pin their text"
            raise ApiError(400, message, param="pin")
        return index + more

    def _standing(self, chat: Rendered, render: RenderWith, variables: Any) -> PromptParts:
        """The system messages at the beginning, and the tools; remembered, as conversations have the same ones."""
        first = next((at for at, one in enumerate(chat.messages) if one["role"] not in ("system", "developer")), None)
        short = [*chat.messages[:first], {"role": "user", "content": "."}]
        if len(short) == 1 and not chat.tools:
            return PromptParts({})
        key = json.dumps([short, list(chat.tools), variables], sort_keys=True, default=str)
        if key not in self._known:
            try:
                text = render(chat.tools)(short)
                found = _find(Rendered(short, chat.tools, text, len(short)), render)
            except Exception:  # the template wants longer conversations
                text, found = "", PromptParts({})
            self._known[key] = text, found
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        text, found = self._known[key]
        end = max((end for _, end in found.standing), default=0)
        if end and chat.text.startswith(text[:end]) and (found.tools or not chat.tools):
            return found
        return _find(chat, render)


def _given(item: Any, text: str | None) -> list[Pinned]:
    """What is given by tokens, or where a given text stands in a prompt.

    Raises:
        ApiError: It is not there, or the prompt was given as token ids.
    """
    if not isinstance(item, PinnedText):
        try:
            return [Pinned(*span, by_token=True) for span in read_spans([item])]
        except ConfigurationError as error:
            raise ApiError(400, str(error), param="pin") from error
    if text is None:
        message = "pin: this prompt is token ids; pin tokens, such as [[0, 300]], instead of text"
        raise ApiError(400, message, param="pin")
    spans: list[Pinned] = []
    at = text.find(item.text)
    while at >= 0 and len(spans) < MOST_SPANS:
        spans.append(Pinned(at, at + len(item.text)))
        at = text.find(item.text, at + len(item.text))
    if not spans:
        raise ApiError(400, f"pin: the prompt has no text {item.text[:60]!r}", param="pin")
    return spans


def in_plain_text(asked: Pins | None, text: str | None) -> list[Pinned]:
    """What is pinned in a prompt that is no conversation, in the order of the request.

    Raises:
        ApiError: It has no such part.
    """
    spans: list[Pinned] = []
    for item in asked if isinstance(asked, list) else ():
        if isinstance(item, int) or item in ("system", "tools"):
            message = f'pin: {item!r} is a part of a conversation; here, pin tokens, or text: {{"text": ...}}'
            raise ApiError(400, message, param="pin")
        spans += _given(item, text)
    return spans


def in_context(asked: Pins | None, text: str | None, opening: int) -> list[Pinned]:
    """What is pinned in a context, in the order of the request.

    Args:
        asked: What the request pins; by default, the system message.
        text: Its text, with what the chat template puts before it; ``None`` for token ids.
        opening: Characters of the system message, and what the template puts around it; 0 if there is none.

    Raises:
        ApiError: It has no such part.
    """
    items: Sequence[Any] = asked if isinstance(asked, list) else () if asked is False else ("system",)
    spans: list[Pinned] = []
    for item in items:
        spans += [Pinned(0, opening)][: min(opening, 1)] if item == "system" else in_plain_text([item], text)
    return spans


def pinned_tokens(pinned: Sequence[Pinned], starts: Sequence[int], total: int) -> list[Span]:
    """Pinned spans of tokens in a prompt of ``total`` tokens.

    Args:
        pinned: What is pinned.
        starts: Index of the character that each token begins at; needed if there are spans of characters.
        total: Number of tokens.

    Raises:
        ApiError: A span ends after the prompt.
    """
    spans: list[Span] = []
    for start, end, by_token in pinned:
        if by_token and end > total:
            message = f"pin: the span [{start}, {end}] ends after the prompt, which has {total} tokens"
            raise ApiError(400, message, param="pin")
        spans += [(start, end)] if by_token else token_spans([(start, end)], starts)
    return spans


def _find(chat: Rendered, render: RenderWith, numbers: Sequence[int] = ()) -> PromptParts:
    return find_parts(chat.messages, chat.tools, lambda messages, tools: render(tools)(messages), chat.text, numbers)

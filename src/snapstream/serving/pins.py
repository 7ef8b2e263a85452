"""Which parts of a prompt a request pins: by name, by message, by text, or by position."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from snapstream.config.pins import MOST_SPANS, Span, read_spans
from snapstream.engine.context import Render
from snapstream.errors import ConfigurationError, RequestError
from snapstream.prompt_parts import PromptParts, find_parts, system_messages, token_spans
from snapstream.serving.body import Body, Text
from snapstream.serving.errors import ApiError

RenderWith = Callable[[Sequence[Mapping[str, Any]]], Render]
"""Returns the chat template for some tools."""
REMEMBERED = 64
"""Number of combinations of system messages and tools whose place in the chat template is remembered."""
LONGEST = 2**19
"""Maximum length in characters of what is remembered of each."""


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
        places: For each message of the request, its place among those of the template, which may join some.
        described: Whether there are tools that are described in the system message instead.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    text: str
    places: Sequence[int] = ()
    described: bool = False

    def parts(self, render: RenderWith) -> PromptParts:
        """Where its parts stand."""
        return find_parts(self.messages, self.tools, lambda messages, tools: render(tools)(messages), self.text)


class PinFinder:
    """Finds what requests pin. Several threads may use it."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[str, PromptParts]] = OrderedDict()
        self._lock = threading.Lock()

    def in_chat(self, asked: Pins | None, chat: Rendered, render: RenderWith, variables: Any) -> list[Pinned]:
        """What is pinned in a conversation, in the order of the request.

        Raises:
            ApiError: There is no such message, or it cannot be found in the prompt.
        """
        items: Sequence[Any] = asked if isinstance(asked, list) else () if asked is False else ("system", "tools")
        if any(isinstance(item, int) for item in items):
            parts = chat.parts(render)
        else:
            parts = self._standing(chat, render, variables) if {"system", "tools"} & {*_names(items)} else _NO_PARTS
        spans: list[Pinned] = []
        for item in items:
            if item == "system" or (item == "tools" and chat.described):
                spans += [Pinned(*span) for span in parts.system]
            elif item == "tools":
                spans += [] if parts.tools is None else [Pinned(*parts.tools)]
            elif isinstance(item, int):
                spans.append(Pinned(*_message(item, chat, parts)))
            else:
                spans += _given(item, chat.text)
        return spans

    def _standing(self, chat: Rendered, render: RenderWith, variables: Any) -> PromptParts:
        """Where what holds for the whole conversation stands: remembered, as many conversations begin alike."""
        short = [*system_messages(chat.messages), {"role": "user", "content": "."}]
        if len(short) == 1 and not chat.tools:
            return _NO_PARTS
        try:
            key = hashlib.sha256(json.dumps([short, list(chat.tools), variables], default=str).encode()).digest()
        except (ValueError, RecursionError):
            return chat.parts(render)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
        if known is None or not chat.text.startswith(known[0]):  # never seen, or another day in the template
            known = _beginning(short, chat.tools, render)
            if known is None or not chat.text.startswith(known[0]):  # tools may stand before the last message
                return chat.parts(render)
            with self._lock:
                self._known[key] = known
                while len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
        return known[1]


_NO_PARTS = PromptParts({})


def _names(items: Sequence[Any]) -> list[str]:
    return [item for item in items if isinstance(item, str)]


def _beginning(
    short: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], render: RenderWith
) -> tuple[str, PromptParts] | None:
    """What conversations begin with, up to the end of system messages and tools; ``None`` if that is not known."""
    try:
        text = render(tools)(short)
    except RequestError:  # the template wants longer conversations
        return None
    parts = Rendered(short, tools, text).parts(render)
    end = max((end for _, end in parts.standing), default=0)
    return None if not 0 < end <= LONGEST or (tools and parts.tools is None) else (text[:end], parts)


def _message(item: int, chat: Rendered, parts: PromptParts) -> Span:
    """Where a message stands.

    Raises:
        ApiError: There is no such message, or it cannot be found.
    """
    number = len(chat.places)
    index = item + number if item < 0 else item
    if not 0 <= index < number:
        raise ApiError(400, f"pin: there is no message {item}; there are {number} messages", param="pin")
    if chat.places[index] not in parts.messages:
        raise ApiError(400, f"pin: message {item} is empty, or cannot be found in the prompt", param="pin")
    return parts.messages[chat.places[index]]


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
    number = text.count(item.text)
    if not 0 < number <= MOST_SPANS:
        found = f"{number} times" if number else "nowhere"
        message = f"pin: the text {item.text[:60]!r} stands {found} in the prompt; at most {MOST_SPANS} are allowed"
        raise ApiError(400, message, param="pin")
    return [Pinned(*found.span()) for found in re.finditer(re.escape(item.text), text)]


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
        opening: Number of characters of the system message, including what the template puts around it; 0 without one.

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
    if len(spans) > MOST_SPANS:
        raise ApiError(400, f"pin: {len(spans)} spans; at most {MOST_SPANS} are allowed", param="pin")
    return spans

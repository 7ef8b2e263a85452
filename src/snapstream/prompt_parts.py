"""Where the parts of a conversation stand in the text that a chat template makes of it."""

from __future__ import annotations

import itertools
import operator
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snapstream.config.pins import Span

Conversation = Sequence[Mapping[str, Any]]
Render = Callable[[Conversation, Conversation], str]
"""Applies a chat template to messages and tools."""
SYSTEM_ROLES = ("system", "developer")

_BEGIN, _END = "\ue100", "\ue101"
"""Private characters, which real text does not contain. If it does, marks have a word more that is not in the text."""


@dataclass(frozen=True)
class PromptParts:
    """Parts of a prompt, as spans of characters.

    Attributes:
        messages: Where the content of each message stands, by its index; messages that are empty or cannot be found are
            missing.
        system: The system messages that begin the conversation; the first one with what stands before it.
        tools: Where the tools are described; ``None`` if there are none, or if this cannot be found.
    """

    messages: Mapping[int, Span]
    system: Sequence[Span] = ()
    tools: Span | None = None

    @property
    def standing(self) -> list[Span]:
        """What holds for the whole conversation: the system messages, then the tools."""
        return [*self.system, *([] if self.tools is None else [self.tools])]


def find_parts(messages: Conversation, tools: Conversation, render: Render, text: str) -> PromptParts:
    """Find the messages and the tools in the text of a conversation.

    The conversation is rendered again with marks around what is looked for. If the text without the marks is the same,
    they stand where it stands. Otherwise, the template depends on what is marked, and its place stays unknown.

    Args:
        messages: Messages with ``role`` and ``content``.
        tools: Tools, in OpenAI's form.
        render: Applies the chat template.
        text: What it makes of them.
    """
    first = [index for index, _ in enumerate(system_messages(messages))]
    found = _find_messages(messages, tools, render, text, range(len(messages)))
    found = found or _find_messages(messages, tools, render, text, first)  # perhaps it depends on other messages only
    spans = [found[index] for index in first if index in found]
    if 0 in first and 0 in found:
        spans[0] = 0, spans[0][1]
    return PromptParts(found, spans, _find_tools(messages, tools, render, text, found) if tools else None)


def system_messages(messages: Conversation) -> Conversation:
    """The system messages that begin a conversation."""
    return [*itertools.takewhile(lambda message: message.get("role") in SYSTEM_ROLES, messages)]


def token_spans(spans: Iterable[Span], starts: Sequence[int]) -> list[Span]:
    """Convert spans of characters to spans of tokens.

    Args:
        spans: Spans of characters.
        starts: Index of the character that each token begins at, in order; several tokens may be parts of one.

    Returns:
        The spans that have tokens. Those at the edges are included.
    """
    converted = []
    for start, end in spans:
        first = bisect_left(starts, starts[max(bisect_right(starts, start) - 1, 0)]) if starts else 0
        last = bisect_left(starts, end) if end > start else 0
        if first < last:
            converted.append((first, last))
    return converted


def _find_messages(
    messages: Conversation, tools: Conversation, render: Render, text: str, wanted: Collection[int]
) -> dict[int, Span]:
    mark = _Marks(text)
    marked = [
        {**message, "content": mark.around(message["content"], index)}
        if index in wanted and isinstance(message.get("content"), str)
        else message
        for index, message in enumerate(messages)
    ]
    return mark.find(marked, tools, render)


def _find_tools(
    messages: Conversation, tools: Conversation, render: Render, text: str, contents: Mapping[int, Span]
) -> Span | None:
    """What a prompt has because of its tools."""
    mark = _Marks(text)
    names = mark.find(messages, [mark.around_name(tool, index) for index, tool in enumerate(tools)], render)
    if not names or not contents:
        return None
    first, last = min(start for start, _ in names.values()), max(end for _, end in names.values())
    # 1. No further than the messages next to them.
    start = max((end for _, end in contents.values() if end <= first), default=0)
    end = min((start for start, _ in contents.values() if start >= last), default=len(text))
    # 2. Only what is there because of the tools.
    try:
        without = render(messages, ())
    except Exception:  # a template is a program, and may fail as one
        return start, end
    same = _same(text, without)
    until = len(text) - min(_same(text[::-1], without[::-1]), len(without) - same)
    return (max(start, same), min(end, until)) if same <= first and last <= until else (start, end)


def _same(one: str, other: str) -> int:
    """Number of characters that two texts begin with in common."""
    return sum(1 for _ in itertools.takewhile(bool, map(operator.eq, one, other)))


class _Marks:
    """Marks around parts of a conversation that a text was made of."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._word = next(word for word in itertools.count() if f"{_BEGIN}{word}:" not in text)
        self._pattern = re.compile(f"{_BEGIN}{self._word}:([0-9]{{1,6}})([{_BEGIN}{_END}])")

    def around(self, content: str, number: int) -> str:
        """A text with marks around it; whitespace is left outside, as templates often strip it."""
        inner = content.strip()
        if not inner:
            return content
        before, _, after = content.partition(inner)
        mark = f"{_BEGIN}{self._word}:{number}"
        return f"{before}{mark}{_BEGIN}{inner}{mark}{_END}{after}"

    def around_name(self, tool: Mapping[str, Any], number: int) -> Mapping[str, Any]:
        """A tool with marks around its name."""
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return tool
        return {**tool, "function": {**function, "name": self.around(function["name"], number)}}

    def find(self, messages: Conversation, tools: Conversation, render: Render) -> dict[int, Span]:
        """Where what is marked stands in the text; empty if the template depends on it."""
        try:
            marked = render(messages, tools)
        except Exception:  # a template is a program, and may fail as one
            return {}
        begins: dict[int, int] = {}
        spans: dict[int, Span] = {}
        pieces, at, length = [], 0, 0
        for mark in self._pattern.finditer(marked):
            pieces.append(marked[at : mark.start()])
            length, at, number = length + len(pieces[-1]), mark.end(), int(mark[1])
            if mark[2] == _BEGIN:
                begins[number] = length
            elif number in begins:
                spans.setdefault(number, (begins[number], length))
        pieces.append(marked[at:])
        return spans if "".join(pieces) == self._text else {}

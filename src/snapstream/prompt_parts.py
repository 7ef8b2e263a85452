"""Where the parts of a conversation stand in the text that a chat template makes of it."""

from __future__ import annotations

import itertools
import operator
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snapstream.config.pins import Span

Conversation = Sequence[Mapping[str, Any]]
Render = Callable[[Conversation, Conversation], str]
"""Applies a chat template to messages and tools."""

# Private characters around a number, which real text does not contain.
_BEGIN, _END = "\ue100{}\ue101", "\ue102{}\ue103"
_MARK = re.compile("\ue100(\\d+)\ue101|\ue102(\\d+)\ue103")
_SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True)
class PromptParts:
    """Parts of a prompt, as spans of characters.

    Attributes:
        messages: Where the content of each message stands, by its index; those that were not asked for, or cannot be
            found, are missing.
        system: The system messages.
        tools: Where the tools are described; ``None`` if there are none, or if this cannot be found.
    """

    messages: Mapping[int, Span]
    system: Sequence[Span] = ()
    tools: Span | None = None

    @property
    def standing(self) -> list[Span]:
        """What holds for the whole conversation: the system messages, then the tools."""
        return [*self.system, *([] if self.tools is None else [self.tools])]


def find_parts(
    messages: Conversation, tools: Conversation, render: Render, text: str, wanted: Iterable[int] = ()
) -> PromptParts:
    """Find the system messages, the tools, and other messages in the text of a conversation.

    The conversation is rendered once more with marks around what is looked for. If the text without the marks is the
    same, they stand where it stands. Otherwise, the template depends on what is marked, and its place stays unknown.

    Args:
        messages: Messages with ``role`` and ``content``.
        tools: Tools, in OpenAI's form.
        render: Applies the chat template.
        text: What it makes of them.
        wanted: Indices of other messages to find.
    """
    system = [index for index, message in enumerate(messages) if message.get("role") in _SYSTEM_ROLES]
    found = _find_messages(messages, tools, render, text, {*system, *wanted})
    spans = [found[index] for index in system if index in found]
    # The first message brings what the template writes before it, such as its role.
    if spans and system[0] == 0 and 0 in found:
        spans[0] = 0, spans[0][1]
    return PromptParts(found, spans, _find_tools(messages, tools, render, text) if tools else None)


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
    messages: Conversation, tools: Conversation, render: Render, text: str, wanted: set[int]
) -> dict[int, Span]:
    marked = [
        {**message, "content": _with_marks(message["content"], index)}
        if index in wanted and isinstance(message.get("content"), str)
        else message
        for index, message in enumerate(messages)
    ]
    return _marked_spans(marked, tools, render, text)


def _find_tools(messages: Conversation, tools: Conversation, render: Render, text: str) -> Span | None:
    """What a prompt has because of its tools."""
    marked = [_with_marked_name(tool, index) for index, tool in enumerate(tools)]
    names = _marked_spans(messages, marked, render, text)
    contents = _find_messages(messages, tools, render, text, set(range(len(messages))))
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


def _with_marks(content: str, number: int) -> str:
    inner = content.strip()  # templates often strip messages
    if not inner:
        return content
    before, _, after = content.partition(inner)
    return f"{before}{_BEGIN.format(number)}{inner}{_END.format(number)}{after}"


def _with_marked_name(tool: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return tool
    return {**tool, "function": {**function, "name": _with_marks(function["name"], number)}}


def _marked_spans(messages: Conversation, tools: Conversation, render: Render, text: str) -> dict[int, Span]:
    """Where what is marked stands in ``text``; empty if the template depends on it."""
    try:
        marked = render(messages, tools)
    except Exception:  # a template is a program, and may fail as one
        return {}
    begins: dict[int, int] = {}
    spans: dict[int, Span] = {}
    pieces, at, length = [], 0, 0
    for mark in _MARK.finditer(marked):
        pieces.append(marked[at : mark.start()])
        length, at = length + len(pieces[-1]), mark.end()
        if mark[1]:
            begins[int(mark[1])] = length
        elif int(mark[2]) in begins:
            spans.setdefault(int(mark[2]), (begins[int(mark[2])], length))
    pieces.append(marked[at:])
    return spans if "".join(pieces) == text else {}

"""Grammars of tool calls, in the dialect of Lark that llguidance reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from snapstream.engine.requests.grammar import prepared

MOST_CALLS = 16
"""Calls that a grammar allows in one answer."""
TEXT = r"/(.|\n)*/"
"""Any text, without special tokens."""


class GrammarWriter:
    """Writes the rules of one grammar.

    Args:
        special: The tokenizer's special tokens, by their text: a grammar names them, because no text gives them.
        parallel: Whether an answer may have several calls.
    """

    def __init__(self, special: Mapping[str, int], *, parallel: bool) -> None:
        self._special, self.parallel = special, parallel
        self._rules: list[str] = []
        names = sorted(filter(None, special), key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, names))) if names else None

    def literal(self, text: str) -> str:
        """Exactly this text, in which special tokens may occur."""
        parts, at = list[str](), 0
        for found in self._split.finditer(text) if self._split else ():
            parts += [_quoted(text[at : found.start()]), f"<[{self._special[found.group()]}]>"]
            at = found.end()
        return " ".join(part for part in (*parts, _quoted(text[at:])) if part) or '""'

    def is_special(self, text: str) -> bool:
        """Whether this is a special token."""
        return text in self._special

    def json(self, schema: Any) -> str:
        """A JSON value that fits a schema."""
        schema = {} if schema is None else schema
        if isinstance(schema, dict):
            schema = prepared(schema)
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def rule(self, body: str) -> str:
        """Add a rule; returns its name."""
        self._rules.append(f": {body}")
        return f"rule_{len(self._rules) - 1}"

    def text_until(self, pattern: str) -> str:
        """Text up to what fits a pattern, as short as possible, and that."""
        pattern = pattern.replace("/", r"\/")
        self._rules.append(rf"[lazy]: /(.|\n)*{pattern}/")
        return f"rule_{len(self._rules) - 1}"

    def pairs(self, pairs: Mapping[str, str], required: Sequence[str], separator: str) -> str:
        """The required ones of some pairs, in order, and then any of the others.

        Args:
            pairs: The grammar of each pair, by its name.
            required: Names of the required ones.
            separator: The text between two of them.
        """
        rules, between = {name: self.rule(pair) for name, pair in pairs.items()}, self.literal(separator)
        first = f" {between} ".join(rules[name] for name in required)
        others = [rule for name, rule in rules.items() if name not in required]
        if not others:
            return first
        some = f"({' | '.join(others)})"
        more = f"({between} {some}){{0,{len(others)}}}"
        return f"{first} {more}" if first else f"({some} {more})?"

    def repeated(self, one: str, separator: str = "") -> str:
        """One, or several if calls may be parallel."""
        if not self.parallel:
            return one
        following = f"{separator} {one}".strip()
        return f"{one} ({following}){{0,{MOST_CALLS - 1}}}"

    def write(self, start: str) -> str:
        """The whole grammar."""
        rules = (f"rule_{at}{body}" for at, body in enumerate(self._rules))
        return "\n".join(("%llguidance {}", f"start: {start}", *rules)) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""

"""The shape that an output must have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from snapstream.errors import RequestError

ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True)
class StructuredOutputs:
    """The shape that an output must have; exactly one attribute is given. Names are vLLM's.

    Attributes:
        json: A JSON schema, as text or as an object.
        json_object: Any JSON object.
        regex: A regular expression in Rust's syntax, for the whole output.
        choice: The allowed outputs.
        grammar: A grammar in Lark's or GBNF's syntax; see the documentation of llguidance.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        """Check that one shape is given.

        Raises:
            RequestError: It is not, or it is invalid.
        """
        given = [one.name for one in fields(self) if self._has(one.name)]
        if len(given) != 1:
            what = " and ".join(given) if given else "nothing"
            allowed = ", ".join(one.name for one in fields(self))
            raise RequestError(f"structured_outputs: {what} was given; give exactly one of {allowed}")
        if self.choice is not None and (
            isinstance(self.choice, str) or not self.choice or not all(isinstance(one, str) for one in self.choice)
        ):
            raise RequestError("structured_outputs: choice must be a list of one or more strings")
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise RequestError(f"structured_outputs: {name} must be a non-empty string")
        if self.json is not None and not isinstance(self.json, str | Mapping):
            raise RequestError("structured_outputs: json must be a JSON schema: an object, or its text")

    @property
    def kind(self) -> str:
        """What it is: ``json``, ``regex``, ``choice`` or ``grammar``."""
        return next((name for name in ("regex", "choice", "grammar") if self._has(name)), "json")

    @property
    def text(self) -> str:
        """Its definition as text; that of choices is a JSON list.

        Raises:
            RequestError: It cannot be written as JSON.
        """
        if self.json_object:
            return ANY_OBJECT
        value = getattr(self, self.kind)
        if isinstance(value, str):
            return value
        try:
            return json.dumps(value if isinstance(value, Mapping) else list(value), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"structured_outputs: {self.kind} cannot be written as JSON: {error}") from error

    def _has(self, name: str) -> bool:
        return bool(self.json_object) if name == "json_object" else getattr(self, name) is not None

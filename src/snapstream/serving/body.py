"""Base class of all request bodies: strict types, and a helpful error for every unsupported field.

A known field that would change the answer but is not supported is refused with its own message, from
:mod:`~snapstream.serving.unsupported`. An unknown field is refused with the name of the nearest known one, so that
typing errors are not mistaken for settings. Fields that have no effect here are accepted.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

REFUSED = "refused_field"
"""Type of the validation error for a field that is unsupported or unknown."""


def encodable(text: str) -> str:
    """Refuse unpaired surrogates, which JSON can represent but UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid text: {error.reason} at character {error.start}") from error
    return text


Text = Annotated[str, AfterValidator(encodable)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
# Validation of a list stops at the first error: many errors in a long list would produce gigabytes of messages.
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]


class Body(BaseModel):
    """Base class of all request bodies, and of objects in them.

    Types are not converted, except for whole numbers, which some clients write as ``8.0``. Unknown fields are refused.

    Attributes:
        unused: Fields that have no effect here, whatever their value.
        neutral: Unsupported fields, with the values that request nothing, which some clients send by default.
        reasons: Unsupported fields, with the message that explains why.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unused: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}
    reasons: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_unused(cls, data: Any) -> Any:
        """Drop fields that have no effect and unsupported ones that request nothing; refuse other unknown fields."""
        if not isinstance(data, dict):
            return data
        kept, unknown, whole, known = {}, [], _integers(cls), _names(cls)
        for name, value in data.items():
            if name in known:
                kept[name] = int(value) if name in whole and type(value) is float and value.is_integer() else value
            elif not (value is None or name in cls.unused or value in cls.neutral.get(name, ())):
                unknown.append(name)
        if unknown:  # report only one: a body may have a million of them
            name = str(unknown[0]).encode("utf-8", "replace").decode()
            raise PydanticCustomError(REFUSED, "{reason}", {"field": name, "reason": cls.refused(name)})
        return kept

    @classmethod
    def refused(cls, name: str) -> str:
        """Message that says why a field is refused, and what to do instead."""
        if name in cls.reasons:
            return cls.reasons[name]
        near = get_close_matches(name, sorted(cls.model_fields), 1) if len(name) < 64 else []
        meant = f"; did you mean {near[0]!r}?" if near else cls.elsewhere(name)
        return f"{name[:64]!r} is not a field of {cls.called()}{meant}"

    @classmethod
    def called(cls) -> str:
        """What this object is called in messages to clients."""
        return "this request"

    @classmethod
    def elsewhere(cls, name: str) -> str:
        """Message that says where an unknown field belongs; empty if nowhere."""
        return ""


@functools.cache
def _names(kind: type[Body]) -> frozenset[str]:
    """The fields, as clients call them."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


@functools.cache
def _integers(kind: type[Body]) -> frozenset[str]:
    """Fields whose type is or includes integers, but not floats."""

    def has(annotation: Any, wanted: type) -> bool:
        return annotation is wanted or any(has(part, wanted) for part in typing.get_args(annotation))

    fields = kind.model_fields.items()
    return frozenset(name for name, field in fields if has(field.annotation, int) and not has(field.annotation, float))

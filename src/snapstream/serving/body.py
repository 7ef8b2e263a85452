"""What all request bodies have in common: strict types, and a sentence for every field that is not ours.

A field that would change the answer and is not supported is refused with a sentence of its own, from
:mod:`~snapstream.serving.unsupported`. A field that is not known is refused with the name that comes nearest: a typing
error must not pass for a setting. Fields that change nothing here are accepted.
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
"""Type of the validation error of a field that is not supported or not known."""


def encodable(text: str) -> str:
    """Refuse halves of surrogate pairs: JSON can write them, UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid text: {error.reason} at character {error.start}") from error
    return text


Text = Annotated[str, AfterValidator(encodable)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
# Lists end at their first error: a long one with many would make gigabytes of messages.
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]


class Body(BaseModel):
    """Base of all requests, and of objects in them.

    Types are not converted, but for whole numbers, which some clients write as ``8.0``. Unknown fields are refused.

    Attributes:
        unused: Fields that change nothing here, whatever they say.
        neutral: Fields that are not supported, with values that ask for nothing; clients send them unasked.
        reasons: Fields that are not supported, and the sentence that says why.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    unused: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}
    reasons: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_unused(cls, data: Any) -> Any:
        """Leave out what changes nothing: fields we do not use, and unsupported ones that ask for nothing."""
        if not isinstance(data, dict):
            return data
        kept, unknown, whole = {}, [], _integers(cls)
        for name, value in data.items():
            if name in cls.model_fields:
                kept[name] = int(value) if name in whole and type(value) is float and value.is_integer() else value
            elif not (value is None or name in cls.unused or value in cls.neutral.get(name, ())):
                unknown.append(name)
        if unknown:  # one is enough: a body may have a million of them, and each would make an error of its own
            name = str(unknown[0]).encode("utf-8", "replace").decode()
            raise PydanticCustomError(REFUSED, "{reason}", {"field": name, "reason": cls.refusal(name)})
        return kept

    @classmethod
    def refusal(cls, name: str) -> str:
        """Why there is no such field, and what to do instead."""
        if name in cls.reasons:
            return cls.reasons[name]
        near = get_close_matches(name, sorted(cls.model_fields), 1) if len(name) < 64 else []
        meant = f"; did you mean {near[0]!r}?" if near else cls.elsewhere(name)
        return f"{name[:64]!r} is not a field of {cls.called()}{meant}"

    @classmethod
    def called(cls) -> str:
        """What clients know this object as."""
        return "this request"

    @classmethod
    def elsewhere(cls, name: str) -> str:
        """Where a field belongs that this object does not have; empty if nowhere."""
        return ""


@functools.cache
def _integers(kind: type[Body]) -> frozenset[str]:
    """Fields that are whole numbers, alone or among other things."""

    def has(annotation: Any, wanted: type) -> bool:
        return annotation is wanted or any(has(part, wanted) for part in typing.get_args(annotation))

    fields = kind.model_fields.items()
    return frozenset(name for name, field in fields if has(field.annotation, int) and not has(field.annotation, float))

"""Fields of requests that say what shape an answer must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from snapstream.config import StructuredOutputs
from snapstream.errors import RequestError
from snapstream.serving.body import Body, Text
from snapstream.serving.errors import ApiError

_UNUSED = frozenset(
    ("disable_any_whitespace", "disable_additional_properties", "disable_fallback", "whitespace_pattern", "_backend")
)
"""Fields of vLLM's structured_outputs that concern its own libraries."""
Schema = Annotated[dict[str, Any], Field(description="A JSON schema.")]


class JsonSchema(Body):
    """A JSON schema with a name."""

    name: Text | None = None
    description: Text | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Accepted; an answer always fits its schema.")

    @classmethod
    @override
    def called(cls) -> str:
        return "response_format.json_schema"


class ResponseFormat(Body):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @classmethod
    @override
    def called(cls) -> str:
        return "response_format"


class Shaped(Body):
    """The fields that say what shape an answer must have; at most one of them is given."""

    response_format: ResponseFormat | None = Field(
        None, description="text, json_object, or json_schema: the answer fits the schema."
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, json_object, regex, choice and grammar (Lark or GBNF), as in vLLM."
    )
    guided_json: dict[str, Any] | Text | None = Field(None, description="An older name of structured_outputs.json.")
    guided_regex: Text | None = Field(None, description="An older name of structured_outputs.regex.")
    guided_choice: Annotated[list[Text], Field(fail_fast=True)] | None = Field(
        None, description="An older name of structured_outputs.choice."
    )
    guided_grammar: Text | None = Field(None, description="An older name of structured_outputs.grammar.")

    _older: ClassVar[Mapping[str, str]] = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}

    def shape(self) -> StructuredOutputs | None:
        """The shape of the answer; ``None`` if it may be any text.

        Raises:
            ApiError: It is invalid, or there are several.
        """
        found: dict[str, StructuredOutputs] = {}
        wanted = self.response_format
        if wanted is not None and wanted.type == "json_object":
            found["response_format"] = StructuredOutputs(json_object=True)
        if wanted is not None and wanted.type == "json_schema":
            if wanted.json_schema is None or wanted.json_schema.schema_ is None:
                place = "response_format.json_schema"
                raise ApiError(400, f"{place}: give a schema, as in {{'name': ..., 'schema': {{...}}}}", param=place)
            found["response_format"] = StructuredOutputs(json=wanted.json_schema.schema_)
        if self.structured_outputs is not None:
            given = {name: value for name, value in self.structured_outputs.items() if name not in _UNUSED}
            unknown = sorted(set(given) - set(StructuredOutputs.__dataclass_fields__))
            if unknown:
                allowed = ", ".join(StructuredOutputs.__dataclass_fields__)
                what = unknown[0][:64].encode("utf-8", "replace").decode()
                message = f"structured_outputs: {what!r} is not supported; give one of {allowed}"
                raise ApiError(400, message, param="structured_outputs")
            found["structured_outputs"] = self._made("structured_outputs", **given)
        for older, name in self._older.items():
            if getattr(self, older) is not None:
                found[older] = self._made(older, **{name: getattr(self, older)})
        if len(found) > 1:
            raise ApiError(400, f"{' and '.join(found)} were given; give one of them", param=next(iter(found)))
        return next(iter(found.values()), None)

    @staticmethod
    def _made(field: str, **shape: Any) -> StructuredOutputs:
        try:
            return StructuredOutputs(**shape)
        except RequestError as error:
            raise ApiError(400, str(error), param=field) from error

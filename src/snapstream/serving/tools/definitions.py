"""Fields of requests that say which tools there are, and whether one must be called."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from snapstream.serving.body import Body, Text, encodable
from snapstream.serving.errors import ApiError
from snapstream.serving.tools.base import Tools

MOST_TOOLS = 1024
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]


class Function(Body):
    """A tool: its name, what it does, and the JSON schema of its arguments."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Whether calls must fit the schema; otherwise they usually do.")

    @classmethod
    @override
    def called(cls) -> str:
        return "a function"


class Tool(Body):
    """A tool that the model may call."""

    unused: ClassVar[frozenset[str]] = frozenset(("cache_control",))

    type: Literal["function"] = "function"
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise ValueError(f"a tool of type {encodable(kind[:40])!r} is not supported; tools are functions here")
        return data

    @classmethod
    @override
    def called(cls) -> str:
        return "a tool"

    @property
    def schema_of_arguments(self) -> Mapping[str, Any]:
        """The JSON schema of its arguments."""
        return self.function.parameters or {"type": "object", "properties": {}}

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        fields = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"description": ""} | fields | {"parameters": self.schema_of_arguments}}


class NamedFunction(Body):
    """The name of a function."""

    name: Name


class NamedTool(Body):
    """The one tool to call."""

    type: Literal["function"]
    function: NamedFunction

    @classmethod
    @override
    def called(cls) -> str:
        return "tool_choice"


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ToolFields(Body):
    """The fields about tools."""

    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = Field(
        None, description="Tools that the model may call."
    )
    tool_choice: ToolChoice | None = Field(
        None, description="none, auto (the default), required, or the name of the tool to call."
    )
    parallel_tool_calls: bool | None = Field(
        None,
        description="Whether one answer may have several calls. Default: yes, but one if tool_choice requires a call.",
    )

    @property
    def parallel(self) -> bool:
        """Whether one answer may have several calls.

        Where a call is required, small models see no end of them; so there is one, unless several are asked for.
        """
        if isinstance(self.tool_choice, NamedTool):
            return False
        return bool(self.parallel_tool_calls) if self.must_call else self.parallel_tool_calls is not False

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_choice is not None and self.tool_choice not in ("none", "auto")

    @property
    def is_strict(self) -> bool:
        """Whether a tool's calls must fit its schema."""
        return any(tool.function.strict for tool in self.shown_tools())

    def shown_tools(self) -> Sequence[Tool]:
        """The tools that the model is shown."""
        return () if self.tool_choice == "none" else self.tools or ()

    def callable_tools(self) -> Tools:
        """The JSON schema of the arguments of each tool that may be called.

        Raises:
            ApiError: Two tools have the same name, or the chosen one does not exist.
        """
        schemas: dict[str, Mapping[str, Any]] = {}
        for at, tool in enumerate(self.shown_tools()):
            if tool.function.name in schemas:
                place = f"tools[{at}].function.name"
                raise ApiError(400, f"{place}: there are two tools named {tool.function.name!r}", param=place)
            _check_schema(tool.schema_of_arguments, f"tools[{at}].function.parameters")
            schemas[tool.function.name] = tool.schema_of_arguments
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            if name not in schemas:
                raise ApiError(400, f"tool_choice: there is no tool named {name!r} in tools", param="tool_choice")
            return {name: schemas[name]}
        if self.must_call and not schemas:
            raise ApiError(400, "tool_choice is 'required', but there are no tools", param="tool_choice")
        return schemas


def _check_schema(schema: Mapping[str, Any], place: str) -> None:
    """Check what every format relies on.

    Raises:
        ApiError: The schema is invalid.
    """
    properties, required = schema.get("properties"), schema.get("required")
    fits = properties is None or (
        isinstance(properties, dict) and all(isinstance(each, dict | bool) for each in properties.values())
    )
    if not fits:
        raise ApiError(400, f"{place}.properties: it must map names to schemas", param=f"{place}.properties")
    if required is not None and not (isinstance(required, list) and all(isinstance(each, str) for each in required)):
        raise ApiError(400, f"{place}.required: it must be a list of names", param=f"{place}.required")
    try:
        json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"{place}: it cannot be written as JSON: {error}", param=place) from error

"""What a request may say: OpenAI's fields, and ours.

A field that would change the answer and is not supported is refused with a sentence of its own, from
:mod:`~snapstream.serving.unsupported`. A field that is not known is refused with the name that comes nearest: a typing
error must not pass for a setting. Fields that change nothing here are accepted.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from snapstream.config import DEFAULT_POLICY, CacheBudget, policy_names
from snapstream.errors import ConfigurationError, RequestError
from snapstream.serving.unsupported import NEUTRAL, TEXT_ONLY, UNSUPPORTED, UNUSED

MAX_STOPS, MAX_STOP_LENGTH, MAX_BIASES, MAX_MESSAGES = 16, 1024, 1024, 10_000


def _encodable(text: str) -> str:
    """Refuse halves of surrogate pairs: JSON can write them, UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid text: {error.reason} at character {error.start}") from error
    return text


def _few_biases(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise ValueError(f"{len(biases)} tokens; at most {MAX_BIASES}")
    return biases


REFUSED = "refused_field"
"""Type of the validation error of a field that is not supported or not known."""

Text = Annotated[str, AfterValidator(_encodable)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
# Lists end at their first error: a long one with many would make gigabytes of messages.
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH), AfterValidator(_encodable)]


class Body(BaseModel):
    """Base of all requests: types are not converted, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_unused(cls, data: Any) -> Any:
        """Leave out what changes nothing: fields we do not use, and unsupported ones that ask for nothing."""
        if not isinstance(data, dict):
            return data
        kept, unknown = {}, []
        for name, value in data.items():
            if name in cls.model_fields:
                kept[name] = value
            elif not (value is None or name in UNUSED or value in NEUTRAL.get(name, ())):
                unknown.append(name)
        if unknown:  # one is enough: a body may have a million of them, and each would make an error of its own
            name = str(unknown[0]).encode("utf-8", "replace").decode()
            raise PydanticCustomError(REFUSED, "{reason}", {"field": name, "reason": refusal(cls, name)})
        return kept


class StreamOptions(Body):
    """What a stream says besides text."""

    include_usage: bool = Field(False, description="Send token counts in a last event.")
    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is added.")
    continuous_usage_stats: Literal[False] | None = Field(None, description="Not supported.")


class Extra(Body):
    """Fields of the vLLM plugin, so that one client can talk to both."""

    kv_budget: int | None = Field(None, ge=1)


class Budget(Body):
    """A cache whose policy is not the default one."""

    capacity: Annotated[int, Field(ge=1, lt=2**31)] = Field(description="Entries.")
    policy: Annotated[str, Field(max_length=64)] = Field(
        DEFAULT_POLICY, description="mixed, snapstream, streaming, ..."
    )


Entries = Annotated[int, Field(ge=1, lt=2**31)] | Budget


class Generate(Body):
    """What completions and chat completions share."""

    model: Text | None = Field(None, description="The served model, or nothing.")
    stream: bool | None = Field(False, description="Send server-sent events as text is generated.")
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1, description="Answers to each prompt; it is read once for all of them.")
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = Field(
        None, description="Strings that end the output; they are not part of it."
    )
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_BIASES, fail_fast=True)] | None = Field(
        None, description="Tokens that end the output, besides the model's own."
    )
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        0, description="Tokens to generate before an end token or a stop string may end the output."
    )
    ignore_eos: bool | None = Field(False, description="Go on past the model's end-of-sequence token.")
    skip_special_tokens: bool | None = Field(
        True, description="Leave tokens that are no text, such as those of a chat template, out of the text."
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(
        None, description="Makes sampling repeatable, whatever else is running; the next answers of n count up from it."
    )
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="0 is greedy. Default: the model's generation_config.json, or 1."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(None, description="0 or -1: all tokens.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_BIASES),
            BeforeValidator(_few_biases),
        ]
        | None
    ) = Field(None, description="Added to logits, by token id.")
    user: Any = Field(None, description="Accepted, and not used.")
    kv_budget: Entries | None = Field(
        None,
        description="Cache entries of this request, at most the server's. A number means the same SnapStream cache on "
        "every server, whatever its own policy is; an object names another policy.",
    )
    vllm_xargs: Extra | None = Field(None, description="As the vLLM plugin takes kv_budget.")
    telemetry: Literal["counts"] | bool | None = Field(
        False,
        description="Report which prompt tokens were kept and how much attention they had, which costs a little time; "
        "counts: only how many.",
    )
    session_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = Field(
        None,
        description="Keep the compressed cache for the next turn, which sends the same name and the whole history.",
    )
    context_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = Field(
        None,
        description="A text that /v1/contexts has read, which comes before the prompt, or begins the first message.",
    )


MaxTokens = Annotated[int, Field(ge=1, lt=2**31)]


class CompletionRequest(Generate):
    """Body of ``/v1/completions``."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
    ) = Field(description="Text, token ids, or a list of either.")
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        16, description="Most tokens to generate; 0 only reads the prompt."
    )
    logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="Report log-probabilities of the chosen token and of this many most likely ones."
    )
    echo: bool | None = Field(
        False,
        description="Begin the output with the prompt. With logprobs, those of the prompt are reported too: they come "
        "from prefill, which sees all of it, and do not depend on the cache.",
    )


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"a part of type {_encodable(kind[:40])!r} is not supported: {TEXT_ONLY}")
        return data


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: Text | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = Field(
        None, description="For the chat template, if it knows them."
    )
    tool_call_id: Text | None = None
    refusal: Text | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: content is one text."""
        fields = self.model_dump(exclude_none=True)
        parts = self.content
        fields["content"] = "".join(part.text for part in parts) if isinstance(parts, list) else parts or ""
        return fields


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


TemplateVariables = Annotated[dict[str, Any], Field(max_length=64)]


class ChatRequest(Generate):
    """Body of ``/v1/chat/completions``."""

    messages: Messages
    chat_template_kwargs: TemplateVariables | None = Field(
        None, description='Variables of the model\'s chat template, such as {"enable_thinking": false}.'
    )
    max_tokens: MaxTokens | None = Field(None, description="The older name of max_completion_tokens.")
    max_completion_tokens: MaxTokens | None = Field(
        None, description="Most tokens to generate. Default: what the model's length leaves."
    )
    logprobs: bool | None = Field(False, description="Report log-probabilities of the chosen tokens.")
    top_logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="And of this many most likely ones; needs logprobs."
    )


class ContextRequest(Body):
    """Body of ``/v1/contexts``."""

    model: Text | None = None
    text: Annotated[str, Field(min_length=1), AfterValidator(_encodable)] | Tokens = Field(
        description="The text, or token ids."
    )
    chat: bool | None = Field(
        None,
        description="Whether it begins the first message of a conversation, in the model's chat template. Default: if "
        "the model has one.",
    )
    system: Text | None = Field(None, description="The system message of this conversation.")
    kv_budget: Entries | None = Field(
        None, description="Cache entries that are left of the text, at most the server's."
    )
    name: Annotated[Text, Field(max_length=256)] | None = Field(None, description="What you call it.")


class TokenizeRequest(Body):
    """Body of ``/tokenize``: a prompt, or messages."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    chat_template_kwargs: TemplateVariables | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(Body):
    """Body of ``/detokenize``."""

    model: Text | None = None
    tokens: Annotated[list[Token], Field(fail_fast=True)]


_ROUTES: Mapping[type[Body], str] = {
    CompletionRequest: "/v1/completions",
    ChatRequest: "/v1/chat/completions",
    ContextRequest: "/v1/contexts",
    TokenizeRequest: "/tokenize",
    DetokenizeRequest: "/detokenize",
}


@functools.lru_cache(1024)
def _preset(policy: str, capacity: int) -> CacheBudget:
    """Remembered, as policies of other packages are looked for among all that is installed."""
    if policy not in _policies():
        raise ConfigurationError(f"unknown policy {policy!r}; allowed: {', '.join(_policies())}")
    return CacheBudget.preset(policy, capacity)


@functools.cache
def _policies() -> Sequence[str]:
    return tuple(policy_names())


def budget_of(asked: int | Budget | None) -> int | CacheBudget | None:
    """The cache that a request asks for.

    Raises:
        RequestError: There is no such policy, or it cannot work with so few entries.
    """
    if not isinstance(asked, Budget):
        return asked
    try:
        return _preset(asked.policy, asked.capacity)
    except ConfigurationError as error:
        raise RequestError(f"kv_budget: {error}") from error


def refusal(kind: type[Body], name: str) -> str:
    """Why a request has no such field, and what to do instead.

    Args:
        kind: The request.
        name: The field.
    """
    if name in UNSUPPORTED and issubclass(kind, Generate):
        return UNSUPPORTED[name]
    reason = f"{name[:64]!r} is not a field of this request"
    near = get_close_matches(name, sorted(kind.model_fields), 1) if len(name) < 64 else []
    if near:
        return f"{reason}; did you mean {near[0]!r}?"
    elsewhere = [route for other, route in _ROUTES.items() if name in other.model_fields]
    return f"{reason}; it belongs to {' and '.join(elsewhere)}" if elsewhere else reason

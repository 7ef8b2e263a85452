"""What a request may say: OpenAI's fields, and ours."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from snapstream.config import DEFAULT_POLICY, CacheBudget, policy_names
from snapstream.errors import ConfigurationError, RequestError
from snapstream.serving.body import Body, Text, Token, Tokens, encodable
from snapstream.serving.messages import Messages, TemplateVariables
from snapstream.serving.unsupported import NEUTRAL, UNSUPPORTED, UNUSED

MAX_STOPS, MAX_STOP_LENGTH, MAX_BIASES = 16, 1024, 1024


def _few_biases(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise ValueError(f"{len(biases)} tokens; at most {MAX_BIASES}")
    return biases


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH), AfterValidator(encodable)]


class StreamOptions(Body):
    """What a stream says besides text."""

    include_usage: bool = Field(False, description="Send token counts in a last event.")
    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is added.")
    continuous_usage_stats: bool | None = Field(False, description="Send token counts in every event.")


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


class Request(Body):
    """Base of all bodies."""

    unused: ClassVar[frozenset[str]] = UNUSED
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = NEUTRAL

    @classmethod
    def elsewhere(cls, name: str) -> str:
        """Where a field belongs that this request does not have; empty if nowhere."""
        routes = [route for kind, route in _ROUTES.items() if name in kind.model_fields]
        return f"; it belongs to {' and '.join(routes)}" if routes else ""


class Generate(Request):
    """What completions and chat completions share."""

    reasons: ClassVar[Mapping[str, str]] = UNSUPPORTED

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
    top_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="0: the likeliest token alone.")
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


def _no_limit(number: Any) -> Any:
    """Take -1 as no limit, as llama.cpp and LM Studio do."""
    return None if type(number) in (int, float) and number == -1 else number


MaxTokens = Annotated[Annotated[int, Field(ge=1, lt=2**31)] | None, BeforeValidator(_no_limit)]


class CompletionRequest(Generate):
    """Body of ``/v1/completions``."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
    ) = Field(description="Text, token ids, or a list of either.")
    max_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        16, description="Most tokens to generate; 0 only reads the prompt, -1 is what the model's length leaves."
    )
    logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="Report log-probabilities of the chosen token and of this many most likely ones."
    )
    echo: bool | None = Field(
        False,
        description="Begin the output with the prompt. With logprobs, those of the prompt are reported too: they come "
        "from prefill, which sees all of it, and do not depend on the cache.",
    )


class ChatRequest(Generate):
    """Body of ``/v1/chat/completions``."""

    messages: Messages
    chat_template_kwargs: TemplateVariables | None = Field(
        None, description='Variables of the model\'s chat template, such as {"enable_thinking": false}.'
    )
    max_tokens: MaxTokens = Field(None, description="The older name of max_completion_tokens.")
    max_completion_tokens: MaxTokens = Field(
        None, description="Most tokens to generate. Default, and for -1: what the model's length leaves."
    )
    logprobs: bool | None = Field(False, description="Report log-probabilities of the chosen tokens.")
    top_logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="And of this many most likely ones; needs logprobs."
    )


class ContextRequest(Request):
    """Body of ``/v1/contexts``."""

    model: Text | None = None
    text: Annotated[str, Field(min_length=1), AfterValidator(encodable)] | Tokens = Field(
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


class TokenizeRequest(Request):
    """Body of ``/tokenize``: a prompt, or messages."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    chat_template_kwargs: TemplateVariables | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(Request):
    """Body of ``/detokenize``."""

    model: Text | None = None
    tokens: Annotated[list[Token], Field(fail_fast=True)]


_ROUTES: Mapping[type[Request], str] = {
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

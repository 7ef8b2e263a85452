"""Request bodies: OpenAI's fields, and SnapStream's own."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import override

from snapstream.config import DEFAULT_POLICY, CacheBudget, policy_names
from snapstream.config.pins import MOST_SPANS
from snapstream.errors import ConfigurationError, RequestError
from snapstream.serving.body import Body, Text, Token, Tokens, encodable
from snapstream.serving.messages import Messages, TemplateVariables
from snapstream.serving.pins import Pins, Slice
from snapstream.serving.shapes import Shaped
from snapstream.serving.tools.definitions import MOST_TOOLS, Tool, ToolFields
from snapstream.serving.unsupported import NEUTRAL, UNSUPPORTED, UNUSED

MAX_STOPS, MAX_STOP_LENGTH, MAX_BIASES = 16, 1024, 1024


def _few_biases(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise ValueError(f"{len(biases)} tokens; at most {MAX_BIASES}")
    return biases


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH), AfterValidator(encodable)]


class StreamOptions(Body):
    """What a stream contains besides text."""

    include_usage: bool = Field(False, description="Send token counts in an extra last event.")
    include_obfuscation: bool | None = Field(None, description="Accepted; no obfuscation is added.")
    continuous_usage_stats: bool | None = Field(False, description="Send token counts in every event.")


class Extra(Body):
    """Fields of the vLLM plugin, so that one client works with both."""

    kv_budget: int | None = Field(None, ge=1)
    pin: Slice | Annotated[list[Slice], Field(max_length=MOST_SPANS, fail_fast=True)] | None = None


class Budget(Body):
    """A cache budget with a policy other than the default."""

    capacity: Annotated[int, Field(ge=1, lt=2**31)] = Field(description="Cache entries.")
    policy: Annotated[str, Field(max_length=64)] = Field(
        DEFAULT_POLICY, description="spans, snapstream, streaming, ..."
    )


Entries = Annotated[int, Field(ge=1, lt=2**31)] | Budget


class Request(Body):
    """Base class of all request bodies."""

    unused: ClassVar[frozenset[str]] = UNUSED
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = NEUTRAL

    @classmethod
    @override
    def elsewhere(cls, name: str) -> str:
        routes = [route for kind, route in _ROUTES.items() if name in kind.model_fields]
        return f"; it belongs to {' and '.join(routes)}" if routes else ""


class Generate(Request, Shaped):
    """Fields that completions and chat completions share."""

    reasons: ClassVar[Mapping[str, str]] = UNSUPPORTED

    model: Text | None = Field(None, description="The served model; may be left out.")
    stream: bool | None = Field(False, description="Send server-sent events as text is generated.")
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1, description="Number of answers per prompt; the prompt is prefilled once.")
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = Field(
        None, description="Strings that end the output and are not included in it."
    )
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_BIASES, fail_fast=True)] | None = Field(
        None, description="Tokens that end the output, in addition to the model's end tokens."
    )
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        0, description="Tokens to generate before an end token or a stop string may end the output."
    )
    ignore_eos: bool | None = Field(False, description="Continue past the model's end tokens.")
    skip_special_tokens: bool | None = Field(
        True, description="Leave special tokens, such as those of a chat template, out of the text."
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = Field(
        None, description="Makes sampling repeatable, whatever else is running; further answers of n use seed + 1, ..."
    )
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="0 is greedy. Default: the model's generation_config.json, or 1."
    )
    top_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="0 means the likeliest token alone.")
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(None, description="0 or -1 means all tokens.")
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
    user: Any = Field(None, description="Accepted, but not used.")
    kv_budget: Entries | None = Field(
        None,
        description="Cache entries of this request, at most the server's. A number means the same SnapStream cache on "
        "every server, whatever the server's policy; an object selects another policy.",
    )
    pin: Pins | None = Field(
        None,
        description="What is kept whatever the policy selects, most important first: 'system', 'tools', numbers of "
        "messages, {'text': ...}, or spans of tokens, such as [0, 300] or '0:300'. Default in a conversation, and "
        "true: ['system', 'tools']. false: nothing.",
    )
    vllm_xargs: Extra | None = Field(None, description="kv_budget and pin in the form of the vLLM plugin.")
    return_kept_tokens: Literal["counts"] | bool | None = Field(
        False,
        description="Report which prompt tokens were kept and how much attention they had, which takes a little time. "
        '"counts" reports only how many.',
    )
    telemetry: Literal["counts"] | bool | None = Field(None, description="The older name of return_kept_tokens.")
    session_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = Field(
        None,
        description="Keep the compressed cache for the next turn, which sends the same id and the whole history.",
    )
    context_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = Field(
        None,
        description="Id of a context from /v1/contexts, whose text precedes the prompt or begins the first message.",
    )

    @property
    def pins(self) -> Pins | None:
        """What is pinned, by either name."""
        given = None if self.vllm_xargs is None else self.vllm_xargs.pin
        if self.pin is not None or given is None:
            return self.pin
        return [given] if isinstance(given, str) else [*given]

    @property
    def kept_tokens(self) -> Literal["counts"] | bool | None:
        """What to report of kept tokens, by either name."""
        return self.return_kept_tokens or self.telemetry


def _no_limit(number: Any) -> Any:
    """Treat -1 as no limit, as llama.cpp and LM Studio do."""
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
        16, description="Maximum number of tokens to generate; 0 only prefills the prompt, -1 means no limit."
    )
    logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="Report log-probabilities of each selected token and of this many most likely ones."
    )
    echo: bool | None = Field(
        False,
        description="Begin the output with the prompt. With logprobs, those of the prompt are reported too. They come "
        "from prefill, which sees the whole prompt, so they do not depend on the cache budget.",
    )


class ChatRequest(Generate, ToolFields):
    """Body of ``/v1/chat/completions``."""

    messages: Messages
    reasoning_effort: Annotated[Text, Field(max_length=32)] | None = Field(
        None, description="How much to think, for chat templates that know it; none turns thinking off where possible."
    )
    enable_thinking: bool | None = Field(None, description="Whether to think, for chat templates that know it.")
    chat_template_kwargs: TemplateVariables | None = Field(
        None, description='Variables of the model\'s chat template, such as {"enable_thinking": false}.'
    )
    max_tokens: MaxTokens = Field(None, description="The older name of max_completion_tokens.")
    max_completion_tokens: MaxTokens = Field(
        None, description="Maximum number of tokens to generate. Default, and -1: as many as max_model_len allows."
    )
    logprobs: bool | None = Field(False, description="Report log-probabilities of the selected tokens.")
    top_logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="Also report this many most likely tokens; needs logprobs."
    )


class ContextRequest(Request):
    """Body of ``/v1/contexts``."""

    model: Text | None = None
    text: Annotated[str, Field(min_length=1), AfterValidator(encodable)] | Tokens = Field(
        description="The text, or token ids."
    )
    chat: bool | None = Field(
        None,
        description="Whether the text begins the first message of a conversation, in the model's chat template. "
        "Default: if the model has one.",
    )
    system: Text | None = Field(None, description="The system message of this conversation.")
    kv_budget: Entries | None = Field(
        None, description="Cache entries that are kept of the text, at most the server's."
    )
    pin: Pins | None = Field(
        None,
        description="What is kept whatever the policy selects: 'system', {'text': ...}, or spans of tokens. Default: "
        "['system'].",
    )
    name: Annotated[Text, Field(max_length=256)] | None = Field(None, description="Your name for it.")


class TokenizeRequest(Request):
    """Body of ``/tokenize``: a prompt, or messages."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
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
    """The preset of a policy. It is cached, because finding policies of other packages takes time."""
    if policy not in _policies():
        raise ConfigurationError(f"unknown policy {policy!r}; allowed: {', '.join(_policies())}")
    return CacheBudget.preset(policy, capacity)


@functools.cache
def _policies() -> Sequence[str]:
    return tuple(policy_names())


def budget_of(asked: int | Budget | None) -> int | CacheBudget | None:
    """The cache budget that a request asks for.

    Raises:
        RequestError: The policy is unknown, or there are too few entries.
    """
    if not isinstance(asked, Budget):
        return asked
    try:
        return _preset(asked.policy, asked.capacity)
    except ConfigurationError as error:
        raise RequestError(f"kv_budget: {error}") from error

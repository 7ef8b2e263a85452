"""Engine outputs in OpenAI's formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence, Set
from typing import Any, Literal

from pydantic import BaseModel, Field

from snapstream.engine import CacheUse, RequestOutput, TokenLogprobs
from snapstream.serving.prompts import Prompt

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""


class PromptDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int = Field(
        description="Tokens that were not prefilled again: those of earlier turns, a context, or a cached prefix."
    )


class CompletionDetails(BaseModel):
    """Details of the answers' tokens: draft tokens of speculative decoding."""

    accepted_prediction_tokens: int = Field(description="Draft tokens that were accepted.")
    rejected_prediction_tokens: int = Field(description="Draft tokens that were rejected; they are not in the answer.")


class Usage(BaseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class SessionUse(BaseModel):
    """How a request used its session."""

    id: str
    kept: bool = Field(description="Whether the next turn can continue from here.")
    reused_tokens: int = Field(description="Tokens of earlier turns that were not prefilled again.")
    read_tokens: int = Field(description="Tokens that were prefilled.")
    reason: str | None = Field(None, description="Why nothing was reused.")


class TokenLogprob(BaseModel):
    """The log-probability of a token. Text that is part of a character has no bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenLogprob(TokenLogprob):
    """That of a selected token, and of the most likely ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat completion, or of a part of it."""

    content: list[ChosenLogprob]
    refusal: None


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion, or of a part of it, one item per token; an echoed prompt is included."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _Choice(BaseModel):
    index: int
    finish_reason: str | None
    stop_reason: str | int | None = Field(
        default=None, description="The stop string or stop token that has ended the answer."
    )
    cache: CacheUse | None = None


class Choice(_Choice):
    """One answer of ``/v1/completions``, or a part of it."""

    text: str
    logprobs: CompletionLogprobs | None = None


class CalledFunction(BaseModel):
    """The tool that is called, and its arguments in JSON; of a part of a call, what it adds."""

    name: str | None = None
    arguments: str = ""


class ToolCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolCallPart(BaseModel):
    """A part of a call: first its id and its name, then its arguments in pieces."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatAnswer(BaseModel):
    """The message of an answer."""

    role: str = "assistant"
    content: str | None = Field(description="The text; null if there are only calls.")
    reasoning_content: str | None = Field(None, description="The reasoning before the text, if the model reasons.")
    reasoning: str | None = Field(None, description="The same.")
    tool_calls: list[ToolCall] | None = None


class ChatChoice(_Choice):
    """One answer of ``/v1/chat/completions``."""

    message: ChatAnswer
    logprobs: ChatLogprobs | None = None


class ChatDelta(BaseModel):
    """What a part of an answer adds to the message."""

    role: str = "assistant"
    content: str = ""
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallPart] | None = None


class ChatPart(_Choice):
    """A part of an answer of ``/v1/chat/completions``."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None = None


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    session: SessionUse | None = None


class Completion(_Answer):
    """Answer of ``/v1/completions``."""

    object: Literal["text_completion"]
    choices: list[Choice]
    usage: Usage


class CompletionChunk(_Answer):
    """A part of an answer of ``/v1/completions``."""

    object: Literal["text_completion"]
    choices: list[Choice]
    usage: Usage | None = None


class ChatCompletion(_Answer):
    """Answer of ``/v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(_Answer):
    """A part of an answer of ``/v1/chat/completions``."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatPart]
    usage: Usage | None = None


def dumps(answer: BaseModel) -> str:
    """JSON of an answer, with the fields that were set."""
    return json.dumps(answer.model_dump(exclude_unset=True), allow_nan=False)


class LogprobWriter:
    """Writes the log-probabilities of one sequence while it is generated.

    Args:
        text_of: Returns the text of a token.
        prompt: The prompt.
        silent: Tokens that are left out of the output's text.
    """

    def __init__(self, text_of: Callable[[int], str], prompt: Prompt, silent: Set[int]) -> None:
        self._text_of, self._prompt, self._silent = text_of, prompt, silent
        self._offset, self._written, self._prompt_written = 0, 0, False

    def chat(self, output: RequestOutput) -> ChatLogprobs:
        """New tokens since the last call, in the format of chat completions."""
        return ChatLogprobs(content=[self._chat_token(one) for one in self._new(output)], refusal=None)

    def completion(self, output: RequestOutput) -> CompletionLogprobs:
        """New tokens since the last call, in the format of completions; the first call includes an echoed prompt."""
        parts = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if not self._prompt_written and output.prompt_logprobs is not None:
            self._prompt_written = True
            for at, (token, scored) in enumerate(zip(self._prompt.tokens, output.prompt_logprobs, strict=True)):
                self._add(parts, token, scored)
                if self._prompt.offsets:  # offsets in the client's text, which has no special tokens
                    parts.text_offset[-1] = self._prompt.offsets[at]
            if self._prompt.text is not None:
                self._offset = len(self._prompt.text)
        for one in self._new(output):
            self._add(parts, one.token_id, one, silent=one.token_id in self._silent)
        return parts

    def _add(
        self, parts: CompletionLogprobs, token: int, scored: TokenLogprobs | None, *, silent: bool = False
    ) -> None:
        text = self._text_of(token)
        parts.tokens.append(text)
        parts.text_offset.append(self._offset)
        self._offset += 0 if silent else len(text)
        if scored is None:  # the first token, which has no context
            parts.token_logprobs.append(None)
            parts.top_logprobs.append(None)
            return
        parts.token_logprobs.append(_finite(scored.logprob))
        # As in other servers, the sampled token is always included, even if it is not among the most likely ones.
        top = {self._text_of(token): _finite(value) for token, value in scored.top.items()}
        parts.top_logprobs.append(top | {text: _finite(scored.logprob)})

    def _new(self, output: RequestOutput) -> Sequence[TokenLogprobs]:
        new = output.logprobs_after(self._written)
        self._written += len(new)
        return new

    def _chat_token(self, one: TokenLogprobs) -> ChosenLogprob:
        top = [TokenLogprob(**self._entry(token, value)) for token, value in one.top.items()]
        return ChosenLogprob(**self._entry(one.token_id, one.logprob), top_logprobs=top)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text_of(token)
        # A token that is part of a character has no text, and the replacement character has other bytes.
        known = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode("utf-8", "replace"))
        return {"token": text, "logprob": _finite(logprob), "bytes": known}


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # NaN is not larger either

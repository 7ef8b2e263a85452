"""Engine outputs in OpenAI's formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import asdict
from typing import Any

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


class Choice(BaseModel):
    """One answer of ``/v1/completions``."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None
    cache: CacheUse | None = None


class ChatAnswer(BaseModel):
    """The message of an answer."""

    role: str = "assistant"
    content: str


class ChatChoice(BaseModel):
    """One answer of ``/v1/chat/completions``."""

    index: int
    message: ChatAnswer
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None
    cache: CacheUse | None = None


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    session: SessionUse | None = None


class Completion(_Answer):
    """Answer of ``/v1/completions``."""

    object: str = "text_completion"
    choices: list[Choice]


class ChatCompletion(_Answer):
    """Answer of ``/v1/chat/completions``."""

    object: str = "chat.completion"
    choices: list[ChatChoice]


def cache_of(output: RequestOutput) -> dict[str, Any] | None:
    """Which tokens were kept, as JSON."""
    return None if output.cache is None else asdict(output.cache)


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

    def chat(self, output: RequestOutput) -> dict[str, Any]:
        """New tokens since the last call, in the format of chat completions."""
        return {"content": [self._chat_token(one) for one in self._new(output)], "refusal": None}

    def completion(self, output: RequestOutput) -> dict[str, Any]:
        """New tokens since the last call, in the format of completions; the first call includes an echoed prompt."""
        parts: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if not self._prompt_written and output.prompt_logprobs is not None:
            self._prompt_written = True
            for at, (token, scored) in enumerate(zip(self._prompt.tokens, output.prompt_logprobs, strict=True)):
                self._add(parts, token, scored)
                if self._prompt.offsets:  # offsets in the client's text, which has no special tokens
                    parts["text_offset"][-1] = self._prompt.offsets[at]
            if self._prompt.text is not None:
                self._offset = len(self._prompt.text)
        for one in self._new(output):
            self._add(parts, one.token_id, one, silent=one.token_id in self._silent)
        return parts

    def _add(self, parts: dict[str, Any], token: int, scored: TokenLogprobs | None, *, silent: bool = False) -> None:
        text = self._text_of(token)
        parts["tokens"].append(text)
        parts["text_offset"].append(self._offset)
        self._offset += 0 if silent else len(text)
        if scored is None:  # the first token, which has no context
            parts["token_logprobs"].append(None)
            parts["top_logprobs"].append(None)
            return
        parts["token_logprobs"].append(_finite(scored.logprob))
        # As in other servers, the sampled token is always included, even if it is not among the most likely ones.
        top = {self._text_of(token): _finite(value) for token, value in scored.top.items()}
        parts["top_logprobs"].append(top | {text: _finite(scored.logprob)})

    def _new(self, output: RequestOutput) -> Sequence[TokenLogprobs]:
        new = output.logprobs_after(self._written)
        self._written += len(new)
        return new

    def _chat_token(self, one: TokenLogprobs) -> dict[str, Any]:
        top = [self._entry(token, value) for token, value in one.top.items()]
        return self._entry(one.token_id, one.logprob) | {"top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text_of(token)
        # A token that is part of a character has no text, and the replacement character has other bytes.
        known = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode("utf-8", "replace"))
        return {"token": text, "logprob": _finite(logprob), "bytes": known}


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB  # NaN is not larger either

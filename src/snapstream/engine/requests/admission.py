"""Admission of requests: checks prompts and parameters before the engine's state changes."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from snapstream.cache import CompressedSequence
from snapstream.config import CacheBudget, EngineConfig, SamplingParams
from snapstream.config.pins import MOST_SPANS, Span
from snapstream.engine.prefill.result import PrefillResult
from snapstream.engine.requests.detokenizer import CONTEXT, Detokenizer, special_tokens
from snapstream.engine.requests.grammar import GrammarCompiler
from snapstream.engine.requests.request import Request
from snapstream.engine.requests.text import OutputText
from snapstream.engine.requests.tokenizing import PromptTokenizer
from snapstream.errors import ContextLengthError, RequestError
from snapstream.models.ends import end_names, stop_tokens
from snapstream.models.spec import ModelSpec

Prompt = str | Sequence[int]


class Admission:
    """Creates requests from the caller's arguments, or explains why they cannot be served.

    Args:
        tokenizer: The model's tokenizer.
        spec: The model.
        budget: The engine's cache budget.
        config: The engine's settings.
        max_model_len: Maximum length of prompt plus output.
    """

    def __init__(
        self, tokenizer: Any, spec: ModelSpec, budget: CacheBudget, config: EngineConfig, *, max_model_len: int
    ) -> None:
        self.tokenizer, self.spec, self.budget, self.config = tokenizer, spec, budget, config
        self.max_model_len = max_model_len
        self.texts = PromptTokenizer(tokenizer, max_model_len)
        self.max_logprobs = min(config.max_logprobs, spec.vocab_size)
        self.special_tokens = special_tokens(tokenizer)
        added = tokenizer.added_tokens_decoder  # made anew for each access; Gemma has 6,000 of them
        self._special = {added[token].content: token for token in self.special_tokens}
        named = (self._special[name] for name in end_names(self._special))
        self.end_tokens = frozenset({*spec.eos_token_ids, *named})
        self.grammars = GrammarCompiler(tokenizer, spec.vocab_size, sorted(self.end_tokens))

    def admit(
        self,
        name: str,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        past: CompressedSequence | None,
        keep: bool,
        salt: str = "",
    ) -> Request:
        """Check a request and create it; see :meth:`snapstream.engine.engine.Engine.add_request`.

        Raises:
            RequestError: It cannot be served.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is {params!r}; give SamplingParams(max_tokens=..., temperature=..., ...)")
        if (past is not None or keep) and not self.config.goes_on:
            raise RequestError("this engine keeps no caches between turns; create it with sessions=1 or more")
        tokens = self.tokenize(prompt)
        if past is not None:
            self._check_past(past, tokens, params)
        room = self._room(len(tokens), 0 if past is None else len(past.tokens))
        for field in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, field) or 0
            if wanted > self.max_logprobs:
                raise RequestError(f"{field} is {wanted}; at most {self.max_logprobs} (max_logprobs)")
        if params.prompt_logprobs is not None and past is not None:
            raise RequestError("prompt_logprobs need the whole prompt; they are not available after earlier turns")
        self._check_tokens(params.forced)
        self._check_tokens(list(params.logit_bias))
        if len(params.forced) > room:
            raise RequestError(
                f"{len(params.forced)} forced tokens after a prompt of {len(tokens)} are more than "
                f"max_model_len={self.max_model_len}"
            )
        budget = self._pinning(
            self.budget.for_request(params.kv_budget, self.config.kept_queries), params.pin, len(tokens), past
        )
        if past is not None and not tokens:  # decoded unchanged
            budget = past.budget or replace(self.budget, ring="elastic")  # a cache without a budget cannot be renewed
        if not self.spec.has_budget:  # no layer has pinned places that could be renewed
            budget = replace(budget, ring="elastic")
        known = tokens if past is None else [*past.tokens[-CONTEXT:], *tokens]
        stop_ids = {*params.stop_token_ids, *stop_tokens(params.stop, self._special)}
        stop_ids |= set() if params.ignore_eos else self.end_tokens
        wanted = params.structured_outputs
        return Request(
            request_id=name,
            prompt=tokens,
            params=params,
            seed=random.getrandbits(62) if params.seed is None else params.seed & (2**62 - 1),
            budget=budget,
            max_tokens=min(params.max_tokens, room),
            text=OutputText(
                params,
                frozenset(stop_ids),
                Detokenizer(
                    self.tokenizer, self.special_tokens, known[-CONTEXT:], skip_special=params.skip_special_tokens
                ),
            ),
            grammar=None if wanted is None else self.grammars.start(wanted, stop_ids),
            past=past,
            keep=keep,
            salt=salt,
            prefilled=PrefillResult.of_stored(past, keep=keep) if past is not None and not tokens else None,
        )

    def _check_past(self, past: CompressedSequence, tokens: list[int], params: SamplingParams) -> None:
        """Check that a cache can be continued: by prefilling ``tokens`` on top of it or, without tokens, unchanged."""
        if not past.positions:
            raise RequestError("this cache has no positions of its entries; create it with keep=True")
        if tokens:
            return
        if past.logits is None:
            raise RequestError(
                "the prompt has no tokens, but this cache ends with an answer or a context, which needs a next prompt; "
                "give at least one token"
            )
        if past.limit > self.budget.capacity:
            raise RequestError(
                f"this cache holds up to {past.limit} entries, but this engine's slots hold "
                f"{self.budget.capacity}; create the engine with a larger budget"
            )
        if params.kv_budget is not None or params.return_kept_tokens or params.pin:
            raise RequestError(
                "a cache that is decoded unchanged keeps its budget; leave kv_budget, pin and return_kept_tokens out"
            )

    def _pinning(
        self, budget: CacheBudget, pin: Sequence[Span], tokens: int, past: CompressedSequence | None
    ) -> CacheBudget:
        """The budget of a request with its pins, then those of earlier turns as far as there may be so many."""
        total, before = tokens + (0 if past is None else len(past.tokens)), None if past is None else past.budget
        for start, end in pin:
            if end > total:
                raise RequestError(f"pin: the span [{start}, {end}] ends after the prompt, which has {total} tokens")
        every = dict.fromkeys((*pin, *budget.pin, *(() if before is None else before.pin)))
        return replace(budget, pin=tuple(every)[:MOST_SPANS])

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Tokenize a prompt as the engine does.

        Raises:
            RequestError: The prompt is not valid text, has tokens that are not in the vocabulary, or is far too long.
        """
        if isinstance(prompt, str):
            tokens = self.texts.encode(prompt).tokens
        else:
            try:
                tokens = [operator.index(token) for token in prompt]
            except TypeError as error:
                raise RequestError(f"a prompt is text or a list of token ids; {error}") from error
        self._check_tokens(tokens)
        return tokens

    def _room(self, tokens: int, before: int) -> int:
        """Maximum output length after a prompt of ``tokens`` tokens and earlier turns of ``before`` tokens."""
        if not tokens + before:
            raise RequestError("the prompt has no tokens; give at least one")
        room = self.max_model_len - before - tokens
        if room < 1:
            raise ContextLengthError(self.max_model_len, f"{tokens} tokens", before)
        return room

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        wrong = [token for token in tokens if not 0 <= token < self.spec.vocab_size]
        if wrong:
            raise RequestError(f"token {wrong[0]} is not in the model's vocabulary of {self.spec.vocab_size}")

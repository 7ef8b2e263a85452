"""Sampling parameters: how the tokens of one request are selected, and when to stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field

from snapstream.config.budget import CacheBudget
from snapstream.config.checks import is_count_or_none, is_integer, is_number
from snapstream.config.pins import Span, read_spans
from snapstream.config.structured_outputs import StructuredOutputs
from snapstream.errors import ConfigurationError, RequestError

_FRACTIONS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are selected, and when to stop.

    Attributes:
        max_tokens: Maximum number of tokens to generate; 0 only prefills the prompt.
        min_tokens: Number of tokens to generate before an end token, a stop token or a stop string may end the output.
        temperature: 0 is greedy: always the most likely token.
        top_k: Sample among the ``top_k`` most likely tokens; 0 means all.
        top_p: Sample among the fewest tokens whose probabilities add up to ``top_p``.
        min_p: Drop tokens that are less likely than ``min_p`` times the most likely one.
        seed: Makes sampling repeatable, whatever else is in the batch; ``None`` draws a seed.
        presence_penalty: Subtracted from the logit of every token that was generated before.
        frequency_penalty: Subtracted once per earlier occurrence among the generated tokens.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
        logit_bias: Added to the logits of these tokens, by token id; between -100 and 100.
        logprobs: Report the log-probabilities of each selected token and of this many most likely ones; ``None`` is
            off.
        prompt_logprobs: The same for the prompt's tokens. They come from prefill, which sees the whole prompt, so they
            do not depend on the cache budget.
        stop: Strings that end the output and are not included in it.
        stop_token_ids: Tokens that end the output, in addition to the model's end tokens.
        ignore_eos: Continue past the model's end tokens.
        skip_special_tokens: Leave special tokens, such as those of a chat template, out of the output's text.
        kv_budget: Cache budget of this request, at most as large as the engine's. A number of entries means
            :meth:`CacheBudget.of` that number; ``None`` means the engine's budget.
        pin: Spans of the prompt, earlier turns included, that are kept in the cache whatever its policy selects: pairs
            of token positions, first and one past the last. See :attr:`CacheBudget.pin`.
        forced: Tokens that the output begins with, whatever the model predicts. They are decoded like generated tokens,
            after the prompt was compressed. They count as output, and none of them ends it.
        structured_outputs: The shape that the output must have; needs the extra ``structured``. Where only one text is
            possible, its tokens are not left to the model.
        return_kept_tokens: Report which prompt tokens were kept and how much attention they had. Costs a second scoring
            pass.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] | str = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    kv_budget: int | CacheBudget | None = None
    pin: Sequence[Span] = ()
    forced: tuple[int, ...] = ()
    structured_outputs: StructuredOutputs | None = None
    return_kept_tokens: bool = False
    telemetry: InitVar[bool | None] = None

    def __post_init__(self, telemetry: bool | None) -> None:
        """Check every field; ``telemetry`` is the older name of ``return_kept_tokens``.

        Raises:
            RequestError: A value is not allowed.
        """
        object.__setattr__(self, "return_kept_tokens", bool(self.return_kept_tokens or telemetry))
        for name in ("stop", "stop_token_ids", "forced"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str | list | tuple | set | frozenset):
                raise RequestError(f"sampling: {name} is {value!r}; it must be a list")
        try:
            object.__setattr__(self, "pin", read_spans(self.pin))
        except ConfigurationError as error:
            raise RequestError(f"sampling: {error}") from error
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "forced", tuple(self.forced or ()))
        bias = self.logit_bias
        if not isinstance(bias, Mapping):
            raise RequestError(f"sampling: logit_bias is {bias!r}; it must map token ids to numbers")
        for name in _FRACTIONS:
            value = getattr(self, name)
            if not is_number(value):
                raise RequestError(f"sampling: {name} is {value!r}; it must be a number")
        checks: list[tuple[str, bool, str]] = [
            ("max_tokens", is_integer(self.max_tokens) and self.max_tokens >= 0, "a whole number of 0 or more"),
            ("min_tokens", is_integer(self.min_tokens) and self.min_tokens >= 0, "a whole number of 0 or more"),
            ("temperature", 0 <= self.temperature <= 100, "between 0 and 100"),
            ("top_k", is_integer(self.top_k) and self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("presence_penalty", abs(self.presence_penalty) <= 2, "between -2 and 2"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 2, "between -2 and 2"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 100, "above 0 and at most 100"),
            ("seed", self.seed is None or is_integer(self.seed), "a whole number, or none"),
            (
                "logit_bias",
                all(is_integer(t) and t >= 0 and is_number(b) and abs(b) <= 100 for t, b in bias.items()),
                "numbers between -100 and 100, by token id",
            ),
            ("logprobs", is_count_or_none(self.logprobs), "0 or more"),
            ("prompt_logprobs", is_count_or_none(self.prompt_logprobs), "0 or more"),
            ("stop", all(isinstance(s, str) and s for s in stop), "non-empty strings"),
            ("stop_token_ids", all(is_integer(t) and t >= 0 for t in self.stop_token_ids), "token ids of 0 or more"),
            (
                "kv_budget",
                self.kv_budget is None or is_integer(self.kv_budget) or isinstance(self.kv_budget, CacheBudget),
                "a whole number of cache entries",
            ),
            (
                "structured_outputs",
                self.structured_outputs is None or isinstance(self.structured_outputs, StructuredOutputs),
                "StructuredOutputs",
            ),
            ("forced", all(is_integer(t) and t >= 0 for t in self.forced), "token ids of 0 or more"),
        ]
        for name, valid, allowed in checks:
            if not valid:
                raise RequestError(f"sampling: {name} is {getattr(self, name)!r}; it must be {allowed}")

        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"sampling: min_tokens is {self.min_tokens}; it must be at most max_tokens ({self.max_tokens})"
            )
        if len(self.forced) > self.max_tokens:
            raise RequestError(
                f"sampling: {len(self.forced)} forced tokens are more than max_tokens ({self.max_tokens}); "
                "they count as output"
            )
        if self.forced and self.structured_outputs is not None:
            raise RequestError("sampling: forced tokens may not fit structured_outputs; give one of them")

    @property
    def plain_greedy(self) -> bool:
        """Whether the next token is simply the largest logit that is allowed: no draw, penalty or log-probabilities."""
        no_penalty = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) == (0.0, 0.0, 1.0)
        any_token = not self.logit_bias and (not self.min_tokens or self.structured_outputs is not None)
        return self.temperature == 0 and no_penalty and any_token and self.logprobs is None

"""What a user can set: the cache budget, the engine and the sampling of one request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, TypeGuard, get_args

from snapstream.errors import ConfigurationError, RequestError

Pooling = Literal["avg", "max"]
Normalize = Literal["all", "candidates"]
Ring = Literal["elastic", "paper"]
Selection = Literal["votes", "random"]
Preset = Literal["full", "streaming", "sage-kv", "snapstream", "random"]

MIN_CAPACITY = 16
WINDOW = 32
"""Voters of a cache of 128 entries or more. Every host keeps at least this number of queries, whatever its own policy
needs, so that a request may ask for any cache that is no larger than the host's."""
_FRACTIONS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


@dataclass(frozen=True)
class CacheBudget:
    """How many KV entries one sequence may hold, and how they are chosen.

    A cache has ``sink + recent + top_k`` entries per layer and KV head. Most users want
    :meth:`of`, which derives every field from one number.

    Attributes:
        sink: First tokens of the prompt, always kept (``S``).
        recent: Last tokens of the prompt that are kept, and the least length of the ring of recent tokens (``R``).
        top_k: Prompt tokens between sinks and recent ones that are kept by vote (``K``).
        window: Last prompt tokens whose queries vote (``W``, the paper's ``L_obs``); at most ``recent``, so that
            every voter sees every candidate.
        pooling: How votes are smoothed along the sequence, so that neighbours of a winner are kept with it.
        kernel: Odd width of that smoothing; 1 switches it off.
        normalize: ``all``: the voters' softmax runs over the whole prompt (listing 6 of the paper, SnapKV's code);
            ``candidates``: over the evictable tokens only (equation 3).
        ring: ``elastic``: entries that top-K does not need make the ring longer, nothing is lost before the cache is
            full; ``paper``: the ring always has ``recent`` entries.
        selection: ``votes``, or ``random`` as a baseline at equal budget.
        seed: Seed of ``random`` selection; unused otherwise.
    """

    sink: int
    recent: int
    top_k: int
    window: int = 32
    pooling: Pooling = "avg"
    kernel: int = 7
    normalize: Normalize = "all"
    ring: Ring = "elastic"
    selection: Selection = "votes"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigurationError: A field, or a combination, that cannot work; the message says what to change.
        """
        for name in ("sink", "recent", "top_k", "window", "kernel", "seed"):
            _require_integer(f"cache budget: {name}", getattr(self, name))
        for name in ("sink", "top_k"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"cache budget: {name} is {getattr(self, name)}; it must be 0 or more")
        for name, allowed in (("pooling", Pooling), ("normalize", Normalize), ("ring", Ring), ("selection", Selection)):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigurationError(
                    f"cache budget: {name} is {getattr(self, name)!r}; allowed: {', '.join(get_args(allowed))}"
                )
        if self.window < 1:
            raise ConfigurationError(f"cache budget: window is {self.window}; at least one token must vote")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigurationError(f"cache budget: kernel is {self.kernel}; use an odd number, or 1 for no pooling")
        if self.window > self.recent:
            raise ConfigurationError(
                f"cache budget: window ({self.window}) is larger than recent ({self.recent}); "
                f"raise recent to at least {self.window} or lower the window"
            )
        if self.capacity < MIN_CAPACITY:
            raise ConfigurationError(
                f"cache budget: {self.capacity} entries (sink {self.sink} + recent {self.recent} + top_k {self.top_k}) "
                f"are too few to be useful; give at least {MIN_CAPACITY}"
            )

    @property
    def capacity(self) -> int:
        """Entries per layer and KV head (``C``)."""
        return self.sink + self.recent + self.top_k

    @classmethod
    def of(cls, capacity: int) -> CacheBudget:
        """SnapStream with the settings that were found best for a cache of ``capacity`` entries.

        Four sinks, a quarter of the cache for recent tokens, the rest for voted ones; 32 voters; votes averaged over
        seven neighbours; an elastic ring. Below 128 entries the share of recent tokens grows to three eighths, and a
        quarter of the entries is the number of voters.

        Why (docs/accuracy.md, right answers in points on the shipped model at 1/8 and 1/16 of the prompt, with 95 %
        intervals): a ring of an eighth loses 9 (6 to 12), of a half 4 (2 to 6), because a question must fit into it and
        what is voted needs the rest; windows of 16 to 32 are alike, 64 and 8 lose 7 to 12; no pooling loses 45, three
        neighbours 5, fifteen 10; average or max pooling, and either normalisation, make no difference that could
        be told; the paper's ring of fixed length loses 8 to 10 where fewer tokens are decoded than the elastic ring
        holds, and nothing later. With 64 entries, 24 recent tokens and 16 voters are 23 (16 to 30) better than 32 and
        32.
        """
        return cls.preset("snapstream", capacity)

    @classmethod
    def preset(cls, name: Preset, capacity: int) -> CacheBudget:
        """A named policy with ``capacity`` entries.

        Args:
            name: ``full`` (nothing is dropped while the sequence fits ``capacity``), ``streaming`` (StreamingLLM:
                sinks and recent tokens only), ``sage-kv`` (only the last token votes), ``snapstream``, or ``random``
                (a random choice in place of the voted one).
            capacity: Entries per layer and KV head.

        Raises:
            ConfigurationError: An unknown name or too small a capacity.
        """
        if name not in get_args(Preset):
            raise ConfigurationError(f"unknown policy {name!r}; allowed: {', '.join(get_args(Preset))}")
        _require_integer("cache budget", capacity)
        if capacity < MIN_CAPACITY:
            raise ConfigurationError(
                f"cache budget: {capacity} entries are too few to be useful; give at least {MIN_CAPACITY}"
            )
        sink = 4
        if name in ("full", "streaming"):
            return cls(sink=sink, recent=capacity - sink, top_k=0, window=1)
        # Below 128 entries a quarter is too short for a question, and 32 voters ask for more than there is room for.
        recent = max(capacity // 4, min(32, capacity * 3 // 8))
        window = min(WINDOW, capacity // 4)
        budget = cls(sink=sink, recent=recent, top_k=capacity - sink - recent, window=window)
        if name == "sage-kv":
            return replace(budget, window=1)
        return replace(budget, selection="random") if name == "random" else budget

    @classmethod
    def parse(cls, value: CacheBudget | int | str | Mapping[str, Any]) -> CacheBudget:
        """Read a budget from a number, a JSON object (text or mapping), or a budget.

        Raises:
            ConfigurationError: Not one of these, or unknown fields, which are named.
        """
        if isinstance(value, CacheBudget):
            return value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError:
                raise ConfigurationError(
                    f"cache budget: {value!r} is neither a number of entries nor a JSON object"
                ) from None
        if isinstance(value, int) and not isinstance(value, bool):
            return cls.of(value)
        if not isinstance(value, Mapping):
            raise ConfigurationError(f"cache budget: {value!r} is neither a number of entries nor a JSON object")
        given = dict(value)
        known = {field.name for field in fields(cls)}
        capacity, policy = given.pop("capacity", None), given.pop("policy", "snapstream")
        unknown = sorted(set(given) - known)
        if unknown:
            allowed = ", ".join(sorted(known | {"capacity", "policy"}))
            raise ConfigurationError(f"cache budget: unknown field {', '.join(unknown)}; allowed: {allowed}")
        if capacity is not None:
            return cls._with_capacity(policy, capacity, given)
        missing = sorted({"sink", "recent", "top_k"} - set(given))
        if missing:
            raise ConfigurationError(f"cache budget: {', '.join(missing)} missing; give them, or give capacity")
        return cls(**given)

    @classmethod
    def _with_capacity(cls, policy: Preset, capacity: int, given: dict[str, Any]) -> CacheBudget:
        """A preset with some fields set by hand; what they leave of the capacity goes to the part not given."""
        preset = cls.preset(policy, capacity)
        sizes = {name: given.get(name, getattr(preset, name)) for name in ("sink", "recent", "top_k")}
        spare = "recent" if preset.top_k == 0 and "recent" not in given else "top_k"
        for name, size in sizes.items():
            _require_integer(f"cache budget: {name}", size)
        if spare not in given:
            sizes[spare] += capacity - sum(sizes.values())
        budget = replace(preset, **(given | sizes))
        if budget.capacity != capacity:
            raise ConfigurationError(
                f"cache budget: sink {budget.sink} + recent {budget.recent} + top_k {budget.top_k} are "
                f"{budget.capacity} entries, but capacity is {capacity}; leave one of them out"
            )
        return budget

    def resized(self, capacity: int) -> CacheBudget:
        """The same policy with ``capacity`` entries: the ring keeps its share, and at least the window.

        Raises:
            ConfigurationError: The capacity cannot hold the sinks and the window.
        """
        if capacity == self.capacity:
            return self
        least = max(self.sink + self.window, MIN_CAPACITY)
        if capacity < least:
            raise ConfigurationError(
                f"cache budget: {capacity} entries cannot hold {self.sink} sinks and a window of {self.window}; "
                f"give at least {least}"
            )
        if self.top_k == 0:
            return replace(self, recent=capacity - self.sink)
        recent = max(self.window, min(capacity - self.sink, self.recent * capacity // self.capacity))
        return replace(self, recent=recent, top_k=capacity - self.sink - recent)

    @property
    def queries(self) -> int:
        """Last queries of a prompt that a host with this budget keeps: its own voters, and any request's."""
        return max(self.window, WINDOW)

    def for_request(self, asked: int | CacheBudget | None) -> CacheBudget:
        """The cache of a request, where this is the host's.

        Args:
            asked: ``None`` is the host's own cache. A number is :meth:`of` that number, whatever the host's policy is,
                so that it means the same cache everywhere.

        Raises:
            RequestError: No cache, one with more entries than the host's, or more voters than queries are kept.
        """
        if asked is None:
            return self
        if not isinstance(asked, CacheBudget):
            if not _is_integer(asked):
                raise RequestError(f"kv_budget is {asked!r}; it must be a whole number of cache entries")
            try:
                asked = CacheBudget.of(asked)
            except ConfigurationError as error:
                raise RequestError(f"kv_budget: {error}") from error
        if asked.capacity > self.capacity:
            raise RequestError(
                f"kv_budget is {asked.capacity}; a cache has {self.capacity} entries here, give at most that"
            )
        if asked.top_k and asked.selection == "votes" and asked.window > self.queries:
            raise RequestError(
                f"kv_budget: its window is {asked.window}, but {self.queries} queries are kept here; give at most that"
            )
        return asked

    def same_policy(self, other: CacheBudget) -> bool:
        """Whether two caches choose alike, however many entries each part of them has."""
        names = ("sink", "window", "pooling", "kernel", "normalize", "selection", "seed")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def as_dict(self) -> dict[str, Any]:
        """Fields as plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when to stop.

    Attributes:
        max_tokens: Most tokens to generate; 0 reads the prompt and generates nothing.
        min_tokens: Tokens to generate before an end token, a stop token or a stop string may end the output.
        temperature: 0 is greedy: always the most likely token.
        top_k: Sample among the ``top_k`` most likely tokens; 0 means all.
        top_p: Sample among the fewest tokens whose probabilities reach ``top_p``.
        min_p: Drop tokens less likely than ``min_p`` times the most likely one.
        seed: Makes sampling repeatable, whatever else is in the batch; ``None`` draws a seed.
        presence_penalty: Subtracted from the logit of every token generated before.
        frequency_penalty: Subtracted once per earlier occurrence among the generated tokens.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
        logit_bias: Added to the logits of these tokens, by token id; between -100 and 100.
        logprobs: Report the log-probability of each chosen token and of this many most likely ones; ``None`` is off.
        prompt_logprobs: The same of the prompt's tokens. They come from prefill, which sees the whole prompt, so they
            do not depend on the cache budget.
        stop: Strings that end the output; they are not part of it.
        stop_token_ids: Tokens that end the output, besides the model's own.
        ignore_eos: Go on past the model's end-of-sequence token.
        skip_special_tokens: Leave tokens that are no text, such as those of a chat template, out of the output's text.
        kv_budget: The cache of this request, at most as large as the engine's: a number of entries, which is
            :meth:`CacheBudget.of` that number, or a :class:`CacheBudget`; ``None`` means the engine's.
        forced: Tokens the output begins with, whatever the model would say. They are decoded like generated ones, so
            they find the prompt compressed; they count as output, and nothing in them ends it.
        telemetry: Report which prompt tokens were kept and how much attention they had; costs a second scoring.
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
    forced: tuple[int, ...] = ()
    telemetry: bool = False

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            RequestError: A value that is not allowed.
        """
        for name in ("stop", "stop_token_ids", "forced"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str | list | tuple | set | frozenset):
                raise RequestError(f"sampling: {name} is {value!r}; it must be a list")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "forced", tuple(self.forced or ()))
        bias = self.logit_bias
        if not isinstance(bias, Mapping):
            raise RequestError(f"sampling: logit_bias is {bias!r}; it must map token ids to numbers")
        for name in _FRACTIONS:
            value = getattr(self, name)
            if not _is_number(value):
                raise RequestError(f"sampling: {name} is {value!r}; it must be a number")
        checks: list[tuple[str, bool, str]] = [
            ("max_tokens", _is_integer(self.max_tokens) and self.max_tokens >= 0, "a whole number of 0 or more"),
            ("min_tokens", _is_integer(self.min_tokens) and self.min_tokens >= 0, "a whole number of 0 or more"),
            ("temperature", 0 <= self.temperature <= 100, "between 0 and 100"),
            ("top_k", _is_integer(self.top_k) and self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("presence_penalty", abs(self.presence_penalty) <= 2, "between -2 and 2"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 2, "between -2 and 2"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 100, "above 0 and at most 100"),
            ("seed", self.seed is None or _is_integer(self.seed), "a whole number, or none"),
            (
                "logit_bias",
                all(_is_integer(t) and t >= 0 and _is_number(b) and abs(b) <= 100 for t, b in bias.items()),
                "numbers between -100 and 100, by token id",
            ),
            ("logprobs", _is_count_or_none(self.logprobs), "0 or more"),
            ("prompt_logprobs", _is_count_or_none(self.prompt_logprobs), "0 or more"),
            ("stop", all(isinstance(s, str) and s for s in stop), "non-empty strings"),
            ("stop_token_ids", all(_is_integer(t) and t >= 0 for t in self.stop_token_ids), "token ids of 0 or more"),
            (
                "kv_budget",
                self.kv_budget is None or _is_integer(self.kv_budget) or isinstance(self.kv_budget, CacheBudget),
                "a whole number of cache entries",
            ),
            ("forced", all(_is_integer(t) and t >= 0 for t in self.forced), "token ids of 0 or more"),
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

    @property
    def plain_greedy(self) -> bool:
        """Whether the next token is just the largest logit: nothing to draw, forbid, penalise or report."""
        no_penalty = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) == (0.0, 0.0, 1.0)
        any_token = not self.logit_bias and not self.min_tokens
        return self.temperature == 0 and no_penalty and any_token and self.logprobs is None


@dataclass(frozen=True)
class EngineConfig:
    """How the built-in engine runs.

    Attributes:
        max_model_len: Longest prompt plus output of one request, in tokens; the staging cache of prefill has this
            length. ``None`` means what the model was trained for.
        slots: Sequences decoded at a time.
        prefill_chunk: Prompt tokens per prefill launch; decoding waits for one such chunk at most.
        decode_steps: Tokens decoded per launch; more means fewer host round trips and later stops.
        dtype: ``auto`` (the checkpoint's), ``float32``, ``bfloat16`` or ``float16``.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        attention: ``auto``, or a backend by name (see :mod:`snapstream.attention`).
        enforce_eager: Do not compile the graphs; slower, starts at once.
        sessions: Conversations whose compressed cache may be kept between turns, see
            :meth:`snapstream.engine.engine.Engine.add_request`; memory is planned for so many.
        max_logprobs: Most alternatives a request may ask for with ``logprobs``; a fixed shape of the sampling graph.
        memory_fraction: Share of the device's free memory the engine may plan with.
    """

    max_model_len: int | None = None
    slots: int = 4
    prefill_chunk: int = 512
    decode_steps: int = 4
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    enforce_eager: bool = False
    sessions: int = 0
    max_logprobs: int = 20
    memory_fraction: float = 0.9

    def __post_init__(self) -> None:
        """Check every field that needs no model.

        Raises:
            ConfigurationError: A value that is not allowed.
        """
        for name in ("slots", "prefill_chunk", "decode_steps", "max_logprobs"):
            _require_integer(f"engine: {name}", getattr(self, name))
            if getattr(self, name) < 1:
                raise ConfigurationError(f"engine: {name} is {getattr(self, name)}; it must be 1 or more")
        _require_integer("engine: sessions", self.sessions)
        if self.sessions < 0:
            raise ConfigurationError(f"engine: sessions is {self.sessions}; it must be 0 or more")
        if self.max_model_len is not None:
            _require_integer("engine: max_model_len", self.max_model_len)
            if self.max_model_len < MIN_CAPACITY:
                raise ConfigurationError(
                    f"engine: max_model_len is {self.max_model_len}; it must be {MIN_CAPACITY} or more"
                )
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigurationError(f"engine: dtype is {self.dtype!r}; allowed: auto, float32, bfloat16, float16")
        if not isinstance(self.memory_fraction, int | float) or not 0 < self.memory_fraction <= 1:
            raise ConfigurationError(
                f"engine: memory_fraction is {self.memory_fraction}; it must be above 0 and at most 1"
            )


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count_or_none(value: object) -> bool:
    return value is None or (_is_integer(value) and value >= 0)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_integer(what: str, value: object) -> None:
    if not _is_integer(value):
        raise ConfigurationError(f"{what} is {value!r}; it must be a whole number")

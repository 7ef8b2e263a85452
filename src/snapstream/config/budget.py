"""The cache budget: how many KV cache entries one sequence may hold, and how they are selected."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from snapstream.config.checks import is_integer, require_count, require_integer
from snapstream.config.pins import Span, read_spans
from snapstream.config.policy import (
    ALL,
    DEFAULT_POLICY,
    KEPT_QUERIES,
    Policy,
    enough_queries,
    make_policy,
    most_queries,
    policy_class,
)
from snapstream.errors import ConfigurationError, RequestError

Ring = Literal["elastic", "paper", "resnap"]

MIN_CAPACITY = 16
LEAST_RENEWED = 6
"""Minimum ``recent`` for ``ring="resnap"``. A cache of 16 entries has as many, and half of them can be taken back."""
_SIZES = ("sink", "recent", "top_k")
_SELECTIONS = ("votes", "random")


@dataclass(frozen=True, init=False)
class CacheBudget:
    """How many KV cache entries one sequence may hold, and how they are selected.

    A cache has ``sink + recent + top_k`` entries per layer and KV head. Most users want :meth:`of`, which derives every
    field from one number.

    Attributes:
        sink: First tokens of the prompt, which are always kept (``S``).
        recent: Last tokens of the prompt that are kept in addition to the selected ones, and the minimum length of the
            ring of recent tokens (``R``).
        top_k: Prompt tokens that the policy selects (``K``): between sinks and recent tokens or, if it
            :attr:`~Policy.pins_recent`, among all tokens after the sinks.
        ring: ``elastic``: entries that the prompt does not need extend the ring, so nothing is dropped before the cache
            is full. ``paper``: the ring always has ``recent`` entries. ``resnap``: like ``elastic``, and about once per
            turn of the ring, its entries compete for a quarter of the pinned places (built-in engine only).
        policy: Selects the ``top_k`` tokens; has settings of its own (:mod:`snapstream.compression.policies`).
        pin: Spans of the prompt that are kept whatever the policy says, as many as fit into half of the ``top_k``
            places; see :mod:`snapstream.compression.pins`.
    """

    sink: int
    recent: int
    top_k: int
    ring: Ring
    policy: Policy
    pin: tuple[Span, ...]

    def __init__(
        self,
        sink: int,
        recent: int,
        top_k: int,
        *,
        ring: Ring = "elastic",
        policy: Policy | str | None = None,
        pin: Iterable[Span | str] = (),
        **settings: Any,
    ) -> None:
        """Check every field.

        Args:
            sink: See the class.
            recent: See the class.
            top_k: See the class.
            ring: See the class.
            policy: A policy or its name; by default ``spans``.
            pin: See the class.
            **settings: Settings that override the policy's own. Those of other built-in policies are ignored, and so is
                ``None``. ``selection="random"`` replaces any policy that selects tokens by ``random``, and ``"votes"``
                replaces ``random`` by the default policy.

        Raises:
            ConfigurationError: A field or a combination of fields is invalid; the message says what to change.
        """
        given = {name: value for name, value in settings.items() if value is not None}
        selection = given.pop("selection", None)
        if selection is not None and selection not in _SELECTIONS:
            raise ConfigurationError(f"cache budget: selection is {selection!r}; allowed: {', '.join(_SELECTIONS)}")
        values = {"sink": sink, "recent": recent, "top_k": top_k, "ring": ring}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "policy", _policy_with(policy, selection, given))
        object.__setattr__(self, "pin", read_spans(pin))
        self._check()

    def _check(self) -> None:
        for name in _SIZES:
            require_integer(f"cache budget: {name}", getattr(self, name))
        for name in ("sink", "top_k"):
            require_count(f"cache budget: {name}", getattr(self, name))
        if self.ring not in get_args(Ring):
            raise ConfigurationError(f"cache budget: ring is {self.ring!r}; allowed: {', '.join(get_args(Ring))}")
        if self.ring == "resnap" and (self.recent < LEAST_RENEWED or self.top_k < 4):
            raise ConfigurationError(
                f"cache budget: recent is {self.recent} and top_k {self.top_k}; ring='resnap' needs recent of at least "
                f"{LEAST_RENEWED} and top_k of at least 4"
            )
        if self.recent < 1:
            raise ConfigurationError(f"cache budget: recent is {self.recent}; it must be 1 or more")
        if self.capacity < MIN_CAPACITY:
            raise ConfigurationError(
                f"cache budget: {self.capacity} entries (sink {self.sink} + recent {self.recent} + top_k {self.top_k}) "
                f"are too few to be useful; give at least {MIN_CAPACITY}"
            )

    def require_fixed_places(self, host: str) -> None:
        """Check that pinned places are assigned once, for a host that cannot move entries later.

        Raises:
            ConfigurationError: The ring is ``resnap``, which assigns them again.
        """
        if self.ring == "resnap":
            raise ConfigurationError(f"cache budget: ring='resnap' works in the built-in engine, not in {host}")

    @property
    def fixed(self) -> int:
        """Entries of a compressed prompt that are never overwritten: sinks and pinned entries (``S + K``).

        With ``ring="resnap"``, only three quarters of the pinned places count. The rest is reassigned again and again
        during decoding.
        """
        return self.sink + self.top_k - (self.top_k // 4 if self.ring == "resnap" else 0)

    @property
    def window(self) -> int:
        """Last tokens of a prompt whose queries vote; at least 1."""
        return max(1, self.policy.queries)

    @property
    def capacity(self) -> int:
        """Entries per layer and KV head (``C``)."""
        return self.sink + self.recent + self.top_k

    @classmethod
    def of(cls, capacity: int) -> CacheBudget:
        """Derive a budget of ``capacity`` entries with the default policy ``spans``, whose settings did best in tests.

        The cache has four sinks and an elastic ring. An eighth of it is for recent tokens, the rest for selected ones.
        A cache of fewer than 256 entries has 32 recent tokens, but at most three eighths of its entries.
        docs/experiments.md describes the measurements. The paper's rule is the preset ``snapstream``.
        """
        return cls.preset(DEFAULT_POLICY, capacity)

    @classmethod
    def preset(cls, name: str, capacity: int) -> CacheBudget:
        """Derive a budget of ``capacity`` entries for a named policy, with suitable settings.

        Args:
            name: ``spans`` (the default: votes for tokens and for spans, and some keys), ``snapstream`` (the
                paper's rule: a window votes), ``sage-kv`` (only the last token votes), ``keydiff`` (keys that differ
                from all others), ``local-keydiff`` (keys that differ from their neighbors), ``multiscale-keydiff``
                (both; the default for contexts), ``mixed`` (votes and such keys), ``streaming`` (StreamingLLM: sinks
                and recent tokens only), ``full`` (nothing is dropped while the sequence fits into ``capacity``),
                ``random`` (random selection), or the name of a policy from another package.
            capacity: Entries per layer and KV head.

        Raises:
            ConfigurationError: The name is unknown, or the capacity is too small.
        """
        kind = policy_class(name)
        require_integer("cache budget", capacity)
        if capacity < MIN_CAPACITY:
            raise ConfigurationError(
                f"cache budget: {capacity} entries are too few to be useful; give at least {MIN_CAPACITY}"
            )
        return cls(*kind.parts(capacity), policy=kind.sized(capacity))

    @classmethod
    def parse(cls, value: CacheBudget | int | str | Mapping[str, Any]) -> CacheBudget:
        """Read a budget from a number, a JSON object (as text or mapping), or a budget, which is returned unchanged.

        Raises:
            ConfigurationError: It is of another type, or has unknown fields; the message names them.
        """
        if isinstance(value, CacheBudget):
            return value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):  # not JSON, or thousands of digits, or thousands of nested brackets
                raise ConfigurationError(
                    f"cache budget: {value!r:.100} is neither a number of entries nor a JSON object"
                ) from None
        if isinstance(value, int) and not isinstance(value, bool):
            return cls.of(value)
        if not isinstance(value, Mapping):
            raise ConfigurationError(f"cache budget: {value!r} is neither a number of entries nor a JSON object")
        given = dict(value)
        name = given.pop("policy", DEFAULT_POLICY)
        if not isinstance(name, str):
            raise ConfigurationError(f"cache budget: policy is {name!r}; give its name")
        capacity = given.pop("capacity", None)
        kind = policy_class(name)
        known = {*_SIZES, "ring", "pin", "selection", *_SETTINGS, *(one.name for one in fields(kind))}  # type: ignore[arg-type]
        unknown = sorted(set(given) - known)
        if unknown:
            allowed = ", ".join(sorted(known | {"capacity", "policy"}))
            raise ConfigurationError(f"cache budget: unknown field {', '.join(unknown)}; allowed: {allowed}")
        settings = {key: given.pop(key) for key in list(given) if key not in (*_SIZES, "ring", "pin", "selection")}
        if capacity is None:
            missing = sorted(set(_SIZES) - set(given))
            if missing:
                raise ConfigurationError(f"cache budget: {', '.join(missing)} missing; give them, or give capacity")
            policy = _policy_with(name, given.pop("selection", None), settings)
            return cls(**given, policy=policy)
        return cls._with_capacity(name, capacity, given, settings)

    @classmethod
    def _with_capacity(cls, name: str, capacity: int, given: dict[str, Any], settings: dict[str, Any]) -> CacheBudget:
        """Override some fields of a preset. The rest of the capacity goes to ``top_k``, if that is not given.

        If the preset selects no tokens, the rest goes to ``recent`` instead.
        """
        preset = cls.preset(name, capacity)
        sizes = {part: given.get(part, getattr(preset, part)) for part in _SIZES}
        spare = "recent" if preset.top_k == 0 and "recent" not in given else "top_k"
        for part, size in sizes.items():
            require_integer(f"cache budget: {part}", size)
        if spare not in given:
            sizes[spare] += capacity - sum(sizes.values())
        policy = _policy_with(preset.policy, given.pop("selection", None), settings)
        budget = cls(**(given | sizes), policy=policy)
        if budget.capacity != capacity:
            raise ConfigurationError(
                f"cache budget: sink {budget.sink} + recent {budget.recent} + top_k {budget.top_k} are "
                f"{budget.capacity} entries, but capacity is {capacity}; leave one of them out"
            )
        return budget

    def resized(self, capacity: int) -> CacheBudget:
        """Scale the budget to ``capacity`` entries. The ring keeps its share.

        Raises:
            ConfigurationError: The capacity cannot hold the sinks.
        """
        if capacity == self.capacity:
            return self
        least = max(self.sink + 1, MIN_CAPACITY)
        if capacity < least:
            raise ConfigurationError(
                f"cache budget: {capacity} entries are too few for {self.sink} sinks; give at least {least}"
            )
        if self.top_k == 0:
            return replace(self, recent=capacity - self.sink)
        recent = max(1, min(capacity - self.sink, self.recent * capacity // self.capacity))
        return replace(self, recent=recent, top_k=capacity - self.sink - recent)

    @property
    def queries(self) -> int:
        """How many of a prompt's last queries a host with this budget keeps.

        These are the queries that its policy needs, and at least ``KEPT_QUERIES`` for the policies of requests.
        :data:`~snapstream.config.policy.ALL` means all of them.
        """
        return most_queries(self.policy.queries if self.top_k else 0, KEPT_QUERIES)

    def for_request(self, asked: int | CacheBudget | None, kept_queries: int = 0) -> CacheBudget:
        """Derive the budget of a request, where this is the host's budget.

        Args:
            asked: The request's own budget; ``None`` means the host's. A number means :meth:`of` that number, whatever
                the host's policy, so the same number means the same cache on every host.
            kept_queries: Minimum number of queries that the host keeps, if this is more than the budget needs.

        Raises:
            RequestError: The request's budget is invalid, has more entries than the host's, or needs more queries than
                the host keeps.
        """
        if asked is None:
            return self
        if not isinstance(asked, CacheBudget):
            if not is_integer(asked):
                raise RequestError(f"kv_budget is {asked!r}; it must be a whole number of cache entries")
            try:
                asked = CacheBudget.of(asked)
            except ConfigurationError as error:
                raise RequestError(f"kv_budget: {error}") from error
        if asked.capacity > self.capacity:
            raise RequestError(
                f"kv_budget is {asked.capacity}; a cache has {self.capacity} entries here, give at most that"
            )
        needed = asked.policy.queries
        kept = most_queries(self.queries, kept_queries)
        if asked.top_k and not enough_queries(needed, kept):
            wants = "its policy needs all queries" if needed == ALL else f"its window is {needed}"
            raise RequestError(
                f"kv_budget: {wants}, but {kept} queries are kept here; give at most that, or create the engine with "
                "more kept_queries"
            )
        return asked

    def for_context(self, asked: int | CacheBudget | None = None, kept_queries: int = 0) -> CacheBudget:
        """Derive the budget of a context: a text that is stored before any question is known.

        Like :meth:`for_request`, but with the policy's variant :attr:`for contexts <Policy.for_contexts>`. If ``asked``
        is a :class:`CacheBudget`, its policy is used unchanged.

        Raises:
            RequestError: As for :meth:`for_request`.
        """
        budget = self.for_request(asked, kept_queries)
        return budget if isinstance(asked, CacheBudget) else replace(budget, policy=budget.policy.for_contexts)

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON; :meth:`parse` reads them."""
        sizes = {name: getattr(self, name) for name in (*_SIZES, "ring")}
        pins = {"pin": [list(span) for span in self.pin]} if self.pin else {}
        return sizes | pins | {"policy": self.policy.name} | self.policy.settings()


_SETTINGS = (
    *("window", "pooling", "kernel", "normalize", "seed", "key_kernel", "near"),
    *("span", "shift", "voters", "key_turns", "whole_kernel"),
)
"""Settings of built-in policies that a budget itself accepts. A policy that lacks one of them ignores it, so a sweep
over ``window`` can include random selection."""


def _policy_with(policy: Policy | str | None, selection: str | None, settings: dict[str, Any]) -> Policy:
    """Build a policy with some settings changed; ``selection`` may replace it, see :class:`CacheBudget`."""
    if policy is None:
        policy = DEFAULT_POLICY
    kind = policy_class(policy) if isinstance(policy, str) else policy
    if selection == "random" and kind.pins:
        policy = "random"
    elif selection == "votes" and kind.name == "random":
        policy = DEFAULT_POLICY
    own = {one.name for one in fields(policy_class(policy) if isinstance(policy, str) else policy)}  # type: ignore[arg-type]
    changed = {key: value for key, value in settings.items() if key in own or key not in _SETTINGS}
    if isinstance(policy, str):
        return make_policy(policy, changed)
    if unknown := sorted(set(changed) - own):
        allowed = ", ".join(sorted(own | set(_SETTINGS)))
        raise ConfigurationError(f"cache budget: unknown setting {', '.join(unknown)}; allowed: {allowed}")
    return replace(policy, **changed) if changed else policy  # type: ignore[type-var]

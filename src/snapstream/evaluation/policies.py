"""What is compared: a cache policy, its size as a number of entries or a share of the prompt, and its settings."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from snapstream.config import DEFAULT_POLICY, MIN_CAPACITY, CacheBudget
from snapstream.errors import ConfigurationError
from snapstream.sizes import is_share, parse_share, parse_tokens

ENGINE_POLICIES = (
    "full",
    "truncated",
    "streaming",
    "sage-kv",
    "random",
    "keydiff",
    "local-keydiff",
    "multiscale-keydiff",
    "snapstream",
    "mixed",
    "spans",
)
ENDPOINT_POLICIES = ("served", "truncated", DEFAULT_POLICY)
UNSIZED = ("full", "served")
"""Policies without a size: a full cache, and an endpoint's own cache."""

_SWEPT: dict[str, type] = {
    "window": int,
    "kernel": int,
    "key_kernel": int,
    "near": int,
    "span": int,
    "shift": int,
    "voters": int,
    "key_turns": int,
    "recent": str,
    "sink": int,
    "pooling": str,
    "normalize": str,
    "ring": str,
}


@dataclass(frozen=True)
class Variant:
    """One column of a comparison.

    Attributes:
        policy: One of :data:`ENGINE_POLICIES` or :data:`ENDPOINT_POLICIES`, or what another package has registered.
        size: Entries (``512``) or a share of the prompt's length (``1/4``), as it was given; empty for ``UNSIZED``.
        settings: Fields of :class:`CacheBudget` that differ from the policy's defaults; ``recent`` may be a share of
            the entries.
    """

    policy: str
    size: str = ""
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """The policy with its settings, without its size."""
        return label_of(self.policy, self.settings)

    def entries(self, length: int) -> int | None:
        """Cache entries for prompts of ``length`` tokens; ``None`` if unsized."""
        return None if self.policy in UNSIZED else entries_of(self.size, length)

    def budget(self, length: int) -> CacheBudget | None:
        """The cache of prompts of ``length`` tokens; ``None`` for a full one.

        Raises:
            ConfigurationError: The settings are invalid at this size.
        """
        entries = self.entries(length)
        if entries is None or self.policy == "truncated":
            return None
        fields: dict[str, Any] = {"capacity": entries, "policy": self.policy}
        for name, value in self.settings:
            if name == "recent":
                fields[name] = entries_of(value, entries)
            else:
                fields[name] = _SWEPT[name](value)
        return CacheBudget.parse(fields)


def label_of(policy: str, settings: Iterable[tuple[str, str]]) -> str:
    """A policy with its settings: ``snapstream window=8``."""
    return " ".join([policy, *(f"{name}={value}" for name, value in settings)])


def entries_of(size: str, whole: int) -> int:
    """A number of entries from ``512`` or from a share of ``whole`` such as ``1/4``."""
    return int(Fraction(size) * whole) if is_share(size) else int(size)


def parse_lengths(text: str) -> list[int]:
    """Numbers of tokens from ``512,4k`` (``k`` is 1024).

    Raises:
        ConfigurationError: One is not a positive number.
    """
    return [parse_tokens(item, "lengths") for item in split_names(text, "lengths")]


def parse_sizes(text: str) -> list[str]:
    """Cache sizes from ``512,2k,1/4``: numbers of entries, or shares of the prompt's length below 1.

    Raises:
        ConfigurationError: One is neither.
    """
    sizes = []
    for item in split_names(text, "budgets"):
        sizes.append(str(parse_share(item, "budgets") if is_share(item) else parse_tokens(item, "budgets")))
    return sizes


def parse_sweeps(texts: Sequence[str]) -> list[tuple[tuple[str, str], ...]]:
    """Every combination of ``window=8,32`` and ``pooling=avg,max``; one empty combination if nothing is swept.

    Raises:
        ConfigurationError: A setting is unknown, or a value does not have its type.
    """
    axes: list[list[tuple[str, str]]] = []
    for text in texts:
        name, _, values = text.partition("=")
        if name not in _SWEPT:
            raise ConfigurationError(f"sweep: unknown setting {name!r}; allowed: {', '.join(_SWEPT)}")
        axis = []
        for value in split_names(values, f"sweep of {name}"):
            if _SWEPT[name] is int and not value.isdecimal():
                raise ConfigurationError(f"sweep: {name}={value!r} is not a whole number")
            axis.append((name, parse_sizes(value)[0] if name == "recent" else value))
        axes.append(axis)
    return list(itertools.product(*axes))


def make_variants(
    policies: Sequence[str], sizes: Sequence[str], sweeps: Sequence[tuple[tuple[str, str], ...]], allowed: Sequence[str]
) -> list[Variant]:
    """Every policy at every size; settings are swept for the policy of :func:`swept_of`.

    Raises:
        ConfigurationError: A policy is not allowed here, or needs a size, but none was given.
    """
    unknown = [policy for policy in policies if policy not in allowed]
    if unknown:
        raise ConfigurationError(f"unknown policy {', '.join(unknown)}; allowed here: {', '.join(allowed)}")
    sized = [policy for policy in policies if policy not in UNSIZED]
    if sized and not sizes:
        raise ConfigurationError(f"policies {', '.join(sized)} need --budgets, such as 1/4,512")
    made = []
    for policy in dict.fromkeys(policies):
        if policy in UNSIZED:
            made.append(Variant(policy))
            continue
        settings = sweeps if policy == swept_of(policies) else [()]
        made += [Variant(policy, size, setting) for size in dict.fromkeys(sizes) for setting in settings]
    return made


def swept_of(policies: Sequence[str]) -> str | None:
    """The policy whose settings are swept: the paper's, or else the default, or else ``mixed``."""
    return next((policy for policy in ("snapstream", DEFAULT_POLICY, "mixed") if policy in policies), None)


LEAST_PROMPT = 64
"""Minimum tokens of a truncated prompt; with fewer, there would be no prompt to speak of."""


def misfit(variant: Variant, length: int, decoded: int, after: int) -> str | None:
    """Why a variant measures nothing at some length, or ``None`` if it does.

    Args:
        variant: The cache.
        length: Tokens of the prompt.
        decoded: Tokens that are decoded, so that the ring wraps around, before anything is scored.
        after: All tokens after the prompt, the answer included.
    """
    entries = variant.entries(length)
    if entries is None:
        return None
    if entries < MIN_CAPACITY:
        return f"fewer than {MIN_CAPACITY} entries"
    if entries >= length + decoded:
        return "no smaller than the prompt" if not decoded else "no smaller than prompt and decoded tokens"
    if variant.policy == "truncated" and entries - after < LEAST_PROMPT:
        return "no room for a prompt"
    return None


def split_names(text: str, what: str) -> list[str]:
    """Names separated by commas.

    Raises:
        ConfigurationError: The list is empty.
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise ConfigurationError(f"{what}: nothing given")
    return items

"""What a method of choosing tokens is, and the methods there are, by name."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from snapstream.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

    from snapstream.compression.layout import LayoutTensors

Pooling = Literal["avg", "max"]
Normalize = Literal["all", "candidates"]

ENTRY_POINTS = "snapstream.policies"
"""Group of entry points in which other packages register policies of their own, by name."""
WINDOW = 32
"""Voters of the paper's rule with 128 entries or more. Every host keeps at least so many queries, whatever its own
policy needs, so that a request may ask for any cache that is no larger than the host's."""
DEFAULT_POLICY = "mixed"
"""What a number of entries means by itself; chosen in docs/experiments.md."""
ALL = -1
"""As :attr:`Policy.queries`: every query of the prompt."""


@dataclass(frozen=True)
class LayerPrompt:
    """One layer of a prompt that has been read, as a policy is shown it.

    Attributes:
        queries: Rotated queries of the last ``Q`` tokens, ``[B, H, Q, D]``; the last row belongs to token
            ``length - 1``. Rows of tokens before ``layout.first_voter`` mean nothing.
        keys: Rotated keys of the padded prompt, ``[B, N, L, D]``; those at ``length`` and beyond mean nothing.
        values: ``[B, N, L, D_v]``; ``None`` unless the policy :attr:`~Policy.needs_values`.
        layout: Length, candidates and parts of each sequence's cache.
        sink: Sinks (``S``); candidates are the tokens ``[S, layout.candidate_end)``.
        scale: Factor on attention's logits, usually ``D ** -0.5``.
        layer: Which layer.
        top_k: Most candidates that are kept; known to :meth:`Policy.smooth`.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor | None
    layout: LayoutTensors
    sink: int
    scale: float
    layer: int | Tensor = 0
    top_k: int = 0


class Policy(ABC):
    """How a method chooses which tokens of a prompt are kept. Subclasses are frozen dataclasses of its settings.

    Attributes:
        name: What users call it.
        needs_values: Whether :meth:`votes` looks at values.
        pins: Whether tokens between sinks and recent ones are kept at all.
        pins_recent: Whether recent tokens may be chosen, too, and so outlive the ring's turns; the ring then holds the
            last of all other tokens.
    """

    name: ClassVar[str]
    needs_values: ClassVar[bool] = False
    pins: ClassVar[bool] = True
    pins_recent: ClassVar[bool] = False

    @classmethod
    def sized(cls, capacity: int) -> Policy:
        """The method with settings that suit a cache of ``capacity`` entries."""
        return cls()

    @classmethod
    def parts(cls, capacity: int) -> tuple[int, int, int]:
        """Sinks, recent and voted tokens that suit a cache of ``capacity`` entries."""
        sink = 4
        if not cls.pins:
            return sink, capacity - sink, 0
        # Where recent tokens that matter are pinned, fewer are needed. In a small cache a question needs more of it.
        recent = max(capacity // (8 if cls.pins_recent else 4), min(32, capacity * 3 // 8))
        return sink, recent, capacity - sink - recent

    @property
    @abstractmethod
    def queries(self) -> int:
        """Last queries of the prompt that it looks at: 0 for none, :data:`ALL` for all."""

    @property
    def for_contexts(self) -> Policy:
        """What takes its place for a text that is stored before anybody knows a question; by default itself."""
        return self

    @abstractmethod
    def votes(self, prompt: LayerPrompt) -> Tensor:
        """How much each token deserves to be kept; a pure function whose shapes do not depend on data.

        Returns:
            float32 ``[B, N, L]``, 0 or more; what is no candidate does not matter. Several kinds of votes, which
            :meth:`smooth` makes one of, may come as ``[V, B, N, L]``.
        """

    def smooth(self, votes: Tensor, prompt: LayerPrompt) -> Tensor:
        """Make scores of votes. A host that spreads the query heads of a KV head over devices joins votes before.

        Args:
            votes: As :meth:`votes` returns them; 0 for what is no candidate.
            prompt: The layer.

        Returns:
            float32 ``[B, N, L]``, 0 or more; equal ones go to the earlier token.
        """
        return votes

    def settings(self) -> dict[str, Any]:
        """The method's fields as plain values."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]


_BUILT_IN = {
    "full": "snapstream.compression.policies.full:Full",
    "streaming": "snapstream.compression.policies.streaming:Streaming",
    "sage-kv": "snapstream.compression.policies.last_token:LastTokenVotes",
    "snapstream": "snapstream.compression.policies.window:WindowVotes",
    "keydiff": "snapstream.compression.policies.keydiff:KeyDifferences",
    "local-keydiff": "snapstream.compression.policies.local_keydiff:LocalKeyDifferences",
    "mixed": "snapstream.compression.policies.mixed:Mixed",
    "random": "snapstream.compression.policies.random:RandomVotes",
}


def policy_names() -> list[str]:
    """Names of all policies, those of other packages included."""
    others = sorted(point.name for point in entry_points(group=ENTRY_POINTS))
    return list(dict.fromkeys([*_BUILT_IN, *others]))


def policy_class(name: str) -> type[Policy]:
    """The policy called ``name``.

    Raises:
        ConfigurationError: There is none, or what another package registered is none.
    """
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        built_in: type[Policy] = getattr(importlib.import_module(module), attribute)
        return built_in
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name:
            try:
                loaded = point.load()
            except Exception as error:  # somebody else's code
                raise ConfigurationError(f"policy {name!r} ({point.value}) could not be loaded: {error}") from error
            if not (isinstance(loaded, type) and issubclass(loaded, Policy)):
                raise ConfigurationError(f"policy {name!r} ({point.value}) is no subclass of snapstream.config.Policy")
            return loaded
    raise ConfigurationError(f"unknown policy {name!r}; allowed: {', '.join(policy_names())}")


def make_policy(name: str, settings: dict[str, Any]) -> Policy:
    """A policy by name.

    Raises:
        ConfigurationError: Unknown, or settings that it does not have.
    """
    kind = policy_class(name)
    known = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ConfigurationError(
            f"cache budget: policy {name} has no {', '.join(unknown)}; its settings: {', '.join(known) or 'none'}"
        )
    return kind(**settings)


def rows_of_queries(needed: int, length: int) -> int:
    """How many last queries of a prompt of ``length`` tokens are kept where ``needed`` are, which may be ALL."""
    return length if needed == ALL else min(needed, length)


def most_queries(*needed: int) -> int:
    """The largest of several numbers of queries, where ALL is more than any."""
    return ALL if ALL in needed else max(needed, default=0)


def enough_queries(needed: int, kept: int) -> bool:
    """Whether a policy that needs so many queries can run where ``kept`` are kept."""
    return (math.inf if needed == ALL else needed) <= (math.inf if kept == ALL else kept)

"""The interface of policies, which select the tokens that compression keeps, and the registry of policies by name."""

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
"""Entry-point group in which other packages register their policies by name."""
WINDOW = 32
"""Window of the paper's rule in caches of 128 entries or more."""
KEPT_QUERIES = 64
"""Every host keeps at least this many of a prompt's last queries, whatever its own policy needs, so that requests can
use other policies."""
DEFAULT_POLICY = "spans"
"""The policy of a budget that is given as a number; docs/experiments.md says why it was chosen."""
ALL = -1
"""Value of :attr:`Policy.queries` that means every query of the prompt."""


SINK = 4
"""Sinks of every policy's preset."""


def split(capacity: int, share: int) -> tuple[int, int, int]:
    """Sinks, recent tokens and selected tokens of a cache of which one entry in ``share`` is for recent tokens.

    At least 32 entries are, as a question takes more of a small cache, but at most three eighths of it.
    """
    recent = max(capacity // share, min(32, capacity * 3 // 8))
    return SINK, recent, capacity - SINK - recent


@dataclass(frozen=True)
class LayerPrompt:
    """One layer of a prefilled prompt, as a policy sees it.

    Attributes:
        queries: Rotated queries of the last ``Q`` tokens, ``[B, H, Q, D]``; the last row belongs to token
            ``length - 1``. Rows of tokens before ``layout.first_voter`` are undefined.
        keys: Rotated keys of the padded prompt, ``[B, N, L, D]``; undefined at ``length`` and beyond.
        values: ``[B, N, L, D_v]``; ``None`` unless the policy :attr:`~Policy.needs_values`.
        layout: Length, candidates and parts of each sequence's cache.
        sink: Sinks (``S``); candidates are the tokens ``[S, layout.candidate_end)``.
        scale: Factor on attention logits, usually ``D ** -0.5``.
        cap: Soft cap of attention logits; 0 for none.
        sinks: One extra logit per head in the softmax, without a value, float32 ``[H]``; ``None`` for none.
        layer: Index of the layer.
        top_k: Number of best candidates whose order matters; set for :meth:`Policy.smooth`.
        pinned: Levels of pinned tokens, int8 ``[B, N or 1, L]``, for the selection; policies need not care. ``None`` if
            there are none.
        pins_compete: Whether there may be more of them than fit.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor | None
    layout: LayoutTensors
    sink: int
    scale: float
    layer: int | Tensor = 0
    top_k: int = 0
    cap: float = 0.0
    sinks: Tensor | None = None
    pinned: Tensor | None = None
    pins_compete: bool = True

    @property
    def attention(self) -> dict[str, Any]:
        """How logits become weights, as arguments of the functions that compute votes."""
        return {"scale": self.scale, "cap": self.cap, "sinks": self.sinks}


class Policy(ABC):
    """Selects the tokens of a prompt that are kept. Subclasses are frozen dataclasses of their settings.

    Attributes:
        name: Name by which users select the policy.
        needs_values: Whether :meth:`votes` needs values.
        pins: Whether tokens between sinks and recent tokens are kept at all.
        pins_recent: Whether recent tokens are candidates too. Selected ones survive when the ring wraps around; the
            ring then holds the last of all other tokens.
    """

    name: ClassVar[str]
    needs_values: ClassVar[bool] = False
    pins: ClassVar[bool] = True
    pins_recent: ClassVar[bool] = False

    @classmethod
    def sized(cls, capacity: int) -> Policy:
        """The policy with suitable settings for a cache of ``capacity`` entries."""
        return cls()

    @classmethod
    def parts(cls, capacity: int) -> tuple[int, int, int]:
        """Suitable numbers of sinks, recent tokens and selected tokens for a cache of ``capacity`` entries."""
        if not cls.pins:
            return SINK, capacity - SINK, 0
        # If important recent tokens are pinned, fewer recent ones are needed.
        return split(capacity, 8 if cls.pins_recent else 4)

    @property
    @abstractmethod
    def queries(self) -> int:
        """How many of the prompt's last queries it needs: 0 for none, :data:`ALL` for all."""

    @property
    def for_contexts(self) -> Policy:
        """The policy to use instead for a context, which is stored before any question is known; by default itself."""
        return self

    @abstractmethod
    def votes(self, prompt: LayerPrompt) -> Tensor:
        """Rate how important it is to keep each token. A pure function whose shapes do not depend on data.

        Returns:
            float32 ``[B, N, L]``, 0 or more; votes for tokens that are not candidates are ignored. ``[V, B, N, L]`` for
            several kinds of votes, which :meth:`smooth` combines.
        """

    def smooth(self, votes: Tensor, prompt: LayerPrompt) -> Tensor:
        """Turn votes into scores.

        A host that splits the query heads of one KV head across devices combines their votes first.

        Args:
            votes: As :meth:`votes` returns them, but 0 for tokens that are not candidates.
            prompt: The layer.

        Returns:
            float32 ``[B, N, L]``, 0 or more. Ties go to the earlier token.
        """
        return votes

    def settings(self) -> dict[str, Any]:
        """The policy's fields as plain values."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]


_BUILT_IN = {
    "full": "snapstream.compression.policies.full:Full",
    "streaming": "snapstream.compression.policies.streaming:Streaming",
    "sage-kv": "snapstream.compression.policies.last_token:LastTokenVotes",
    "snapstream": "snapstream.compression.policies.window:WindowVotes",
    "spans": "snapstream.compression.policies.spans:Spans",
    "keydiff": "snapstream.compression.policies.keydiff:KeyDifferences",
    "local-keydiff": "snapstream.compression.policies.local_keydiff:LocalKeyDifferences",
    "multiscale-keydiff": "snapstream.compression.policies.multiscale_keydiff:MultiscaleKeyDifferences",
    "mixed": "snapstream.compression.policies.mixed:Mixed",
    "random": "snapstream.compression.policies.random:RandomVotes",
}


def policy_names() -> list[str]:
    """Names of all policies, including those of other packages."""
    others = sorted(point.name for point in entry_points(group=ENTRY_POINTS))
    return list(dict.fromkeys([*_BUILT_IN, *others]))


def policy_class(name: str) -> type[Policy]:
    """The class of the policy called ``name``.

    Raises:
        ConfigurationError: There is no such policy, or another package registered something else under this name.
    """
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        built_in: type[Policy] = getattr(importlib.import_module(module), attribute)
        return built_in
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name:
            try:
                loaded = point.load()
            except Exception as error:  # code of another package may raise anything
                raise ConfigurationError(f"policy {name!r} ({point.value}) could not be loaded: {error}") from error
            if not (isinstance(loaded, type) and issubclass(loaded, Policy)):
                raise ConfigurationError(f"policy {name!r} ({point.value}) is no subclass of snapstream.config.Policy")
            return loaded
    raise ConfigurationError(f"unknown policy {name!r}; allowed: {', '.join(policy_names())}")


def make_policy(name: str, settings: dict[str, Any]) -> Policy:
    """Create a policy by name.

    Raises:
        ConfigurationError: The policy is unknown, or it does not have one of the settings.
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
    """How many of a prompt's last queries are kept if ``needed`` are needed, which may be :data:`ALL`."""
    return length if needed == ALL else min(needed, length)


def most_queries(*needed: int) -> int:
    """The largest of several numbers of queries; :data:`ALL` is the largest of all."""
    return ALL if ALL in needed else max(needed, default=0)


def enough_queries(needed: int, kept: int) -> bool:
    """Whether ``kept`` queries suffice for a policy that needs ``needed``; both may be :data:`ALL`."""
    return (math.inf if needed == ALL else needed) <= (math.inf if kept == ALL else kept)

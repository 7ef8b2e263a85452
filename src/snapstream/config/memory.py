"""A cache budget in bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from snapstream.config.budget import CacheBudget
from snapstream.config.checks import require_integer
from snapstream.config.policy import DEFAULT_POLICY, policy_class
from snapstream.errors import ConfigurationError


@dataclass(frozen=True)
class MemoryBudget:
    """How many bytes the cache of one sequence may take.

    The engine knows the model, and derives the type of entries and their number: see
    :func:`snapstream.engine.cache_settings.choose_cache`.

    Attributes:
        nbytes: Bytes of one sequence over all layers. What is kept besides for sessions (of windows and states) and the
            cache of a draft model are not counted.
        policy: Name of the policy that selects entries.
        before_questions: Whether it is for texts that are stored before a question is known.
    """

    nbytes: int
    policy: str = DEFAULT_POLICY
    before_questions: bool = False

    def __post_init__(self) -> None:
        require_integer("budget", self.nbytes)
        if self.nbytes < 1:
            raise ConfigurationError(f"budget: {self.nbytes} bytes hold no cache; give a size such as 512MiB or 2GiB")
        policy_class(self.policy)  # an unknown name is an error

    def for_context(self) -> MemoryBudget:
        """The same for a text that is stored before any question is known."""
        return replace(self, before_questions=True)

    def of(self, entries: int) -> CacheBudget:
        """The budget with so many entries."""
        budget = CacheBudget.preset(self.policy, entries)
        return replace(budget, policy=budget.policy.for_contexts) if self.before_questions else budget

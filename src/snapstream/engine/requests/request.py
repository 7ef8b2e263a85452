"""One request inside the engine: what was asked, and how far it is."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from snapstream.cache import CompressedSequence
from snapstream.config import CacheBudget, SamplingParams
from snapstream.engine.decode.renewal import Placement
from snapstream.engine.prefill.result import PrefillResult
from snapstream.engine.requests.grammar import OutputGrammar
from snapstream.engine.requests.output import FinishReason
from snapstream.engine.requests.text import OutputText


class Phase(enum.Enum):
    """Phase of a request; see :class:`~snapstream.engine.requests.table.RequestTable`."""

    WAITING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    DONE = enum.auto()


@dataclass(eq=False)
class Request:
    """State of a request. Only the table changes it.

    Attributes:
        request_id: Its id.
        prompt: Tokens to prefill; with a ``past``, only the new ones.
        params: Sampling parameters.
        seed: Seed of its random draws.
        budget: Its cache budget.
        max_tokens: Maximum number of tokens to generate.
        text: The generated text.
        grammar: Where it is in its grammar, with structured outputs.
        past: The compressed cache of earlier turns.
        keep: Whether its compressed cache is returned at the end.
        salt: Requests with different ones share no cached prefixes.
        phase: Its phase.
        slot: The slot it decodes in, or will after prefill.
        prefilled: The result of its prefill, or what it continues from unchanged.
        placement: Layout of its cache in layers with a budget when places were last assigned, once it decodes.
        drafted: Draft tokens that were verified, with speculative decoding.
        accepted: Draft tokens that were accepted.
        finish_reason: Why it ended, once it has.
        error: What went wrong.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    budget: CacheBudget
    max_tokens: int
    text: OutputText
    grammar: OutputGrammar | None = None
    past: CompressedSequence | None = None
    keep: bool = False
    salt: str = ""
    phase: Phase = Phase.WAITING
    slot: int | None = None
    prefilled: PrefillResult | None = None
    placement: Placement | None = None
    drafted: int = 0
    accepted: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def own_slot(self) -> int:
        """The slot of a request that has one."""
        assert self.slot is not None
        return self.slot

    @property
    def before(self) -> int:
        """Tokens of earlier turns."""
        return 0 if self.past is None else len(self.past.tokens)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, with earlier turns."""
        return self.before + len(self.prompt)

    @property
    def all_tokens(self) -> list[int]:
        """The prompt, with earlier turns."""
        return [*(() if self.past is None else self.past.tokens), *self.prompt]

    @property
    def staged(self) -> int:
        """Entries that its prompt takes in a staging cache, in the group of layers that has the most."""
        known = () if self.past is None else self.past.layouts
        return len(self.prompt) + max((layout.count for layout in known), default=0)

    @property
    def tokens(self) -> list[int]:
        """Generated tokens."""
        return self.text.tokens

    @property
    def remaining(self) -> int:
        """Maximum number of tokens that it still generates."""
        return self.max_tokens - len(self.tokens)

    @property
    def decoded(self) -> int:
        """Number of generated tokens that are stored; the last one is stored by the next step."""
        return max(len(self.tokens) - 1, 0)

    @property
    def until_renewal(self) -> float:
        """Number of tokens that may be stored before the pinned places of its cache are renewed."""
        due = None if self.placement is None else self.placement.due(self.budget)
        return math.inf if due is None else due - self.decoded

    @property
    def seen(self) -> int:
        """Number of tokens of the conversation so far."""
        return self.prompt_tokens + len(self.tokens)

    def shares_prompt_with(self, other: Request) -> bool:
        """Whether one prefill serves both requests."""
        return self.past is other.past and self.salt == other.salt and self.prompt == other.prompt

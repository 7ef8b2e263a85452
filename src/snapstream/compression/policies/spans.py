"""``spans``, the default: the last words vote for tokens and for spans of text around them, and some keys stand out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from snapstream.compression.keys import key_differences
from snapstream.compression.policies.attention import require_kernel
from snapstream.compression.policies.local_keydiff import NEAR, require_near
from snapstream.compression.policies.multiscale_keydiff import MultiscaleKeyDifferences
from snapstream.compression.policies.window import WindowVotes, require_voters
from snapstream.compression.ranks import take_in_turn
from snapstream.compression.scoring import pool_votes, votes_and_largest_shares
from snapstream.config.checks import require_count
from snapstream.config.policy import LayerPrompt, Policy, split


@dataclass(frozen=True, kw_only=True)
class Spans(WindowVotes):
    """Four rankings take entries in turn: single tokens, long spans of text, short ones and, every third turn, keys.

    The paper's votes, averaged over a few neighbors, keep what the question points at, and a little around it. An
    answer that is longer than that, such as an id of thirty characters behind its name, is kept in fragments. Averages
    over a wide span keep it whole, but leave room for few places; averages over half of that keep more places. A span
    reaches further past its votes than before them, as an answer usually follows the name that the question repeats.
    Votes know nothing about later questions, so a tenth of the entries goes to tokens whose keys differ from their
    neighbors'. Where at least half of the candidates are kept, votes hardly tell the last ones kept from those evicted,
    and keys have a quarter of the turns.

    For spans, the window is longer, and a token's vote is the largest share of attention that any of its queries pays
    to it. A sum would be diluted by all the queries that ask for nothing: words of the template, or of a long question.

    A long answer would evict the question first, as it is among the recent tokens. So these are candidates, too.
    docs/experiments.md describes the measurements.

    Attributes:
        span: Odd width of the average of votes for long spans; short ones are about half as wide.
        shift: How many tokens past its votes the middle of a long span is; of a short one, half as many. ``None``: a
            quarter of the span.
        voters: Last prompt tokens whose queries vote for spans; those for single tokens are the ``window``, and get no
            votes for spans themselves.
        near: Block size in tokens; a key is compared with its own block and the two adjacent ones.
        key_turns: A key is taken every so many turns, or every turn where half of the candidates are kept; 0 for never.
    """

    name: ClassVar[str] = "spans"
    pins_recent: ClassVar[bool] = True

    window: int = 8
    span: int = 63
    shift: int | None = None
    voters: int = 64
    near: int = NEAR
    key_turns: int = 3

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigurationError: A field has an invalid value.
        """
        super().__post_init__()
        require_kernel("span", self.span)
        require_near(self.near)
        require_count("cache budget: key_turns", self.key_turns)
        if self.shift is not None:
            require_count("cache budget: shift", self.shift)
        require_voters("voters", self.voters)

    @classmethod
    @override
    def parts(cls, capacity: int) -> tuple[int, int, int]:
        """An eighth of the cache is for recent tokens, but at least 32 entries. A small cache has three eighths."""
        return split(capacity, 8)

    @classmethod
    @override
    def sized(cls, capacity: int) -> Spans:
        """The policy with at most a quarter of ``capacity`` as window, as voters and as span.

        Each voter names tokens of its own, so where there is room for few, fewer voters choose better: 16 in up to 256
        entries, and all in 640 and more.
        """
        quarter = capacity // 4
        span, window = min(cls.span, quarter - 1 | 1), min(cls.window, quarter)
        voters = min(cls.voters, quarter, max(16, capacity // 8 - 16))
        return cls(window=window, span=span, voters=voters)

    @property
    @override
    def for_contexts(self) -> Policy:
        """Key differences: a text that is stored does not end with a question."""
        return MultiscaleKeyDifferences(near=self.near)

    @property
    @override
    def queries(self) -> int:
        return max(self.window, self.voters)

    @override
    def votes(self, prompt: LayerPrompt) -> Tensor:
        """Votes for tokens, for spans of both lengths, and key differences, if they count: ``[3 or 2, B, N, L]``."""
        kinds = [
            *votes_and_largest_shares(
                prompt.queries[:, :, -self.queries :],
                prompt.keys,
                prompt.layout,
                sink=prompt.sink,
                **prompt.attention,
                normalize=self.normalize,
                summed=self.window,
                largest=self.voters,
            )
        ]
        if self.key_turns:
            kinds.append(key_differences(prompt.keys, prompt.layout, sink=prompt.sink, near=self.near))
        return torch.stack(kinds)

    @override
    def smooth(self, votes: Tensor, prompt: LayerPrompt) -> Tensor:
        tokens, spans, *keys = votes
        shift = (self.span + 1) // 4 if self.shift is None else self.shift
        long = pool_votes(spans, pooling="avg", kernel=self.span, shift=shift)
        short = pool_votes(spans, pooling="avg", kernel=self.span // 2 | 1, shift=shift // 2)
        lists = [super().smooth(tokens, prompt), long, short, *keys]
        layout = prompt.layout
        every = [torch.ones_like(layout.base)] * 3
        if keys:
            keeps_half = 2 * (layout.base - prompt.sink) >= layout.candidate_end - prompt.sink
            every.append(torch.where(keeps_half, 1, self.key_turns))
        return take_in_turn(lists, layout, sink=prompt.sink, most=prompt.top_k, every=torch.stack(every))

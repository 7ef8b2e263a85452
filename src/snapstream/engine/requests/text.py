"""The output text of one request: tokens become text, and text is returned once it can no longer change."""

from __future__ import annotations

from snapstream.config import SamplingParams
from snapstream.engine.requests.detokenizer import Detokenizer
from snapstream.engine.requests.output import Produced, TokenLogprobs


class OutputText:
    """The tokens and text that a request has generated.

    Text passes through three stages. The detokenizer holds back incomplete text; the tail is complete, but may still be
    truncated at a stop string; the pieces of :attr:`produced` have been returned. Nothing grows with the output except
    lists that are appended to.

    Attributes:
        produced: Tokens, log-probabilities, and text that has been returned.
        stopped_by: The stop string or the token of ``stop_token_ids`` that has ended the output.
    """

    def __init__(self, params: SamplingParams, stop_ids: frozenset[int], detokenizer: Detokenizer) -> None:
        self.params, self.stop_ids, self.detokenizer = params, stop_ids, detokenizer
        self.produced = Produced()
        self.stopped_by: str | int | None = None
        self._tail = ""
        self._handed_out = 0
        # Per token, the length of the text after it; -1 if the detokenizer still holds some of it back.
        self._ends: list[int] = []
        self._early = 0

    @property
    def tokens(self) -> list[int]:
        """Generated tokens."""
        return self.produced.tokens

    @property
    def length(self) -> int:
        """Number of characters, without those that the detokenizer holds back."""
        return self._handed_out + len(self._tail)

    def append(self, token: int, logprobs: TokenLogprobs | None, *, last: bool) -> bool:
        """Add a generated token.

        Args:
            token: The token.
            logprobs: Its log-probabilities, if they are reported.
            last: Whether no more tokens follow.

        Returns:
            Whether it ends the output, as a stop token or the end of a stop string.
        """
        self.tokens.append(token)
        if logprobs is not None:
            self.produced.logprobs.append(logprobs)
        is_early = len(self.tokens) <= self._early_tokens
        at_stop = token in self.stop_ids and not is_early
        if at_stop and token in self.params.stop_token_ids:
            self.stopped_by = token
        if not at_stop:
            self._tail += self.detokenizer.add(token)
            self._ends.append(-1 if self.detokenizer.pending else self.length)
        if at_stop or last:
            self._tail += self.detokenizer.flush()
        if is_early:
            self._early = self.length
        return self._cut_at_stop_string() or at_stop

    @property
    def _early_tokens(self) -> int:
        """Number of tokens of which none ends the output."""
        return max(len(self.params.forced), self.params.min_tokens)

    def ends_at(self, token: int) -> bool:
        """Whether this token would end the output if it came next."""
        return token in self.stop_ids and len(self.tokens) >= self._early_tokens

    def take_new(self, *, finished: bool) -> str:
        """Return the text that is final and was not returned before."""
        end = len(self._tail)
        if not finished and self.params.stop:
            end -= held_back(self._tail, tuple(self.params.stop))
        new, self._tail = self._tail[:end], self._tail[end:]
        if new:
            self.produced.pieces.append(new)
            self._handed_out += len(new)
        return new

    def whole_tokens(self) -> int:
        """Number of leading tokens whose text is in the output in full, so that a next turn can continue after them.

        The last token never counts, because its cache entry is not stored yet. End tokens have no text, and a stop
        string may truncate the text of a token.
        """
        fitting = (n for n in range(len(self.tokens) - 1, 0, -1) if 0 <= self._ends[n - 1] <= self.length)
        return next(fitting, 0)

    def of(self, tokens: int) -> str:
        """Text of the first ``tokens`` tokens, a number that :meth:`whole_tokens` returned."""
        return "".join(self.produced.pieces)[: self._ends[tokens - 1]] if tokens else ""

    def _cut_at_stop_string(self) -> bool:
        """Truncate at the first stop string, searched after the tokens that may not end the output; return if found."""
        start = max(self._early - self._handed_out, 0)
        found = [(at, stop) for stop in self.params.stop if (at := self._tail.find(stop, start)) >= 0]
        if found:
            end, self.stopped_by = min(found)
            self._tail = self._tail[:end]
        return bool(found)


def held_back(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest

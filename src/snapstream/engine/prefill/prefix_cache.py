"""The prefix cache: what prompts begin with is prefilled once, and kept as full caches in pieces.

A piece is a chunk of a prompt: the entries of its tokens in all layers. Its key is a digest of its tokens and of all
before it, so a prompt finds its pieces one after the other. The last one of a prompt may be shorter, a whole number of
blocks.

Nothing is lost: the entries are those that would be computed again, and the prompt is compressed at its end as usual.
Where a token's entries depend on how its prompt is divided into chunks, a block is a whole chunk; see
:attr:`~snapstream.engine.prefill.prefill.Prefill.takes_rows_alone`.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import torch

from snapstream.cache import (
    CacheSizes,
    CompressedSequence,
    LayerCache,
    SequenceStore,
    StateCache,
    Stored,
    StoreFullError,
    make_caches,
)
from snapstream.compression import lay_out_window
from snapstream.errors import CacheFileError

logger = logging.getLogger(__name__)

BLOCK = 64
"""Tokens of a block, where it need not be a whole chunk."""
MOST_LOADED = 2**29
"""Bytes that are read from the disk for one prompt, while others wait."""


@dataclass(eq=False)
class Piece:
    """A piece of a prompt that is being prefilled.

    Attributes:
        key: Its key.
        start: Place of its first token in the prompt.
        tokens: Its tokens.
        layers: A copy of the entries of each layer, or of the state after its last token; made with the first layer.
        finished: How many layers are complete.
    """

    key: str
    start: int
    tokens: Sequence[int]
    layers: list[LayerCache] = field(default_factory=list)
    finished: int = 0

    @property
    def end(self) -> int:
        """The place after its last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Prefix:
    """What a prompt finds: sequences of consecutive tokens, and how many tokens of each it uses."""

    pieces: Sequence[tuple[CompressedSequence, int]] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(used for _, used in self.pieces)

    def put_into(self, staging: LayerCache, layer: int, *, has_state: bool) -> None:
        """Copy one layer of it to a staging cache."""
        if has_state:
            staging.put(self.pieces[-1][0].layers[layer].converted(staging.entry_type), self.tokens)
            return
        start = 0
        for sequence, used in self.pieces:
            entries = sequence.layers[layer].first(used)
            staging.span(start, start + used).put(entries.converted(staging.entry_type))
            start += used


@dataclass(eq=False)
class Keeping:
    """What will be kept of a prompt: pieces that are not known yet, layer by layer.

    Attributes:
        pieces: The pieces, in order.
        nbytes: Bytes that they take.
        found: Pieces before them that are known.
        make: Makes the caches of a piece of so many tokens.
    """

    pieces: list[Piece]
    nbytes: int
    found: list[Stored]
    make: Callable[[int, torch.device], list[LayerCache]]

    def capture(self, staging: LayerCache, layer: int, done: int) -> None:
        """Copy what is complete of a layer, of which ``done`` tokens have been prefilled."""
        for piece in self.pieces:
            if piece.end <= done and piece.finished == layer:
                piece.layers = piece.layers or self.make(len(piece.tokens), staging.device)
                mine = piece.layers[layer]
                if mine.entry_type == staging.entry_type or isinstance(staging, StateCache):
                    staging.copy_to(mine, piece.start, piece.end)
                else:  # each piece has a frame of its own
                    mine.put(staging.span(piece.start, piece.end).converted(mine.entry_type))
                piece.finished += 1


class PrefixCache:
    """The pieces of prompts: a view of a store."""

    def __init__(self, store: SequenceStore, sizes: CacheSizes, *, chunk: int, block: int) -> None:
        """Create it.

        Args:
            store: Keeps the pieces.
            sizes: Sizes of caches of its entries.
            chunk: Tokens of a piece: those of a prefill chunk.
            block: Tokens that a shorter piece is a multiple of.
        """
        self.store, self.chunk = store, chunk
        self._sizes, self._groups = sizes, sizes.groups
        # The state after a piece is known at the end of a chunk only.
        self._whole = any(group.has_state for group in self._groups)
        self._block = chunk if chunk % block or self._whole else block
        # Those of prompts that are being prefilled; they are gone when nothing prefills them any more.
        self._coming: WeakSet[Keeping] = WeakSet()
        store.reserved = lambda: sum(each.nbytes for each in self._coming)

    def find(self, prompt: Sequence[int], most: int, *, kind: str = "") -> tuple[Prefix, Keeping]:
        """Find the longest known prefix of a prompt. May wait for the disk.

        Args:
            prompt: The prompt.
            most: Maximum number of tokens that may be skipped.
            kind: Prompts of different kinds share nothing: those of different users, or read in another way.

        Returns:
            What can be skipped, and what will be kept.
        """
        pieces: list[tuple[CompressedSequence, int]] = []
        known: list[Stored] = []
        key, start, last, reads_on, loaded = kind, 0, None, True, 0
        while start + self._block <= len(prompt):
            stored, size = self._longest(key, prompt, start)
            if stored is None:
                break
            usable = min(size, self._round(most - start))
            loaded += 0 if stored.sequence is not None else stored.nbytes
            if reads_on and usable > 0 and loaded <= MOST_LOADED and not (self._whole and usable < size):
                sequence = self._load(stored)
                if sequence is None:
                    break
                pieces.append((sequence, usable))
            else:
                reads_on = False
            reads_on = reads_on and usable == size
            if size < self.chunk:
                last = stored.key
                break
            known.append(stored)
            key, start = stored.key, start + size
        self._touch(known)
        new = self._pieces_after(key, prompt, start, len(known))
        if new and new[0].key == last:
            new = []
        keeping = Keeping(new, sum(self._nbytes(len(piece.tokens)) for piece in new), known, self._make)
        try:
            self.store.make_room(keeping.nbytes)
        except StoreFullError:  # all of it will be taken by prompts that came before
            keeping = Keeping([], 0, known, self._make)
        self._coming.add(keeping)
        return Prefix(pieces), keeping

    def keep(self, keeping: Keeping) -> None:
        """Store the pieces of a finished prefill. The first pieces of a prompt are evicted last."""
        self._coming.discard(keeping)
        for piece in reversed(keeping.pieces):
            stored = self.store.put(piece.key, self._sequence_of(piece), {"start": piece.start})
            self.store.save_later(stored)  # so that it can be evicted at any time
        self._touch(keeping.found)

    def _longest(self, key: str, prompt: Sequence[int], start: int) -> tuple[Stored | None, int]:
        """The longest known piece after those of ``key``, and its length."""
        longest = min(self.chunk, self._round(len(prompt) - start))
        for size in range(longest, 0, -self._block):
            stored = self.store.get(_key(key, prompt[start : start + size]))
            if stored is not None:
                return stored, size
        return None, 0

    def _pieces_after(self, key: str, prompt: Sequence[int], start: int, known: int) -> list[Piece]:
        """The pieces of a prompt from ``start`` on, as many as there is room for besides the ``known`` ones."""
        pieces: list[Piece] = []
        room = self.store.max_bytes - known * self._nbytes(self.chunk)
        end = self._round(len(prompt))
        while start < end:
            size = min(self.chunk, end - start)
            room -= self._nbytes(size)
            if room < 0:
                break
            tokens = list(prompt[start : start + size])
            key = _key(key, tokens)
            pieces.append(Piece(key, start, tokens))
            start += size
        return pieces

    def _sequence_of(self, piece: Piece) -> CompressedSequence:
        size = len(piece.tokens)
        layouts = tuple(lay_out_window(size, entries) for entries in self._entries(size))
        return CompressedSequence(self._groups, piece.layers, (), layouts, tuple(piece.tokens))

    def _load(self, stored: Stored) -> CompressedSequence | None:
        try:
            return self.store.load(stored.key)  # which stays as long as a prompt holds it
        except (StoreFullError, CacheFileError) as error:
            logger.warning("a cached prefix cannot be used: %s", error)
            return None

    def _touch(self, known: Sequence[Stored]) -> None:
        for stored in reversed(known):
            self.store.touch(stored)

    def _entries(self, tokens: int) -> list[int]:
        """Entries of a piece per group of layers; with a state, the inputs that go with it."""
        return [group.window or 0 if group.has_state else tokens for group in self._groups]

    def _make(self, tokens: int, device: torch.device) -> list[LayerCache]:
        return make_caches(self._groups, self._entries(tokens), entry_type=self._sizes.entry_type, device=device)

    def _nbytes(self, tokens: int) -> int:
        return self._sizes.of(self._entries(tokens))

    def _round(self, tokens: int) -> int:
        """Round a number of tokens down to whole blocks."""
        return max(0, tokens) // self._block * self._block


def _key(before: str, tokens: Sequence[int]) -> str:
    """Key of a piece with these tokens behind one with the key ``before``."""
    digest = hashlib.blake2b(before.encode(), digest_size=16)
    digest.update(array("q", tokens).tobytes())
    return digest.hexdigest()

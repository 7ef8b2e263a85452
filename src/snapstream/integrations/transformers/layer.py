"""One layer of the cache: takes a full prompt, keeps a fixed number of its tokens, and decodes inside those entries."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from snapstream.cache.codes import FEWEST_KEYS, CodeFormat
from snapstream.compression import lay_out, layout_tensors, next_entry
from snapstream.config import CacheBudget
from snapstream.config.pins import Span
from snapstream.errors import RequestError
from snapstream.integrations.transformers.coding import Coding
from snapstream.integrations.transformers.pins import BatchPins, Row, row_budgets
from snapstream.integrations.transformers.prompt import fresh_tokens, is_causal
from snapstream.integrations.transformers.waiting import WaitingPrompt, take
from snapstream.transfers import to_device


class _Handoff(threading.local):
    """The layer that was updated last in this thread, until the attention function takes it.

    Models in transformers pass keys and values from the cache to the attention function, but not the cache itself.
    Nothing else runs in the thread between the two calls, so a thread-local variable connects them.
    """

    layer: SnapStreamLayer | None = None
    taken: weakref.ReferenceType[Tensor] | None = None


_handoff = _Handoff()


def take_updated_layer(index: int | None, key: Tensor) -> SnapStreamLayer | None:
    """Return the layer whose keys the attention function was given; ``None`` if they are from another kind of cache.

    Args:
        index: Index of the attention layer in the model.
        key: ``[B, N, L, D]``.

    Raises:
        RequestError: The keys are the same tensor as in the previous call.
    """
    layer, _handoff.layer = _handoff.layer, None
    # After an interrupted forward pass, or with another attention implementation, the last layer was never taken.
    if layer is None or layer.index != index or not layer.returned(key):
        layer = None
    if not torch.compiler.is_compiling():  # prefill is not compiled, so this is checked for every model
        if layer is None and _handoff.taken is not None and _handoff.taken() is key:
            raise RequestError(f"layer {index} attends to its cache twice, which SnapStreamCache does not support")
        _handoff.taken = None if layer is None else weakref.ref(key)
    return layer


class SnapStreamLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, ``[B, N, C, D]``, in the layout of :mod:`snapstream.compression.layout`.

    An update of several tokens is a prompt or the next part of one, and is compressed together with the entries already
    in the cache. An update of one token is a decode step.

    Attributes:
        keys: ``[B, N, C, D]``, or codes; ``None`` before the first token.
        values: ``[B, N, C, D_v]``, or codes.
        frames: With codes, the frame of each sequence, float32 ``[B, N, 2, D]``.
        base: First entry of the ring, int64 ``[B]``.
        count: Tokens ever stored, int64 ``[B]``, without padding.
        limit: End of the ring, int64 ``[B]``.
        padding: Number of padding tokens among those seen, int64 ``[B]``.
        seen: Tokens the model has seen, padding included; int64 scalar. transformers derives positions from it.
        updates: Number of calls of :meth:`update` that were not compiled.
        positions: True positions of entries when the last prompt ended, int64 ``[B, N or 1, C]``; ``None`` if no tokens
            are pinned.
    """

    is_sliding = False
    is_croppable = False

    def __init__(
        self,
        index: int,
        budget: CacheBudget,
        *,
        latent: bool,
        chunked_prefill: bool,
        pins: Sequence[Sequence[Span]] = (),
        coding: Coding | None = None,
    ) -> None:
        """Create an empty layer.

        Args:
            index: Index of the layer in the model.
            budget: Budget of one sequence.
            latent: Whether all heads read one latent per token (MLA), so that all of them keep the same tokens.
            chunked_prefill: Whether to wait for a single token before compressing.
            pins: Spans to pin of each sequence, without padding; none, one for all, or one per sequence.
            coding: How entries are stored, if they are codes.
        """
        super().__init__()
        self.index, self.budget, self.latent, self.chunked_prefill = index, budget, latent, chunked_prefill
        # generate() would otherwise compile the chunks, and the token after them, which triggers compression.
        self.is_compileable = not chunked_prefill
        self.seen = torch.zeros((), dtype=torch.int64)
        self.empty = True
        self.updates = 0
        self.positions: Tensor | None = None
        self._at_end: tuple[Tensor, Tensor] | None = None  # count and seen tokens, when the last prompt ended
        self._budgets = [replace(budget, pin=(*spans, *budget.pin)) for spans in pins or [()]]
        self._prompt: WaitingPrompt | None = None
        self._coding = coding
        self.frames: Tensor | None = None
        # Of codes, the keys that the last update of one token returned; they must not outlive attention.
        self._given: weakref.ReferenceType[Tensor] | None = None
        self._value_size = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate all entries; called with the first keys ``[B, N, T, D]`` and values ``[B, N, T, D_v]``."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._value_size = value_states.shape[-1]

        def entries(like: Tensor, codes: CodeFormat | None) -> Tensor:
            size, dtype = (like.shape[-1], like.dtype) if codes is None else (codes.nbytes(like.shape[-1]), torch.uint8)
            return like.new_zeros(*like.shape[:2], self.budget.capacity, size, dtype=dtype)

        formats: tuple[CodeFormat | None, ...] = (None, None)
        with torch.inference_mode(False):  # inference tensors could not be written to outside of inference mode
            if self._coding is not None:
                self._coding.check(key_states.shape[-1], value_states.shape[-1])
                self.frames = key_states.new_ones(*key_states.shape[:2], 2, key_states.shape[-1], dtype=torch.float32)
                formats = self._coding.kind.keys, self._coding.kind.values
            self.keys, self.values = map(entries, (key_states, value_states), formats)
            start = layout_tensors([lay_out(1, self.budget)] * key_states.shape[0], self.device)
            self.base, self.limit, self.count = start.base, start.limit, torch.zeros_like(start.count)
            self.padding = torch.zeros_like(start.count)
            self.seen = torch.zeros((), dtype=torch.int64, device=self.device)
        if not torch.compiler.is_compiling():
            for tensor in (*self._stored(), self.base, self.limit, self.count, self.seen):
                torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new tokens; called by the model before its attention.

        Args:
            key_states: Rotated keys, ``[B, N, T, D]``.
            value_states: ``[B, N, T, D_v]``.
            *args: Unused arguments of transformers.
            **kwargs: Unused arguments of transformers.

        Returns:
            The keys and values to attend to: for one token, all ``C`` entries; otherwise the previous contents followed
            by the new tokens.

        Raises:
            RequestError: The batch size has changed, or the model's attention does not pass queries to the cache.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.keys.shape[0]:
            raise RequestError(
                f"the cache holds {self.keys.shape[0]} sequences, but {key_states.shape[0]} were given; use a new "
                f"cache, or reset() this one and give {self.keys.shape[0]} sequences"
            )
        if self._prompt is not None and self._prompt.chosen is None:
            raise RequestError(
                f"layer {self.index} was given a new prompt before the last one was scored: the model's attention does "
                "not use the implementation 'snapstream', or changes keys after they were cached; or a forward pass "
                "was interrupted, in which case reset() the cache"
            )
        key_states, value_states = key_states.detach(), value_states.detach()
        self.seen.add_(key_states.shape[2])
        if not torch.compiler.is_compiling():
            self.updates += 1
        _handoff.layer = self
        if key_states.shape[2] > 1:
            return self._stage(key_states, value_states)
        self._settle()
        entry = next_entry(self.count, self.base, self.limit)[:, None, None, None]
        stored = key_states, value_states
        if self._coding is not None and self.frames is not None:
            if self.empty:
                self.frames.copy_(self._coding.frames(key_states, [1] * len(key_states)))
            stored = self._coding.encoded(*stored, self.frames)
        self.empty = False
        for mine, new in zip((self.keys, self.values), stored, strict=True):
            mine.scatter_(2, entry.expand(new.shape), new)
        self.count.add_(1)
        keys, values = self._numbers()
        if not torch.compiler.is_compiling():
            self._given = weakref.ref(keys)
        return keys, values

    def _stored(self) -> list[Tensor]:
        """All tensors with entries, and the frames that belong to codes."""
        return [self.keys, self.values, *([] if self.frames is None else [self.frames])]

    def _numbers(self) -> tuple[Tensor, Tensor]:
        """Keys and values, also of codes."""
        if self._coding is None or self.frames is None:
            return self.keys, self.values
        keys, values = self._coding.decoded(self.keys, self.values, self.frames, self._value_size)
        return keys.to(self.dtype), values.to(self.dtype)

    def returned(self, key: Tensor) -> bool:
        """Whether ``key`` is what the last update returned."""
        keys: Tensor = self.keys if self._prompt is None else self._prompt.keys
        if self.latent or torch.compiler.is_compiling():  # latents are expanded in between
            return key.shape[2] == keys.shape[2]
        if self._prompt is None and self.frames is not None:
            return self._given is not None and key is self._given()
        return key is keys

    @property
    def decoding(self) -> bool:
        """Whether the last update was a single token."""
        return self._prompt is None

    def valid(self) -> Tensor:
        """Number of entries in use, int64 ``[B]``; they are always the first ones."""
        return torch.minimum(self.count, self.limit)

    def attend_prompt(
        self,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        scale: float,
        attend: Callable[[Tensor | None], Tensor],
        attend_causally: Callable[[Tensor | None, Tensor | None], Tensor | None] | None = None,
        *,
        cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention of the tokens just stored, and select the tokens to keep.

        Args:
            query: Rotated queries, ``[B, H, T, D]``.
            key: Rotated keys of the ``P`` previous and these ``T`` tokens, ``[B, N, P + T, D]``; for MLA, expanded to
                all heads.
            mask: The model's mask, boolean or additive ``[B, 1, T, >= T]``, whose last ``T`` columns are these tokens;
                ``None`` without padding.
            scale: Factor on the logits.
            attend: Attention under a mask; a mask of ``None`` means causal attention without previous tokens.
            attend_causally: Faster causal attention, if available. It takes which of all tokens and which of these
                tokens are real (``None``: all), and returns ``None`` if it cannot handle them.
            cap: Soft cap of the logits; 0 for none.
            sinks: One extra logit per head, without a value, ``[H]``.

        Returns:
            The output of ``attend_causally`` or ``attend``.

        Raises:
            RequestError: The prompt is padded on the right, or the mask is not supported.
        """
        prompt, batch, tokens = self._prompt, query.shape[0], query.shape[2]
        assert prompt is not None
        before = key.shape[2] - tokens
        fresh = None if mask is None else fresh_tokens(mask, tokens, self.padding)
        if fresh is not None:
            self.padding.add_((~fresh).sum(1))
        real = fresh
        if before and (fresh is not None or prompt.real is not None):
            both = ((prompt.real, before), (fresh, tokens))
            real = torch.cat([key.new_ones(batch, size, dtype=torch.bool) if r is None else r for r, size in both], 1)
        prompt.real = real
        out = None
        # The model's mask counts dropped tokens. With previous tokens, it is known to be causal except for padding.
        if attend_causally is not None and (before or mask is None or fresh is None or is_causal(mask, fresh)):
            out = attend_causally(real, fresh)
        if out is None:
            if before:
                mask = torch.ones(tokens, before + tokens, dtype=torch.bool, device=key.device).tril(before)[None, None]
                mask = mask if real is None else mask & real[:, None, None]
            out = attend(mask)
        softmax = {"scale": scale, "cap": cap, "sinks": None if sinks is None else sinks.detach().float()}
        prompt.observe(query, fresh, self.budget)
        lengths = [before + tokens] * batch if prompt.real is None else prompt.real.sum(1).tolist()
        pins = self._pins(prompt, lengths, before + tokens)
        prompt.choose(key, lengths, self.budget, pins, latent=self.latent, layer=self.index, softmax=softmax)
        if not self.chunked_prefill:
            self._settle()
        return out

    def _stage(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Append new tokens to the cache's contents, oldest first, until attention has scored them."""
        self._given = None
        if self._prompt is None and self.empty:
            self._prompt = WaitingPrompt(key_states, value_states, [0] * key_states.shape[0])
        else:
            prompt = self._oldest_first() if self._prompt is None else self._prompt
            prompt.keys = torch.cat((prompt.keys, key_states), 2)
            prompt.values = torch.cat((prompt.values, value_states), 2)
            prompt.chosen = None
            self._prompt = prompt
        self.empty = False
        return self._prompt.keys, self._prompt.values

    def _oldest_first(self) -> WaitingPrompt:
        """The cache's contents as the start of a prompt, in the order the tokens were stored."""
        entry = torch.arange(self.budget.capacity, device=self.device).expand(len(self.base), -1)
        base, length = self.base[:, None], (self.limit - self.base).clamp(min=1)[:, None]
        oldest = torch.where(self.count > self.limit, next_entry(self.count, self.base, self.limit), self.base)[:, None]
        in_ring = (entry >= base) & (entry < self.limit[:, None])
        order = torch.where(in_ring, base + (oldest - base + entry - base) % length, entry)[:, None]
        valid = self.valid()
        real = entry < valid[:, None]
        positions = self._true_positions()
        positions = None if positions is None else positions.gather(2, order.expand(-1, positions.shape[1], -1))
        bases = [] if positions is None else self.base.tolist()
        keys, values = (take(each, order) for each in self._numbers())
        return WaitingPrompt(keys, values, valid.tolist(), positions, bases, real)

    def _true_positions(self) -> Tensor | None:
        """True position of each entry in use, int64 ``[B, N or 1, C]``; ``None`` if no tokens are pinned."""
        if self.positions is None or self._at_end is None:
            return None
        count_then, seen_then = (each[:, None] for each in self._at_end)
        entry = torch.arange(self.budget.capacity, device=self.device)
        base, length = self.base[:, None], (self.limit - self.base).clamp(min=1)[:, None]
        # How many tokens had been stored before the one that is in an entry now.
        last = self.count[:, None] - 1
        stored = torch.where(self.count[:, None] > self.limit[:, None], last - (last - entry) % length, entry)
        is_new = (entry >= base) & (stored >= count_then)
        return torch.where(is_new[:, None], (seen_then + stored - count_then)[:, None], self.positions)

    def _pins(self, prompt: WaitingPrompt, lengths: Sequence[int], total: int) -> BatchPins | None:
        """The pinned tokens among the real ones of a prompt, in order; ``None`` if none are pinned."""
        if not any(budget.pin for budget in self._budgets):
            return None
        budgets, bases = row_budgets(self._budgets, len(lengths)), prompt.bases or [0] * len(lengths)
        seen = (self.seen - self.padding).tolist()
        rows = [Row(*each) for each in zip(budgets, lengths, prompt.first_voters, bases, seen, strict=True)]
        return BatchPins.of(rows, prompt.entries, total)

    @torch.no_grad()
    def _settle(self) -> None:
        """Compress a pending prompt: keep the chosen tokens and drop the rest."""
        prompt = self._prompt
        if prompt is None:
            return
        assert prompt.chosen is not None
        assert prompt.layout is not None
        if prompt.real is not None and not bool(prompt.real[:, -1].all()):
            raise RequestError("a prompt is padded on the right; use left padding (tokenizer.padding_side = 'left')")
        kept = take(prompt.keys, prompt.chosen), take(prompt.values, prompt.chosen)
        if self._coding is not None and self.frames is not None:
            # With the frame that they have, entries that are kept again keep their codes.
            few = [count < FEWEST_KEYS for count in prompt.first_voters]
            if any(few):
                made = self._coding.frames(kept[0], prompt.layout.count.tolist())
                is_new = to_device(torch.tensor(few), self.device, torch.bool)[:, None, None, None]
                self.frames.copy_(torch.where(is_new, made, self.frames))
            kept = self._coding.encoded(*kept, self.frames)
        self.keys.copy_(kept[0])
        self.values.copy_(kept[1])
        for name in ("base", "count", "limit"):
            getattr(self, name).copy_(getattr(prompt.layout, name))
        self.positions = prompt.positions
        self._at_end = None if self.positions is None else (self.count.clone(), self.seen - self.padding)
        self._prompt = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values held now, including a prompt that is not compressed yet."""
        held = self._stored() if self.is_initialized else ()
        waiting = (self._prompt.keys, self._prompt.values) if self._prompt is not None else ()
        return sum(tensor.nbytes for tensor in (*held, *waiting))

    @property
    def nbytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all sequences, if they were not codes."""
        key_size = self.keys.shape[-1] if self.frames is None else self.frames.shape[-1]
        sizes = key_size + self._value_size
        return int(self.keys.shape[0] * self.keys.shape[1] * sizes * self.dtype.itemsize)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask that the model builds; for a single token, the mask is ignored."""
        return (self.budget.capacity, 0) if query_length == 1 else (int(self.seen) + query_length, 0)

    def get_seq_length(self) -> Tensor | int:
        """Tokens seen, padding included; may be more than the cache holds."""
        return 0 if self.empty else self.seen

    def get_max_length(self) -> int:
        """Return -1, no limit: a ring never ends."""
        return -1

    def reset(self) -> None:
        """Empty the cache; its memory is kept for the next prompts."""
        self._prompt = self.positions = self._at_end = self._given = None
        self.empty, self.updates = True, 0
        self.seen.zero_()
        if self.is_initialized:
            self.padding.zero_()
            start = lay_out(1, self.budget)
            self.base.fill_(start.base)
            self.limit.fill_(start.limit)
            self.count.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder beams: row ``i`` continues from row ``beam_idx[i]``. In place, for compiled graphs."""
        self._settle()
        if self.is_initialized:
            rows = beam_idx.to(self.device)
            for tensor in (*self._stored(), self.base, self.count, self.limit, self.padding):
                tensor.copy_(tensor.index_select(0, rows))
            self._reorder_positions(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        if self.is_initialized:
            rows = torch.arange(self.keys.shape[0], device=self.device).repeat_interleave(repeats)
            self.batch_select_indices(rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only some of the sequences."""
        self._settle()
        if self.is_initialized:
            rows, before = indices.to(self.device), len(self.base)
            for name in ("keys", "values", "frames", "base", "count", "limit", "padding"):
                if getattr(self, name) is not None:
                    setattr(self, name, getattr(self, name)[rows])
            self._reorder_positions(rows)
            if len(self._budgets) > 1:
                self._budgets = [self._budgets[row * len(self._budgets) // before] for row in rows.tolist()]

    def _reorder_positions(self, rows: Tensor) -> None:
        if self.positions is not None and self._at_end is not None:
            count, seen = self._at_end
            self.positions, self._at_end = self.positions[rows], (count[rows], seen[rows])

    def crop(self, tokens_to_remove: int) -> None:
        """Reject: entries that were overwritten cannot be restored.

        Raises:
            RequestError: Always, unless there is nothing to remove.
        """
        if tokens_to_remove:
            raise RequestError(
                "a cache of fixed size cannot remove tokens, because the entries they overwrote are lost; assisted "
                "generation and prompt lookup need DynamicCache"
            )

    def offload(self) -> None:
        """Reject offloading.

        Raises:
            RequestError: Always.
        """
        raise RequestError(
            "this cache does not support offloading: it has a fixed, small size; give it fewer entries instead"
        )

    prefetch = offload

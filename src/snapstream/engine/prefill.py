"""Prefill: one prompt at a time, in chunks of fixed size, then compressed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snapstream.attention import AttentionBackend
from snapstream.compression import (
    CompressedKV,
    PlanTensors,
    PromptPlan,
    compress,
    kept_attention,
    plan_prompt,
    plan_tensors,
)
from snapstream.config import WINDOW, CacheBudget
from snapstream.engine.conversation import SavedSequence, pairs
from snapstream.engine.graphs import StaticGraph
from snapstream.engine.output import KEPT_PARTS, KeptTokens, TokenLogprobs
from snapstream.models import DecoderModel

SCORED_ROWS = 32
"""Prompt tokens whose logits are held at a time where their log-probabilities are asked for."""

Scores = tuple[int | None, tuple[TokenLogprobs | None, ...]]
"""How many likely tokens are reported beside each of a prompt's, and the log-probabilities; ``None``: not scored."""


@dataclass(frozen=True)
class CompressedSequence:
    """The seam between prefill and decode: all that decoding needs of a prompt.

    Attributes:
        keys: Per layer, ``[N, C, D]``; ``C`` is the request's, at most the engine's.
        values: Per layer, ``[N, C, D]``; the same object as ``keys`` where values are part of keys.
        chosen: Per layer, the entry of the staging cache that each entry came from, ``[N, C]``; -1 for padding.
        positions: The same as positions in the conversation; other numbers only after a turn before.
        plan: ``base``, ``count`` and ``limit`` of its cache.
        position: True position of the next token.
        logits: Of the last prompt token, float32 ``[1, vocab]``; the first token is drawn from them.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    chosen: Sequence[Tensor]
    positions: Sequence[Tensor]
    plan: PromptPlan
    position: int
    logits: Tensor


class Prefill:
    """Owns the staging cache, which holds the one prompt that is being read."""

    def __init__(
        self,
        model: DecoderModel,
        backend: AttentionBackend,
        budget: CacheBudget,
        *,
        padded: int,
        chunk: int,
        eager: bool,
    ) -> None:
        """Allocate the staging cache.

        Args:
            model: The model.
            backend: Attention.
            budget: The engine's cache budget.
            padded: Tokens of the staging cache, see :func:`staging_length`.
            chunk: Prompt tokens of one launch.
            eager: Neither compile nor capture.
        """
        spec = model.spec
        parameter = model.embedding.weight
        device, dtype = parameter.device, parameter.dtype
        self.model, self.backend, self.budget = model, backend, budget
        self.chunk = chunk
        self.scale = spec.scale
        self.device = device
        self.buckets = staging_buckets(padded, chunk)

        def tensors(*shape: int) -> list[Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.layers)]

        self.keys = tensors(spec.kv_heads, padded, spec.head_dim)
        self.values = self.keys if spec.values_in_keys else tensors(spec.kv_heads, padded, spec.head_dim)
        # Queries of the last tokens read so far; they outlive chunk borders.
        self.window = tensors(spec.heads, budget.queries, spec.head_dim)
        self.tokens = torch.zeros(chunk, dtype=torch.int64, device=device)
        self.start = torch.zeros((), dtype=torch.int64, device=device)
        # How far true positions are ahead of the staging cache: tokens that a turn before has dropped.
        self.ahead = torch.zeros((), dtype=torch.int64, device=device)
        self.used = torch.zeros((), dtype=torch.int64, device=device)
        self.layers = torch.arange(spec.layers, device=device)
        self.plan = plan_tensors([plan_prompt(1, budget)], device)
        # The prompt that the staging cache holds in full, with what it said: requests for the same one share it.
        self._held: tuple[list[int], Tensor, Scores] | None = None
        # Hidden states of the chunk read last, until another graph runs.
        self._hidden: Tensor | None = None
        chunk_buckets = self.buckets if backend.reads_all_keys_in_prefill else (padded,)
        self.chunk_graphs = {
            size: StaticGraph(self._chunk_of(size), device, compiled=not eager, captured=not eager)
            for size in chunk_buckets
        }
        # Once per prompt and a few large operations per layer: worth capturing, not worth compiling.
        self.compress_graphs = {
            size: StaticGraph(self._compress_of(size), device, compiled=False, captured=not eager)
            for size in self.buckets
        }

    def warm_up(self, pool: Any = None) -> None:
        """Compile every graph that a prompt of any length may need."""
        self.used.fill_(1)
        for graph in (*self.chunk_graphs.values(), *self.compress_graphs.values()):
            graph.warm_up(pool)

    @torch.inference_mode()
    def load(self, past: SavedSequence) -> None:
        """Begin a prompt with the cache of a conversation so far."""
        self._held = None
        for mine, theirs in pairs(self.keys, self.values, past.keys, past.values):
            mine[:, : past.entries].copy_(theirs)

    @torch.inference_mode()
    def run_chunk(self, tokens: Sequence[int], start: int, ahead: int = 0) -> Tensor:
        """Read the next chunk of the prompt.

        Args:
            tokens: At most ``chunk`` tokens; fewer only at the end of the prompt.
            start: Entry of the staging cache for the first.
            ahead: What to add to entries to get true positions.

        Returns:
            Logits of the last token given, float32 ``[1, vocab]``.
        """
        self._held = self._hidden = None
        used = len(tokens)
        self.tokens[:used] = torch.tensor(tokens, dtype=torch.int64)
        self.tokens[used:] = 0
        self.start.fill_(start)
        self.ahead.fill_(ahead)
        self.used.fill_(used)
        size = next(size for size in self.chunk_graphs if size >= start + self.chunk)
        logits: Tensor
        logits, self._hidden = self.chunk_graphs[size]()
        return logits.clone()

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], most: int) -> list[TokenLogprobs]:
        """Log-probabilities of the tokens that follow those of the chunk read last; to be called right after it.

        Args:
            tokens: What follows the chunk's first token, its second, and so on; at most as many as it has.
            most: Most likely tokens to report beside each.
        """
        assert self._hidden is not None
        scored = []
        for start in range(
            0, len(tokens), SCORED_ROWS
        ):  # logits of a whole chunk would take more memory than the rest of its work
            some = list(tokens[start : start + SCORED_ROWS])
            logprobs = self.model.logits(self._hidden[start : start + len(some)]).log_softmax(-1)
            chosen = logprobs.gather(1, torch.tensor(some, device=self.device)[:, None])[:, 0].tolist()
            top, ids = (part.tolist() for part in logprobs.topk(most, -1))
            scored += [
                TokenLogprobs(token, value, dict(zip(ids[row], top[row], strict=True)))
                for row, (token, value) in enumerate(zip(some, chosen, strict=True))
            ]
        return scored

    def forget(self) -> None:
        """Trust nothing that has been read."""
        self._held = None

    def held(self, prompt: list[int], scored: int | None) -> tuple[Tensor, tuple[TokenLogprobs | None, ...]] | None:
        """What ``prompt`` said, if it is the one that was read last: it need not be read again.

        Args:
            prompt: Its tokens.
            scored: Most likely tokens that are wanted beside each of the prompt's; ``None`` if they are not scored.

        Returns:
            Logits of its last token, and the prompt's log-probabilities.
        """
        if self._held is None or self._held[0] != prompt:
            return None
        _, logits, (most, scores) = self._held
        if scored is None:
            return logits, ()
        return (logits, scores) if most == scored else None

    @torch.inference_mode()
    def finish(
        self,
        prompt: list[int],
        budget: CacheBudget,
        logits: Tensor,
        past: SavedSequence | None = None,
        scores: Scores = (None, ()),
    ) -> CompressedSequence:
        """Compress the prompt that has been read.

        Args:
            prompt: Its tokens, without those of ``past``.
            budget: The request's; at most the engine's. A policy of its own is computed outside the static graphs.
            logits: What the last chunk returned.
            past: The cache it began with. Only tokens read after it vote: the queries of those before are gone.
            scores: The prompt's log-probabilities, for the next request with the same prompt.
        """
        self._held = (prompt, logits, scores) if past is None else None
        before = 0 if past is None else past.entries
        length = before + len(prompt)
        plan = plan_prompt(length, budget, before)
        if plan.dropped == 0:  # nothing to choose: entry i is token i
            entry = torch.arange(budget.capacity, device=self.device)
            positions = torch.where(entry < plan.count, entry, -1).expand(self.keys[0].shape[0], -1)
            kept = [
                self._copied(CompressedKV(key[:, : budget.capacity], value[:, : budget.capacity], positions))
                for key, value in zip(self.keys, self.values, strict=True)
            ]
        elif not (budget.same_policy(self.budget) and budget.top_k <= self.budget.top_k):
            kept = self._compress(length, budget, plan_tensors([plan], self.device))
        else:
            self.plan.copy_(plan_tensors([plan], self.device))
            size = next(size for size in self.compress_graphs if size >= length)
            kept = self.compress_graphs[size]()
            if self.device.type == "cuda":  # a captured graph writes its result to the same place each time
                kept = [self._copied(one) for one in kept]
        keys, values, chosen = ([one[part] for one in kept] for part in range(3))
        values = keys if self.values is self.keys else values
        true = chosen if past is None else [past.true_positions(one, layer) for layer, one in enumerate(chosen)]
        position = length if past is None else len(past.tokens) + len(prompt)
        return CompressedSequence(keys, values, chosen, true, plan, position, logits)

    @torch.inference_mode()
    def telemetry(self, sequence: CompressedSequence) -> KeptTokens:
        """What was kept of the prompt that has been read, and how much attention went to it."""
        plan = sequence.plan
        tensors = plan_tensors([plan], self.device)
        mass, positions = [], []
        for layer, (window, keys) in enumerate(zip(self.window, self.keys, strict=True)):
            kept = sequence.chosen[layer][:, : plan.count]
            voters = window[None, :, -WINDOW:]
            shares = kept_attention(voters, keys[None, :, : plan.length], kept[None], tensors, scale=self.scale)
            mass.append(float(shares.mean()))
            positions.append(tuple(tuple(head) for head in sequence.positions[layer][:, : plan.count].tolist()))
        return KeptTokens(tuple(mass), tuple(positions))

    def _copied(self, kept: CompressedKV) -> CompressedKV:
        """A copy; values that are part of keys stay the same tensor."""
        keys = kept.keys.clone()
        return CompressedKV(keys, keys if self.values is self.keys else kept.values.clone(), kept.positions.clone())

    def _compress(self, size: int, budget: CacheBudget, plan: PlanTensors) -> list[CompressedKV]:
        """Compress all layers of a prompt of up to ``size`` tokens, to tensors without ``B``; plain tensor code."""
        kept = []
        for layer, (window, keys, values) in enumerate(zip(self.window, self.keys, self.values, strict=True)):
            read = keys[None, :, :size]
            out = compress(
                window[None, :, -budget.window :],
                read,
                read if values is keys else values[None, :, :size],
                plan,
                budget,
                scale=self.scale,
                layer=self.layers[layer],
            )
            kept.append(CompressedKV(out.keys[0], out.values[0], out.positions[0]))
        return kept

    def _chunk_of(self, size: int) -> Callable[[], tuple[Tensor, Tensor]]:
        """The function of one chunk that sees ``size`` tokens of the staging cache: last logits, hidden states."""
        model, backend, scale = self.model, self.backend, self.scale
        window = self.budget.queries
        keys, values, tails = self.keys, self.values, self.window
        rows = torch.arange(self.chunk, device=self.device)
        tail_rows = torch.arange(window, device=self.device)
        tokens, start, ahead, used = self.tokens, self.start, self.ahead, self.used

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            place = start + rows
            keys[layer].index_copy_(1, place, key.transpose(0, 1))
            if values is not keys:
                values[layer].index_copy_(1, place, value.transpose(0, 1))
            seen = torch.cat((tails[layer], query.transpose(0, 1)), 1)
            tails[layer].copy_(seen.index_select(1, used + tail_rows))
            return backend.prefill(query, keys[layer][:, :size], values[layer][:, :size], start, scale)

        def run() -> tuple[Tensor, Tensor]:
            hidden = model(tokens, start + ahead + rows, attend)
            return model.logits(hidden.index_select(0, (used - 1).view(1))), hidden

        return run

    def _compress_of(self, size: int) -> Callable[[], list[CompressedKV]]:
        """The function that compresses all layers of a prompt of up to ``size`` tokens."""
        return lambda: self._compress(size, self.budget, self.plan)


@torch.inference_mode()
def kept_shares(sequence: CompressedSequence) -> tuple[float, ...]:
    """How much of each of :data:`KEPT_PARTS` equal parts of a prompt was kept, averaged over layers and heads.

    Returns:
        Numbers between 0 and 1; all 1 if nothing was dropped.
    """
    length = sequence.position
    if length == sequence.plan.count:
        return (1.0,) * KEPT_PARTS
    device = sequence.keys[0].device
    positions = torch.stack([layer[:, : sequence.plan.count] for layer in sequence.positions])
    copies = positions.shape[0] * positions.shape[1]
    kept = torch.bincount(positions.flatten() * KEPT_PARTS // length, minlength=KEPT_PARTS)
    sizes = torch.bincount(torch.arange(length, device=device) * KEPT_PARTS // length, minlength=KEPT_PARTS)
    return tuple((kept / (sizes * copies).clamp(min=1)).tolist())


def staging_length(max_model_len: int, chunk: int, *, continued: bool) -> int:
    """Tokens the staging cache holds: whole chunks.

    Args:
        max_model_len: Longest sequence.
        chunk: Prompt tokens of one launch.
        continued: A prompt may begin after the entries of a saved cache, so that no chunk of it starts at a multiple.
    """
    return (-(-max_model_len // chunk) + continued) * chunk


def staging_buckets(padded: int, chunk: int) -> tuple[int, ...]:
    """Lengths for which graphs exist: doubling from one chunk, so that at most half of what is read is padding."""
    sizes = [chunk]
    while sizes[-1] < padded:
        sizes.append(min(2 * sizes[-1], padded))
    return tuple(sizes)

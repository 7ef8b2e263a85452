"""Prefill: one prompt at a time, in chunks of fixed size, then compressed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from snapstream.config import CacheBudget
from snapstream.engine.graphs import StaticGraph
from snapstream.engine.request import KeptTokens
from snapstream.models import LlamaModel

TELEMETRY_WINDOW = 32
"""Last prompt tokens whose attention telemetry measures, whatever a policy's window is; fewer if the engine's is."""


@dataclass(frozen=True)
class CompressedSequence:
    """The seam between prefill and decode: all that decoding needs of a prompt.

    Attributes:
        keys: Per layer, ``[N, C, D]``; ``C`` is the request's, at most the engine's.
        values: Per layer, ``[N, C, D]``.
        positions: Per layer, the prompt position of each entry, ``[N, C]``; -1 for padding.
        plan: ``base``, ``count`` and ``limit`` of its cache.
        position: True position of the next token.
        logits: Of the last prompt token, float32 ``[1, vocab]``; the first token is drawn from them.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    positions: Sequence[Tensor]
    plan: PromptPlan
    position: int
    logits: Tensor


class Prefill:
    """Owns the staging cache, which holds the one prompt that is being read."""

    def __init__(
        self,
        model: LlamaModel,
        backend: AttentionBackend,
        budget: CacheBudget,
        *,
        max_model_len: int,
        chunk: int,
        eager: bool,
    ) -> None:
        spec = model.spec
        parameter = model.embedding.weight
        device, dtype = parameter.device, parameter.dtype
        self.model, self.backend, self.budget = model, backend, budget
        self.chunk = chunk
        self.scale = spec.head_dim**-0.5
        self.device = device
        padded = staging_length(max_model_len, chunk)
        self.buckets = staging_buckets(padded, chunk)

        def tensors(*shape: int) -> list[Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.layers)]

        self.keys = tensors(spec.kv_heads, padded, spec.head_dim)
        self.values = tensors(spec.kv_heads, padded, spec.head_dim)
        # Queries of the last `window` tokens read so far; they outlive chunk borders.
        self.window = tensors(spec.heads, budget.window, spec.head_dim)
        self.tokens = torch.zeros(chunk, dtype=torch.int64, device=device)
        self.start = torch.zeros((), dtype=torch.int64, device=device)
        self.used = torch.zeros((), dtype=torch.int64, device=device)
        self.layers = torch.arange(spec.layers, device=device)
        self.plan = plan_tensors([plan_prompt(1, budget)], device)
        # The prompt that the staging cache holds in full, with its logits: requests for the same one share it.
        self._held: tuple[list[int], Tensor] | None = None
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
    def run_chunk(self, tokens: Sequence[int], start: int) -> Tensor:
        """Read the next chunk of the prompt.

        Args:
            tokens: At most ``chunk`` tokens; fewer only at the end of the prompt.
            start: Position of the first; a multiple of ``chunk``.

        Returns:
            Logits of the last token given, float32 ``[1, vocab]``.
        """
        self._held = None
        used = len(tokens)
        self.tokens[:used] = torch.tensor(tokens, dtype=torch.int64)
        self.tokens[used:] = 0
        self.start.fill_(start)
        self.used.fill_(used)
        size = next(size for size in self.chunk_graphs if size >= start + self.chunk)
        logits: Tensor = self.chunk_graphs[size]()
        return logits.clone()

    def held_logits(self, prompt: list[int]) -> Tensor | None:
        """Logits of the last token of ``prompt`` if it is the one that was read last: it need not be read again."""
        return self._held[1] if self._held is not None and self._held[0] == prompt else None

    @torch.inference_mode()
    def finish(self, prompt: list[int], budget: CacheBudget, logits: Tensor) -> CompressedSequence:
        """Compress the prompt that has been read.

        Args:
            prompt: Its tokens.
            budget: The request's; at most the engine's. A policy of its own is computed outside the static graphs.
            logits: What the last chunk returned.
        """
        self._held = (prompt, logits)
        length = len(prompt)
        plan = plan_prompt(length, budget)
        if plan.dropped == 0:  # nothing to choose: entry i is token i
            entry = torch.arange(budget.capacity, device=self.device)
            positions = torch.where(entry < plan.count, entry, -1).expand(self.keys[0].shape[0], -1)
            kept = [
                CompressedKV(key[:, : budget.capacity].clone(), value[:, : budget.capacity].clone(), positions)
                for key, value in zip(self.keys, self.values, strict=True)
            ]
        elif not self._same_policy(budget):
            kept = self._compress(length, budget, plan_tensors([plan], self.device))
        else:
            self.plan.copy_(plan_tensors([plan], self.device))
            size = next(size for size in self.compress_graphs if size >= length)
            kept = self.compress_graphs[size]()
            if self.device.type == "cuda":  # a captured graph writes its result to the same place each time
                kept = [CompressedKV(one.keys.clone(), one.values.clone(), one.positions.clone()) for one in kept]
        keys, values = [one.keys for one in kept], [one.values for one in kept]
        return CompressedSequence(keys, values, [one.positions for one in kept], plan, length, logits)

    @torch.inference_mode()
    def telemetry(self, sequence: CompressedSequence) -> KeptTokens:
        """What was kept of the prompt that has been read, and how much attention went to it."""
        plan = sequence.plan
        tensors = plan_tensors([plan], self.device)
        mass, positions = [], []
        for window, keys, chosen in zip(self.window, self.keys, sequence.positions, strict=True):
            kept = chosen[:, : plan.count]
            voters = window[None, :, -TELEMETRY_WINDOW:]
            shares = kept_attention(voters, keys[None, :, : plan.length], kept[None], tensors, scale=self.scale)
            mass.append(float(shares.mean()))
            positions.append(tuple(tuple(head) for head in kept.tolist()))
        return KeptTokens(tuple(mass), tuple(positions))

    def _same_policy(self, budget: CacheBudget) -> bool:
        """Whether the captured graphs, which are of the engine's policy, fit a request's budget."""
        mine = self.budget
        alike = replace(budget, recent=mine.recent, top_k=mine.top_k, ring=mine.ring) == mine
        return alike and budget.top_k <= mine.top_k

    def _compress(self, size: int, budget: CacheBudget, plan: PlanTensors) -> list[CompressedKV]:
        """Compress all layers of a prompt of up to ``size`` tokens, to tensors without ``B``; plain tensor code."""
        kept = []
        for layer, (window, keys, values) in enumerate(zip(self.window, self.keys, self.values, strict=True)):
            out = compress(
                window[None, :, -budget.window :],
                keys[None, :, :size],
                values[None, :, :size],
                plan,
                budget,
                scale=self.scale,
                layer=self.layers[layer],
            )
            kept.append(CompressedKV(out.keys[0], out.values[0], out.positions[0]))
        return kept

    def _chunk_of(self, size: int) -> Callable[[], Tensor]:
        """The function of one chunk that sees ``size`` tokens of the staging cache."""
        model, backend, scale = self.model, self.backend, self.scale
        window = self.budget.window
        keys, values, tails = self.keys, self.values, self.window
        rows = torch.arange(self.chunk, device=self.device)
        tail_rows = torch.arange(window, device=self.device)
        tokens, start, used = self.tokens, self.start, self.used

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            place = start + rows
            keys[layer].index_copy_(1, place, key.transpose(0, 1))
            values[layer].index_copy_(1, place, value.transpose(0, 1))
            seen = torch.cat((tails[layer], query.transpose(0, 1)), 1)
            tails[layer].copy_(seen.index_select(1, used + tail_rows))
            return backend.prefill(query, keys[layer][:, :size], values[layer][:, :size], start, scale)

        def run() -> Tensor:
            hidden = model(tokens, start + rows, attend)
            return model.logits(hidden.index_select(0, (used - 1).view(1)))

        return run

    def _compress_of(self, size: int) -> Callable[[], list[CompressedKV]]:
        """The function that compresses all layers of a prompt of up to ``size`` tokens."""
        return lambda: self._compress(size, self.budget, self.plan)


def staging_length(max_model_len: int, chunk: int) -> int:
    """Tokens the staging cache holds: whole chunks."""
    return -(-max_model_len // chunk) * chunk


def staging_buckets(padded: int, chunk: int) -> tuple[int, ...]:
    """Lengths for which graphs exist: doubling from one chunk, so that at most half of what is read is padding."""
    sizes = [chunk]
    while sizes[-1] < padded:
        sizes.append(min(2 * sizes[-1], padded))
    return tuple(sizes)

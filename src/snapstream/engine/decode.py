"""Decode: every slot in one graph, inside caches of fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from snapstream.attention import AttentionBackend
from snapstream.compression import PromptPlan, entry_of, next_slot
from snapstream.engine.conversation import SavedSequence, pairs
from snapstream.engine.graphs import StaticGraph
from snapstream.engine.prefill import CompressedSequence
from snapstream.engine.sampler import Sampled, SamplingState, impose, sample, sample_greedy
from snapstream.models import DecoderModel


class Decode:
    """Owns the slots: their caches ``[B, N, C, D]`` per layer and their state ``[B]``, on the device.

    The whole state of a sequence is ``(base, count, limit)`` and its position; see
    :mod:`snapstream.compression.layout`.
    """

    def __init__(
        self,
        model: DecoderModel,
        backend: AttentionBackend,
        *,
        capacity: int,
        slots: int,
        steps: int,
        max_logprobs: int,
        eager: bool,
    ) -> None:
        spec = model.spec
        parameter = model.embedding.weight
        device = parameter.device
        self.model, self.backend, self.slots = model, backend, slots
        self.scale = spec.scale

        def caches() -> list[Tensor]:
            shape = (slots, spec.kv_heads, capacity, spec.head_dim)
            return [torch.zeros(shape, dtype=parameter.dtype, device=device) for _ in range(spec.layers)]

        def column() -> Tensor:
            return torch.zeros(slots, dtype=torch.int64, device=device)

        self.keys = caches()
        self.values = self.keys if spec.values_in_keys else caches()
        self.token, self.position = column(), column()
        self.base, self.count, self.limit = column(), column(), column()
        self.active = torch.zeros(slots, dtype=torch.bool, device=device)
        # Tokens that the next steps of a launch must take, the next one first; -1 where the model is free.
        self.forced = torch.full((slots, steps), -1, dtype=torch.int64, device=device)
        self.sampling = SamplingState(slots, spec.vocab_size, max_logprobs, device)
        self._rows = torch.arange(slots, device=device)[:, None]
        self._heads = torch.arange(spec.kv_heads, device=device)[None]
        self.greedy_graph = StaticGraph(self._greedy_step, device, compiled=not eager, captured=not eager)
        self.sampling_graph = StaticGraph(self._sampling_step, device, compiled=not eager, captured=not eager)

    def warm_up(self, pool: Any = None) -> None:
        """Compile both graphs; all slots are free before and after."""
        self.greedy_graph.warm_up(pool)
        self.sampling_graph.warm_up(pool)

    @torch.inference_mode()
    def insert(self, slot: int, sequence: CompressedSequence, token: int, sampling: SamplingState) -> None:
        """Put a prefilled sequence into a free slot.

        Args:
            slot: Which.
            sequence: What prefill produced.
            token: Its first generated token, which the next step reads.
            sampling: State whose row 0 is the request's.
        """
        for mine, theirs in pairs(self.keys, self.values, sequence.keys, sequence.values):
            mine[slot][:, : theirs.shape[1]].copy_(theirs)  # a request's budget may be smaller than the slot
        self.token[slot] = token
        self.position[slot] = sequence.position
        self.base[slot] = sequence.plan.base
        self.count[slot] = sequence.plan.count
        self.limit[slot] = sequence.plan.limit
        self.sampling.copy_row(slot, sampling, 0)
        self.active[slot] = True

    @torch.inference_mode()
    def extract(
        self,
        slot: int,
        indices: Sequence[int],
        plan: PromptPlan,
        *,
        positions: Sequence[Tensor],
        tokens: Sequence[int],
        answer: str,
    ) -> SavedSequence:
        """Copy a sequence out of its slot, oldest entry first.

        Args:
            slot: Which.
            indices: Tokens to take, in the order they were stored in.
            plan: The sequence's layout.
            positions: Per layer, true positions of its prompt's entries, ``[N, C]``.
            tokens: See :class:`SavedSequence`.
            answer: See :class:`SavedSequence`.
        """
        device = self.token.device
        stored = torch.tensor(indices, dtype=torch.int64, device=device)
        entries = torch.tensor([entry_of(plan, index) for index in indices], dtype=torch.int64, device=device)
        from_end = int(self.position[slot]) - int(self.count[slot])  # a decoded token's position less its index
        of_prompt = stored < plan.count

        def true(prompt: Tensor) -> Tensor:
            return torch.where(of_prompt, prompt[:, stored.clamp(max=plan.count - 1)], stored + from_end).int()

        keys = [keys[slot].index_select(1, entries) for keys in self.keys]
        return SavedSequence(
            keys,
            keys if self.values is self.keys else [values[slot].index_select(1, entries) for values in self.values],
            [true(prompt) for prompt in positions],
            tuple(tokens),
            answer,
        )

    @torch.inference_mode()
    def release(self, slot: int) -> None:
        """Free a slot. Its entries stay where they are: an inactive slot has no valid ones."""
        self.active[slot] = False
        self.count[slot] = 0
        self.forced[slot] = -1  # a launch that broke off may have left some

    def launch(self, steps: int, *, greedy: bool, forced: dict[int, Sequence[int]] | None = None) -> list[Sampled]:
        """Decode ``steps`` tokens in every active slot, without the host looking in between.

        Args:
            steps: How many; at most the number given at construction.
            greedy: All active requests want the most likely token and nothing else.
            forced: Tokens that a slot must take, first step first; at most ``steps`` of them.

        Returns:
            Per step, tensors that are the caller's. With ``greedy`` only the tokens mean something.
        """
        for slot, tokens in (forced or {}).items():
            self.forced[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        graph = self.greedy_graph if greedy else self.sampling_graph
        return [Sampled(*(tensor.clone() for tensor in graph())) for _ in range(steps)]

    def _greedy_step(self) -> Sampled:
        tokens = impose(sample_greedy(self._logits()), self.forced[:, 0])
        self._advance(tokens)
        nothing = self.sampling.temperature
        return Sampled(tokens, nothing, tokens, nothing)

    def _sampling_step(self) -> Sampled:
        logits = self._logits()
        sampled = sample(logits, self.sampling, self.position + 1, self.active, self.forced[:, 0])
        self._advance(sampled.tokens)
        return sampled

    def _logits(self) -> Tensor:
        """Store each slot's token in its cache and attend to everything valid, the token included."""
        slot = next_slot(self.count, self.base, self.limit)[:, None]
        valid = torch.where(self.active, torch.minimum(self.count + 1, self.limit), 0)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.keys[layer].index_put_((self._rows, self._heads, slot), key)
            if self.values is not self.keys:
                self.values[layer].index_put_((self._rows, self._heads, slot), value)
            return self.backend.decode(query, self.keys[layer], self.values[layer], valid, self.scale)

        hidden = self.model(self.token, self.position, attend)
        return self.model.logits(hidden)

    def _advance(self, tokens: Tensor) -> None:
        self.forced.copy_(torch.cat((self.forced[:, 1:], torch.full_like(self.forced[:, :1], -1)), 1))
        step = self.active.to(torch.int64)
        self.token.copy_(torch.where(self.active, tokens, self.token))
        self.count.add_(step)
        self.position.add_(step)

"""Decode: all slots in one graph, inside caches of fixed size.

Where this package has kernels, a step is a list of operations. On a CPU, one launch of a native loop runs it for all
layers and several tokens. On CUDA, a whole step is captured as one graph and replayed for each token without waiting
for the host. Elsewhere torch's operations run it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from snapstream.attention import AttentionBackend
from snapstream.cache import CompressedSequence, LayerCache, dense_dtype, make_caches, no_positions
from snapstream.compression import (
    Layout,
    choose_entries,
    entry_of,
    lay_out_window,
    layout_tensors,
    surviving_tokens,
)
from snapstream.config import CacheBudget, LayerPrompt
from snapstream.engine.decode.evicted import Evicted
from snapstream.engine.decode.graphs import StaticGraph
from snapstream.engine.decode.lagging import Lagging
from snapstream.engine.decode.mtp import Mtp
from snapstream.engine.decode.programs import Programs
from snapstream.engine.decode.renewal import Placement
from snapstream.engine.decode.verification import Verification, most_tokens
from snapstream.engine.settings import Setup, Types
from snapstream.inference import in_inference_mode
from snapstream.kernels.buffers import Slots
from snapstream.kernels.sampling import Sampled, SamplingState, impose, sample, sample_greedy
from snapstream.models import DecoderModel
from snapstream.transfers import to_device


@dataclass(frozen=True)
class _Entries:
    """A selection of a slot's entries in the order they were stored: their index in that order, and their place."""

    stored: Tensor
    places: Tensor
    layout: Layout

    def positions(self, before: Tensor, position: int) -> Tensor:
        """True positions of the entries in one layer, int32.

        Args:
            before: True positions of the entries that existed when places were assigned, ``[N, count]``.
            position: True position of the next token at that time.
        """
        count = self.layout.count
        later = self.stored + position - count
        return torch.where(self.stored < count, before[:, self.stored.clamp(max=count - 1)], later).int()


class Decode:
    """Owns the slots on the device: their caches, ``[B, N, C, D]`` per layer, and their state.

    Besides, a sequence is its position and, per group of layers, ``(base, count, limit)``; see
    :mod:`snapstream.compression.layout`. A step never writes to inactive slots: prefill fills them layer by layer while
    other slots decode.
    """

    def __init__(
        self,
        model: DecoderModel,
        backend: AttentionBackend,
        *,
        types: Types,
        capacity: int,
        slots: int,
        steps: int,
        max_logprobs: int,
        eager: bool,
        guesses: int = 0,
        goes_on: bool = False,
        planned_for: torch.device | None = None,
    ) -> None:
        spec, device = model.spec, model.device
        sizes = most_tokens(guesses, planned_for or device)
        self.model, self.backend, self.slots = model, backend, slots
        self.scale = spec.scale

        def column(*groups: int) -> Tensor:
            return torch.zeros(*groups, slots, dtype=torch.int64, device=device)

        # The caches of the model's layers, and that of its next-token module.
        entries = [group.entries(capacity) for group in spec.groups]
        self.entry_type = types.cache
        self.layers = make_caches(spec.groups, entries, entry_type=types.cache, device=device, rows=slots)
        # The next token of each slot, and draft tokens after it.
        self.tokens = torch.zeros((slots, guesses + 1), dtype=torch.int64, device=device)
        self.token, self.position = self.tokens[:, 0], column()
        self.base, self.count, self.limit = (column(len(spec.groups)) for _ in range(3))
        self.active = torch.zeros(slots, dtype=torch.bool, device=device)
        self.drafted, self.accepted = column(), column()
        # Tokens that the next steps of a launch must take, the next one first; -1 where the model chooses.
        most = max(steps, guesses + 1)
        self.forced = torch.full((slots, most), -1, dtype=torch.int64, device=device)
        self.logits = torch.zeros(slots, spec.vocab_size, device=device)
        # Tokens taken by a launch of the native loop, or by a verification step.
        self.taken = torch.zeros((most, slots), dtype=torch.int64, device=device)
        self.sampling = SamplingState(slots, spec.vocab_size, max_logprobs, device, places=guesses + 1)
        state = Slots(
            token=self.tokens,
            position=self.position,
            base=self.base,
            count=self.count,
            limit=self.limit,
            active=self.active,
            forced=self.forced,
            taken=self.taken,
            drafted=self.drafted,
            accepted=self.accepted,
        )
        programs = Programs(model, backend, types.activations, self.layers, state, self.logits, self.sampling)
        self.program, self._reading = programs.step, programs.reading
        captured = not eager and self.program.captured
        self.mtp: Mtp | None = None
        if model.mtp is not None:
            self.mtp = Mtp(model, programs, slots, sizes=sizes, guesses=guesses, captured=captured)
        follow = None if self.mtp is None else self.mtp.follow
        self.verifications = {
            tokens: Verification(*programs.verification(tokens, follow), self.sampling, captured=captured)
            for tokens in sizes
        }
        self.evicted = Evicted(spec.groups, self.layers, most) if goes_on else None
        self.lagging = Lagging(spec, programs, self.layers, state, most) if goes_on and spec.has_states else None
        self.greedy_step = StaticGraph(self._greedy_step, device, captured=not eager)
        self.sampled_step = StaticGraph(self._sampled_step, device, captured=not eager)

    @classmethod
    def of(cls, setup: Setup, model: DecoderModel) -> Decode:
        """Build the slots of an engine."""
        config = setup.config
        return cls(
            model,
            setup.backend,
            types=setup.types,
            capacity=setup.budget.capacity,
            slots=config.slots,
            steps=config.decode_steps,
            guesses=config.guesses,
            max_logprobs=config.max_logprobs,
            eager=setup.eager,
            goes_on=config.goes_on,
            planned_for=setup.device,
        )

    @property
    def slot_bytes(self) -> int:
        """Bytes of the caches and states of all slots, and of what is kept besides for saved sequences."""
        kept = [each for each in (self.evicted, self.lagging) if each is not None]
        return sum(each.nbytes for each in (*self.layers, *kept))

    def warm_up(self, pool: Any = None) -> None:
        """Run and capture the graphs; all slots are free before and after."""
        for step in (self.greedy_step, self.sampled_step):
            step.warm_up(pool)
        for verification in self.verifications.values():
            verification.warm_up(pool)
        if self.mtp is not None:
            self.mtp.warm_up(pool)
        if self.lagging is not None:
            self.lagging.warm_up()

    @in_inference_mode
    def start(
        self,
        slot: int,
        layouts: Sequence[Layout],
        position: int,
        token: int,
        sampling: SamplingState | None,
        *,
        active: bool = True,
    ) -> None:
        """Start decoding a sequence whose cache is in its slot.

        Args:
            slot: Index of the slot.
            layouts: Per group of layers, the layout of the cache.
            position: True position of the next token.
            token: The next token, which is the input of the next step.
            sampling: Sampling state whose row 0 is the request's; ``None`` for plain greedy decoding.
            active: Whether launches decode the slot; if not, its sequence is only extracted later.
        """
        # fill_() rather than item assignment: assigning a Python number would wait for the GPU.
        self.token[slot].fill_(token)
        self.position[slot].fill_(position)
        for group, layout in enumerate(layouts):
            self.base[group, slot].fill_(layout.base)
            self.count[group, slot].fill_(layout.count)
            self.limit[group, slot].fill_(layout.limit)
        if sampling is not None:
            self.sampling.copy_row(slot, sampling, 0)
        if self.lagging is not None:
            self.lagging.begin(slot, position)
        self.active[slot].fill_(active)

    def slot(self, slot: int, layouts: Sequence[Layout]) -> list[LayerCache]:
        """Views of the entries in use of a slot's cache, one per layer, given the layouts of its groups."""
        counts = (layouts[self.model.spec.group_of(layer)].count for layer in range(len(self.layers)))
        return [layer.row(slot, count) for layer, count in zip(self.layers, counts, strict=True)]

    @in_inference_mode
    def put(self, slot: int, sequence: CompressedSequence) -> None:
        """Copy a sequence's cache into a free slot."""
        for mine, theirs in zip(self.layers, sequence.layers, strict=True):
            mine.row(slot).put(theirs, len(sequence.tokens))

    @in_inference_mode
    def extract(
        self,
        slot: int,
        indices: Sequence[int],
        placement: Placement,
        position: int,
        *,
        tokens: Sequence[int],
        answer: str,
        logits: Tensor | None,
        budget: CacheBudget,
    ) -> CompressedSequence:
        """Copy a sequence out of its slot, oldest entry first.

        Args:
            slot: Index of the slot.
            indices: In layers with a budget, tokens to take, by their index in the order they were stored.
            placement: When their places were last assigned, with true positions.
            position: True position of the next token at that time.
            tokens: See :class:`CompressedSequence`.
            answer: See :class:`CompressedSequence`.
            logits: See :class:`CompressedSequence`.
            budget: See :class:`CompressedSequence`.
        """
        groups, known, layouts = self.model.spec.groups, dict[int, Tensor](), list[Layout]()
        counts = [len(indices) if group.window is None else min(len(tokens), group.window) for group in groups]
        layers = make_caches(groups, counts, entry_type=self.entry_type, device=self.token.device)
        for number, group in enumerate(groups):
            if group.has_budget:
                taken = self._entries(indices, placement.layout)
                layouts.append(placement.layout.turned_to(len(indices)))
                for layer in group.layers:
                    layers[layer].put(self.layers[layer].take(slot, taken.places))
                    known[layer] = taken.positions(placement.positions[layer], position)
                continue
            assert self.evicted is not None
            assert group.window is not None
            layouts.append(lay_out_window(len(tokens), group.window))
            if group.has_state:
                assert self.lagging is not None
                self.lagging.states(slot, len(tokens), layers)
                known |= {layer: no_positions(self.token.device) for layer in group.layers}
                continue
            last = range(layouts[-1].dropped, len(tokens))
            # A launch may have stored more tokens.
            stored, count = int(self.position[slot]), int(self.count[number, slot])
            true = torch.arange(last.start, last.stop, dtype=torch.int32, device=self.token.device)
            for layer in group.layers:
                layers[layer].put(self.evicted.window(layer, slot, group.window, last, stored, count))
                known[layer] = true.expand(group.entry.heads, -1)
        return CompressedSequence(
            groups=groups,
            layers=layers,
            positions=[known[layer] for layer in range(len(self.layers))],
            layouts=tuple(layouts),
            tokens=tuple(tokens),
            logits=logits,
            budget=budget,
            answer=answer,
        )

    @in_inference_mode
    def renew(
        self,
        slot: int,
        placement: Placement,
        decoded: int,
        position: int,
        budget: CacheBudget,
    ) -> Placement:
        """Reassign the pinned places of a full slot, between two launches; see :mod:`snapstream.engine.decode.renewal`.

        Args:
            slot: Index of the slot.
            placement: Placement of its entries until now.
            decoded: Tokens that have been decoded and stored.
            position: True position of the next token at the time of ``placement``.
            budget: The sequence's budget.

        Returns:
            The new placement. True positions of layers with a window are as they were.
        """
        count, after = placement.count(decoded), placement.renewed(decoded, budget)
        layout, chosen_by = after.layout, after.choice()
        laid_out = layout_tensors([layout], self.token.device)
        aged = self._entries(surviving_tokens(placement.layout, count, count), placement.layout)
        with_budget = [group for group in self.model.spec.groups if group.has_budget]
        moved = list(placement.positions)
        for number in (layer for group in with_budget for layer in group.layers):
            layer = self.layers[number]
            mine = layer.take(slot, aged.places)
            keys = mine.converted(dense_dtype(mine.entry_type)).keys
            shown = LayerPrompt(keys[:, :, :0], keys, None, laid_out, chosen_by.sink, self.scale, number)
            chosen = choose_entries(shown, chosen_by)[0]
            mine.gather(chosen, layer.row(slot, layout.limit))
            if moved:
                moved[number] = aged.positions(moved[number], position).gather(1, chosen)
        self.base[: len(with_budget), slot].fill_(layout.base)
        self.count[: len(with_budget), slot].fill_(layout.count)
        return replace(after, positions=moved)

    def _entries(self, indices: Sequence[int], layout: Layout) -> _Entries:
        device = self.token.device
        return _Entries(to_device(indices, device), to_device([entry_of(layout, at) for at in indices], device), layout)

    @in_inference_mode
    def release(self, slot: int) -> None:
        """Free a slot. Its entries are not cleared: an inactive slot has no valid ones."""
        self.active[slot].fill_(False)
        self.count[:, slot].fill_(0)
        self.forced[slot].fill_(-1)  # an interrupted launch may have left some

    @in_inference_mode
    def allow(self, masks: Mapping[int, Tensor]) -> None:
        """Set the tokens that grammars allow.

        Args:
            masks: By slot, one bit per token for the next token and those after draft tokens, int32 ``[T, words]``. In
                a launch, the first mask holds for all its tokens, except forced ones.
        """
        for slot, mask in masks.items():
            self.sampling.allowed[: len(mask), slot].copy_(mask)

    def launch(
        self,
        steps: int,
        *,
        greedy: bool,
        logprobs: bool = False,
        forced: dict[int, Sequence[int]] | None = None,
        keep: bool = False,
    ) -> list[Sampled]:
        """Decode ``steps`` tokens in every active slot without synchronizing with the host in between.

        Args:
            steps: Number of tokens; at most the number given at construction.
            greedy: Whether all active requests want the most likely token and nothing else.
            logprobs: Whether any active request wants log-probabilities.
            forced: Tokens that a slot must take, by slot, first step first; at most ``steps`` of them.
            keep: Whether any active sequence will be extracted.

        Returns:
            Per step, tensors that the caller owns. Without ``logprobs``, only ``tokens`` is meaningful.
        """
        self._force(forced)
        self._keep_evicted(keep)
        if self.program.draws and not logprobs:
            self.program.run(steps)
            return [self._only_tokens(tokens.clone()) for tokens in self.taken[:steps]]
        if greedy:
            return [self._only_tokens(self.greedy_step().clone()) for _ in range(steps)]
        return [Sampled(*(tensor.clone() for tensor in self.sampled_step())) for _ in range(steps)]

    def verify(
        self,
        guesses: dict[int, Sequence[int]],
        *,
        greedy: bool,
        forced: dict[int, Sequence[int]] | None = None,
        keep: bool = False,
    ) -> tuple[list[Sampled], Tensor]:
        """Process the next token of every active slot together with draft tokens, and keep the correct ones.

        Args:
            guesses: Draft tokens by slot; at most the number given at construction, possibly none.
            greedy: See :meth:`launch`.
            forced: Tokens that a slot must take, by slot; at most one more than it has draft tokens.
            keep: See :meth:`launch`.

        Returns:
            Per place, the tokens taken, in the form :meth:`launch` returns; and how many of them are accepted, int64
            ``[B]``.
        """
        verification = self._put_guesses(guesses)
        self._force(forced)
        self._keep_evicted(keep)
        step = verification.sampled() if not greedy else [self._only_tokens(each) for each in verification.greedy()]
        return step, self.accepted.clone()

    @in_inference_mode
    def read(self, tokens: Mapping[int, Sequence[int]], *, certain: bool) -> Tensor:
        """Process given tokens in inactive slots; a draft model uses this to follow the large model.

        Args:
            tokens: Tokens by slot, at least one each and at most as many as a verification step takes.
            certain: Whether to store them. If not, the next call starts where this one started.

        Returns:
            The most likely token after the last given one, int64 ``[B]``; meaningless for other slots.
        """
        given, device = [tokens.get(slot, (0,)) for slot in range(self.slots)], self.token.device
        self.active.copy_(to_device([slot in tokens for slot in range(self.slots)], device, torch.bool))
        self.token.copy_(to_device([each[0] for each in given], device))
        following = {slot: each[1:] for slot, each in tokens.items()}
        step = self._put_guesses(following)
        self._force(following)
        taken = step.greedy() if certain else step.look()
        self.active.fill_(False)
        if not certain:
            self.forced.fill_(-1)
        return taken.gather(0, to_device([[len(each) - 1 for each in given]], device))[0]

    def _put_guesses(self, guesses: dict[int, Sequence[int]]) -> Verification:
        """Copy draft tokens to the device; returns the smallest verification step that fits them."""
        most = max(map(len, guesses.values()))
        # A single copy: how many draft tokens each slot has, and which.
        rows = [[len(mine), *mine] for mine in (guesses.get(slot, ()) for slot in range(self.slots))]
        given = to_device([row + [0] * (most + 1 - len(row)) for row in rows], self.token.device)
        self.drafted.copy_(given[:, 0])
        self.tokens[:, 1 : most + 1].copy_(given[:, 1:])
        return self.verifications[min(size for size in self.verifications if size > most)]

    def _keep_evicted(self, keep: bool) -> None:
        if keep and self.evicted is not None:
            self.evicted.before_launch(self.position, self.count)
        if keep and self.lagging is not None:
            self.lagging.before_launch()

    def _force(self, forced: dict[int, Sequence[int]] | None) -> None:
        for slot, tokens in (forced or {}).items():
            self.forced[slot, : len(tokens)] = to_device(tokens, self.token.device)

    def _read_tokens(self) -> None:
        """Store each slot's token in its cache and attend to all valid entries, the token included; leaves logits."""
        self.program.run(last=self._reading)

    def _greedy_step(self) -> Tensor:
        self._read_tokens()
        tokens = impose(sample_greedy(self.logits, self.sampling, self.active), self.forced[:, 0])
        self._advance(tokens)
        return tokens

    def _only_tokens(self, tokens: Tensor) -> Sampled:
        nothing = self.sampling.temperature
        return Sampled(tokens, nothing, tokens, nothing)

    def _sampled_step(self) -> Sampled:
        self._read_tokens()
        sampled = sample(self.logits, self.sampling, self.position + 1, self.active, self.forced[:, 0])
        self._advance(sampled.tokens)
        return sampled

    def _advance(self, tokens: Tensor) -> None:
        self.forced.copy_(torch.cat((self.forced[:, 1:], torch.full_like(self.forced[:, :1], -1)), 1))
        step = self.active.to(torch.int64)
        self.token.copy_(torch.where(self.active, tokens, self.token))
        self.count.add_(step)
        self.position.add_(step)

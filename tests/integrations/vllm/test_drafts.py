"""Drafts of speculative decoding: whole lives of sequences, with a memory that remembers which token lies where."""

import random

import numpy as np
import pytest
import torch

from snapstream.config import CacheBudget
from snapstream.integrations.vllm.pages import lay_out_pages
from snapstream.integrations.vllm.step import Sequences
from tests.integrations.vllm.test_step import Metadata

DRAFTS = 5
BUDGETS = [
    CacheBudget(sink=3, recent=20, top_k=9, window=6),
    CacheBudget(sink=3, recent=20, top_k=9, window=6, policy="snapstream"),  # selects from no prompt that fits
    CacheBudget(sink=3, recent=20, top_k=9, window=6, ring="paper"),
    CacheBudget(sink=2, recent=3, top_k=11, window=2, ring="paper"),  # a ring shorter than the drafts of a step
]


class Life:
    """One sequence: what the scheduler allocates, what vLLM computes, and a memory of slots."""

    def __init__(self, rng, length, budget, *, manager, kernel, shares, at_end, arrives=False):
        self.rng, self.length, self.manager, self.kernel, self.arrives = rng, length, manager, kernel, arrives
        self.layout = lay_out_pages(length, budget, manager, shares=shares, arrives=arrives, drafts=DRAFTS)
        self.sequences = Sequences(budget, manager, shares=shares, drafts=DRAFTS)
        self.sequences.on_move.append(self.move)
        self.sequences.placing.at_end = at_end
        extra = {"kv_transfer_params": {"do_remote_prefill": True, "length": length}} if arrives else None
        self.sequences.admit("r", length + arrives, length + arrives, extra)
        self.blocks, self.memory, self.moved, self.published = [], {}, 0, set()
        limit, base = self.layout.prompt.limit, self.layout.prompt.base
        self.kept = [*range(base), *range(length - (limit - base), length)] if length > limit else [*range(length)]

    def allocate(self, tokens):
        while len(self.blocks) < self.layout.blocks(tokens):
            block = self.rng.randrange(1, 9999)
            if block not in self.blocks:
                self.blocks.append(block)

    def table(self):
        parts = self.manager // self.kernel
        return torch.tensor([[block * parts + part for block in self.blocks for part in range(parts)]])

    def address(self, table, token):
        return int(table[0, token // self.kernel]) * self.kernel + token % self.kernel

    def move(self, block_size, sources, targets):
        assert block_size == self.kernel
        assert len(set(targets.tolist())) == len(targets)  # stores of a device have no order
        moved = [self.memory[slot] for slot in sources.tolist()]
        self.memory |= dict(zip(targets.tolist(), moved, strict=True))
        self.moved += len(moved)

    def step(self, computed, tokens):
        """Compute `tokens`; returns what each of them sees."""
        size = len(tokens)
        self.allocate(computed + size)
        table = self.table()
        self.sequences.begin(["r"], np.array([computed]), np.array([size]))
        step = self.sequences.step
        places = [self.address(table, computed + i) for i in range(size)] if computed < self.length else [-1] * size
        old = Metadata(torch.tensor([computed + size]), computed + size, table, torch.tensor(places))
        new = step.rewrite(old, self.kernel, self.manager)
        written = old.slot_mapping.tolist()
        assert not self.published.intersection(written)
        self.memory |= dict(zip(written, tokens, strict=True))
        assert -1 not in self.memory
        used = int(new.seq_lens[0])
        entries = [self.memory[self.address(new.block_table_tensor, entry)] for entry in range(used)]
        for window in step.windows:
            if self.layout.compressed:  # which ones does not matter here: those that a prompt of zeros would keep
                assert window.stop <= self.length - computed
                unused = self.layout.copied_entries - len(self.kept)
                chosen = [*self.kept, *[0] * unused] if window.last else []
            else:
                chosen = range(self.layout.copied_entries)
            if window.last:
                target = step.targets["r"]
                copied = [
                    self.memory.get(int(target.blocks[i // self.kernel]) * self.kernel + i % self.kernel)
                    for i in chosen
                ]
                self.memory |= dict(zip(target.slots.tolist(), copied, strict=True))
        return [entries[: used - size + 1 + i] for i in range(size)]

    def settle(self, computed):
        """So many tokens are certain: blocks in front of a copy go, and full ones are published where others share."""
        if self.layout.has_moved(computed):
            for block in self.blocks[: self.layout.front_blocks]:
                for slot in range(block * self.manager, (block + 1) * self.manager):
                    self.memory.pop(slot, None)
        elif self.layout.shares:
            whole = self.layout.shareable(computed) // self.manager
            self.published = {b * self.manager + i for b in self.blocks[:whole] for i in range(self.manager)}


def visible(layout, tokens):
    """What a cache holds after `tokens` were stored one by one."""
    if len(tokens) <= layout.limit:
        return tokens
    return tokens[: layout.base] + tokens[-(layout.limit - layout.base) :]


@pytest.mark.parametrize(("manager", "kernel"), [(16, 16), (32, 16), (8, 8), (2, 2)])
@pytest.mark.parametrize("budget", BUDGETS, ids=["elastic", "elastic, snapstream", "paper", "short ring"])
@pytest.mark.parametrize("shares", [True, False], ids=["shares", "alone"])
@pytest.mark.parametrize("at_end", [True, False], ids=["at the end", "in the ring"])
def test_a_life_with_drafts(manager, kernel, budget, shares, at_end):
    """What is certain sees what it would see without drafts, and the n-th draft n entries more where the ring turns."""
    rng = random.Random(f"{manager}{kernel}{budget}{shares}{at_end}")
    moved = 0
    for _ in range(40):
        length = rng.randrange(1, 90)
        arrives = rng.random() < 0.3
        life = Life(rng, length, budget, manager=manager, kernel=kernel, shares=shares, at_end=at_end, arrives=arrives)
        prompt = life.layout.prompt
        computed = 0
        if arrives:  # its entries were written before the first step
            life.allocate(length)
            table = life.table()
            life.memory |= {life.address(table, entry): token for entry, token in enumerate(life.kept)}
            computed = length
        while computed < length:
            size = rng.randrange(1, min(length - computed, 40) + 1)
            padded = DRAFTS if computed + size == length and size == 1 and rng.random() < 0.5 else 0
            seen = life.step(computed, [*range(computed, computed + size), *["wrong"] * padded])
            assert seen[:size] == [list(range(computed + i + 1)) for i in range(size)]
            computed += size
            life.settle(computed)

        stored = list(life.kept)  # every token that was ever put into the cache, oldest first
        while computed < length + 90:
            drafts, right = rng.randrange(DRAFTS + 1), 0
            right = rng.randrange(drafts + 1)
            tokens = [*range(computed, computed + 1 + right), *["wrong"] * (drafts - right)]
            seen = life.step(computed, tokens)
            for i in range(right + 1):
                assert sorted(seen[i]) == sorted(visible(prompt, [*stored, tokens[0]]) + tokens[1 : i + 1])
                if at_end:  # kernels may take them from the batch
                    assert seen[i][-i - 1 :] == tokens[: i + 1]
                if len(stored) + i < prompt.limit:  # room: as without drafts
                    assert seen[i] == [*stored, *tokens[: i + 1]]
            stored += tokens[: right + 1]
            computed += right + 1
            life.settle(computed)
        moved += life.moved
    assert moved > 100


def test_a_sequence_that_loses_its_blocks_forgets_its_drafts():
    budget = BUDGETS[0]
    sequences = Sequences(budget, 16, shares=False, drafts=DRAFTS)
    sequences.placing.at_end = True
    sequences.admit("r", 60, 60, None)
    sequences.begin(["r"], np.array([60]), np.array([4]))
    sequences.begin(["r"], np.array([62]), np.array([4]))
    assert budget.capacity in sequences.step.moves.sources.tolist()  # one draft was right
    sequences.begin(["r"], np.array([62]), np.array([4]))  # a step that came to nothing is done again
    assert not len(sequences.step.moves.sources)
    sequences.pause(["r"])
    sequences.resume("r", 6)
    sequences.begin(["r"], np.array([66]), np.array([1]))
    assert sequences.step.moves.sources.tolist() == [budget.capacity - 1]  # makes place for a certain token


def test_blocks_for_drafts():
    """Room for a step's drafts costs at most the blocks that hold them."""
    budget = CacheBudget.of(64)
    for drafts in (0, 1, 16, 17):
        layout = lay_out_pages(200, budget, 16, shares=True, drafts=drafts)
        assert layout.cache_blocks == 4 + -(-drafts // 16)
        assert layout.front_blocks == -(-(200 + drafts) // 16)
    for tokens in range(1, 200):  # a prompt that fits grows as ever, and then into that room
        layout = lay_out_pages(10, budget, 16, shares=False, drafts=5)
        assert layout.blocks(tokens) == min(-(-tokens // 16), 5)

"""Rewriting a batch's metadata, against lists of what each sequence holds; no vLLM needed."""

import dataclasses
import random
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from snapstream.config import CacheBudget
from snapstream.integrations.vllm.pages import blocks_for, lay_out_pages
from snapstream.integrations.vllm.step import Sequences


@dataclass
class Metadata:
    """The fields of vLLM's CommonAttentionMetadata that are touched, in their several releases' spellings."""

    seq_lens: torch.Tensor
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    _seq_lens_cpu: torch.Tensor | None = None
    _num_computed_tokens_cpu: torch.Tensor | None = None
    _num_computed_tokens_cache: torch.Tensor | None = None


BUDGET = CacheBudget(sink=3, recent=20, top_k=9, window=6, policy="mixed")


def batch(rng, manager, kernel, budget):
    """Random requests in random phases: ids, computed, scheduled, block table in the kernel's blocks."""
    sequences = Sequences(budget, manager, shares=rng.random() < 0.5)
    rows, computed, scheduled, layouts = [], [], [], []
    for number in range(rng.randrange(1, 7)):
        length = rng.randrange(1, 120)
        sequences.admit(f"r{number}", length, length, None)
        layouts.append(lay_out_pages(length, budget, manager, shares=sequences.shares))
        if rng.random() < 0.5:
            computed.append(rng.randrange(length))
            scheduled.append(rng.randrange(1, length - computed[-1] + 1))
        else:
            computed.append(length + rng.randrange(90))
            scheduled.append(1)
        rows.append(f"r{number}")
    width = 80 * manager // kernel
    ids = torch.tensor(rng.sample(range(1, 10_000), len(rows) * width), dtype=torch.int32).view(len(rows), width)
    return sequences, rows, np.array(computed, np.int32), np.array(scheduled, np.int32), layouts, ids


def address(row, token, size):
    return int(row[token // size]) * size + token % size


@pytest.mark.parametrize(("manager", "kernel"), [(16, 16), (32, 16), (8, 8)])
@pytest.mark.parametrize("ring", ["elastic", "paper"])
def test_equals_the_life_of_each_sequence(manager, kernel, ring):
    rng = random.Random(manager * 100 + kernel)
    budget = CacheBudget.parse(BUDGET.as_dict() | {"ring": ring})
    for _ in range(60):
        sequences, rows, computed, scheduled, layouts, table = batch(rng, manager, kernel, budget)
        sequences.begin(rows, computed, scheduled)
        total = int(scheduled.sum())
        after = torch.from_numpy(computed + scheduled)
        old = Metadata(
            seq_lens=after.clone(),
            max_seq_len=int(after.max()),
            block_table_tensor=table.clone(),
            slot_mapping=torch.full((total + 3,), -1, dtype=torch.int64),
            seq_lens_cpu_upper_bound=after.clone(),
            _seq_lens_cpu=after.clone(),
            _num_computed_tokens_cpu=torch.from_numpy(computed.copy()),
            _num_computed_tokens_cache=after.clone(),
        )
        new = sequences.step.rewrite(old, kernel, manager)
        assert torch.equal(old.seq_lens, after)  # vLLM's own buffers stay as they are
        assert torch.equal(old.block_table_tensor, table)
        start, lengths = 0, []
        for row, layout in enumerate(layouts):
            prompt, front = layout.prompt, layout.front_blocks * manager if layout.has_moved(computed[row]) else 0
            if computed[row] < prompt.length:  # prefill: untouched
                lengths.append(int(after[row]))
                assert torch.equal(new.block_table_tensor[row], table[row])
                assert (old.slot_mapping[start : start + scheduled[row]] == -1).all()
            else:
                entries = list(range(prompt.count))  # where each stored token lies, oldest first
                for token in range(prompt.count, prompt.count + computed[row] - prompt.length + 1):
                    turn = (token - prompt.base) % max(1, prompt.limit - prompt.base)
                    entries.append(token if token < prompt.limit else prompt.base + turn)
                used = len(set(entries))
                lengths.append(used)
                assert int(old.slot_mapping[start]) == address(table[row], front + entries[-1], kernel)
                blocks = blocks_for(used, kernel)
                want = table[row, front // kernel : front // kernel + blocks]
                assert torch.equal(new.block_table_tensor[row, :blocks], want)
            start += scheduled[row]
        assert new.seq_lens.tolist() == lengths
        assert new.max_seq_len == max(lengths)
        if (computed >= [p.prompt.length for p in layouts]).any():
            assert new.seq_lens_cpu_upper_bound.tolist() == new._seq_lens_cpu.tolist() == lengths
            assert (new._num_computed_tokens_cpu == torch.tensor(lengths) - torch.from_numpy(scheduled)).all()
            assert new._num_computed_tokens_cache is None


@pytest.mark.parametrize(("manager", "kernel"), [(16, 16), (32, 16)])
@pytest.mark.parametrize("budget", [BUDGET, CacheBudget(sink=3, recent=20, top_k=9)], ids=["mixed", "spans"])
def test_every_window_is_seen_whole_and_once(manager, kernel, budget):
    """Chunks of any size: their parts join to the last W tokens, and the last one knows where to write."""
    rng = random.Random(manager + kernel)
    for _ in range(80):
        length = rng.randrange(max(33, budget.window + 1), 180)
        sequences = Sequences(budget, manager, shares=True)
        sequences.admit("r", length, length, None)
        layout = lay_out_pages(length, budget, manager, shares=True)
        table = torch.tensor([rng.sample(range(1, 999), 40)], dtype=torch.int32)
        seen, computed = [], rng.randrange(length - budget.window + 1)
        while computed < length:
            size = rng.choice([1, 2, 5, 40])
            size = min(size, length - computed)
            sequences.begin(["r"], np.array([computed]), np.array([size]))
            sequences.step.rewrite(
                Metadata(torch.tensor([computed + size]), 0, table, torch.zeros(size)), kernel, manager
            )
            for window in sequences.step.windows:
                seen += [computed + i for i in range(window.start, window.stop)]
                assert window.last == (computed + size == length)
                if window.last:
                    target = sequences.step.targets["r"]
                    assert target.blocks.tolist() == table[0, : blocks_for(length, kernel)].tolist()
                    front = layout.front_blocks * manager
                    want = [address(table[0], front + entry, kernel) for entry in range(layout.prompt.limit)]
                    assert target.slots.tolist() == want
            computed += size
        assert seen == list(range(length - budget.window, length))


def test_requests_come_back_longer_and_with_their_own_budget():
    forgotten = []
    sequences = Sequences(BUDGET, 16, shares=False)
    sequences.on_forget.append(forgotten.append)
    sequences.admit("r", 50, 50, {"kv_budget": 30})
    sequences.begin(["r"], np.array([50]), np.array([1]))
    assert sequences.step.placed.used.tolist() == [30]
    sequences.pause(["r"])
    sequences.resume("r", 7)
    sequences.begin(["r"], np.array([40]), np.array([17]))
    assert [window.layout.prompt.length for window in sequences.step.windows] == [57]
    assert sequences.step.windows[0].layout.budget.capacity == 30
    sequences.end()
    assert sequences.step is None
    sequences.forget(["r", "unknown"])
    assert forgotten.count("r") >= 2


@pytest.mark.parametrize("manager", [8, 16])
def test_a_full_cache_moves_once_and_only_where_blocks_are_shared(manager):
    """A prompt that fits is copied out in the step that fills its cache, be it prefill or decoding."""
    budget = dataclasses.replace(BUDGET, policy=CacheBudget.preset("snapstream", 32).policy)
    limit = budget.capacity
    table = torch.tensor([random.Random(manager).sample(range(1, 999), 40)], dtype=torch.int32)
    for length in (1, 20, limit - 1, limit):
        for shares in (True, False):
            sequences = Sequences(budget, manager, shares=shares)
            sequences.admit("r", length, length, None)
            moved = []
            for computed in [0, *range(length, limit + 40)]:
                size = length if computed == 0 else 1
                sequences.begin(["r"], np.array([computed]), np.array([size]))
                metadata = Metadata(torch.tensor([computed + size]), 0, table.clone(), torch.zeros(size))
                sequences.step.rewrite(metadata, manager, manager)
                for window in sequences.step.windows:
                    moved.append(computed + size)
                    assert window.last
                    assert window.start == window.stop  # nothing is voted on
                    target = sequences.step.targets["r"]
                    front = blocks_for(limit, manager)
                    assert target.blocks.tolist() == table[0, :front].tolist()
                    want = [address(table[0], front * manager + entry, manager) for entry in range(limit)]
                    assert target.slots.tolist() == want
            assert moved == ([limit] if shares else [])


def decode_everything(sequences, lengths, computed, device="cpu", width=40):
    """A step in which all requests decode, and its metadata."""
    for number, length in enumerate(lengths):
        if computed == length + 1:
            sequences.admit(f"r{number}", length, length, None)
    sequences.begin(
        [f"r{n}" for n in range(len(lengths))], np.full(len(lengths), computed), np.ones(len(lengths), np.int64)
    )
    ids = torch.randperm(999)[: len(lengths) * width].view(len(lengths), width).to(torch.int32)
    after = torch.full((len(lengths),), computed + 1)
    return Metadata(after.to(device), computed + 1, ids.to(device), torch.zeros(len(lengths)).to(device))


def test_steps_that_only_decode_copy_no_tables():
    """The memory of one step serves the next, and a second group of layers in the same one."""
    sequences, places = Sequences(BUDGET, 16, shares=True), set()
    for computed in range(91, 96):
        metadata = decode_everything(sequences, [90, 90, 90], computed)
        with mock.patch.object(torch.Tensor, "copy_") as copied:
            one = sequences.step.rewrite(metadata, 16, 16)
            two = sequences.step.rewrite(metadata, 16, 16)
        assert not copied.called
        assert one.block_table_tensor is two.block_table_tensor
        assert torch.equal(one.block_table_tensor[:, :2], metadata.block_table_tensor[:, 6:8])
        places.add(one.block_table_tensor.data_ptr())
    assert len(places) == 1


class Copies(TorchDispatchMode):
    """Counts what goes from the host to the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        is_tensor = isinstance(result, torch.Tensor) and arguments and isinstance(arguments[0], torch.Tensor)
        if is_tensor and result.is_meta and not arguments[0].is_meta:
            self.count += 1
        return result


def test_a_step_sends_one_copy_and_waits_for_nothing():
    """On torch's meta device, where whatever needs a number fails; and one copy for each cache that is copied out."""
    sequences = Sequences(BUDGET, 16, shares=True)
    metadata = decode_everything(sequences, [90, 90, 90], 91, device="meta")
    with Copies() as copies:
        sequences.step.rewrite(metadata, 16, 16)
    assert copies.count == 1
    sequences.admit("new", 90, 90, None)
    sequences.begin(["r0", "new"], np.array([92, 80]), np.array([1, 10]))
    with Copies() as copies:
        sequences.step.rewrite(dataclasses.replace(metadata, slot_mapping=torch.zeros(11, device="meta")), 16, 16)
    assert set(sequences.step.targets) == {"new"}
    assert copies.count == 2

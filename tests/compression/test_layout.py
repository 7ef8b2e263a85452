from dataclasses import astuple, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snapstream.compression import lay_out, layout_tensors, next_entry
from snapstream.config import CacheBudget
from tests.reference import naive_compress


@st.composite
def budgets(draw):
    window = draw(st.integers(1, 6))
    return CacheBudget(
        sink=draw(st.integers(0, 5)),
        recent=window + draw(st.integers(0, 12)) + 15,
        top_k=draw(st.integers(0, 20)),
        window=window,
        pooling=draw(st.sampled_from(["avg", "max"])),
        kernel=draw(st.sampled_from([1, 3, 5])),
        normalize=draw(st.sampled_from(["all", "candidates"])),
        ring=draw(st.sampled_from(["elastic", "paper"])),
        policy="snapstream",
    )


@given(budgets(), st.integers(1, 90), st.integers(1, 150))
def test_ring_holds_what_the_naive_cache_holds(budget, length, decoded):
    """Any length below, at and above every boundary; decodes that wrap the ring several times."""
    scores = {p: float((p * 37) % 11) for p in range(budget.sink, length - budget.recent)}
    naive = naive_compress(None, torch.zeros(length, 1), budget, scores)
    layout = lay_out(length, budget)
    assert layout.count == len(naive.tokens())
    assert layout.count == min(length, layout.limit)
    entries = {i: token for i, token in enumerate(naive.tokens())}
    base, count, limit = layout.base, layout.count, layout.limit
    pinned_before = {i: entries[i] for i in range(min(base, count))}
    for position in range(length, length + decoded):
        slot = int(next_entry(torch.tensor([count]), torch.tensor([base]), torch.tensor([limit])))
        assert 0 <= slot < budget.capacity
        entries[slot] = position
        count += 1
        naive.append(position)
        assert sorted(entries) == list(range(min(count, limit)))  # valid entries are always a prefix
        assert sorted(entries.values()) == naive.tokens()
    assert {i: entries[i] for i in pinned_before} == pinned_before


@given(st.integers(16, 300), st.integers(1, 300), st.sampled_from(["spans", "mixed", "snapstream", "keydiff"]))
def test_a_prompt_that_leaves_room_for_recent_tokens_is_never_overwritten(capacity, length, policy):
    budget = CacheBudget.preset(policy, capacity)
    layout = lay_out(length, budget)
    assert layout.base == max(budget.sink, min(length, capacity - budget.recent))
    assert layout.limit == capacity
    assert layout.selects == (length > (capacity - budget.recent if budget.policy.pins_recent else capacity))
    renewed = lay_out(length, replace(budget, ring="resnap"))
    assert renewed.selects == (length > (renewed.base if budget.policy.pins_recent else capacity))


@pytest.mark.parametrize("ring", ["elastic", "paper"])
def test_nothing_is_lost_before_capacity_only_if_elastic(ring):
    budget = CacheBudget(sink=4, recent=16, top_k=12, window=8, ring=ring)
    layout = lay_out(10, budget)
    assert layout.limit == (32 if ring == "elastic" else 20)


def test_boundaries_by_hand():
    budget = CacheBudget(sink=4, recent=16, top_k=12, window=8)
    assert astuple(lay_out(1, budget))[2:5] == (4, 1, 32)
    assert astuple(lay_out(5, budget))[2:5] == (5, 5, 32)
    assert astuple(lay_out(15, budget))[2:5] == (15, 15, 32)
    assert astuple(lay_out(16, budget))[2:5] == (16, 16, 32)
    assert astuple(lay_out(17, budget))[2:5] == (16, 17, 32)
    assert astuple(lay_out(32, budget))[2:5] == (16, 32, 32)
    assert astuple(lay_out(33, budget))[2:5] == (16, 32, 32)
    assert lay_out(33, budget).dropped == 1


def test_plan_tensors_stack():
    budget = CacheBudget.of(64)
    layouts = [lay_out(n, budget) for n in (1, 64, 500)]
    stacked = layout_tensors(layouts)
    assert stacked.count.tolist() == [1, 64, 64]
    assert stacked.length.dtype == torch.int64

"""Pinned spans, against what their description says, token by token."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.compression import choose_entries, lay_out, layout_tensors, pinned_levels
from snapstream.config import CacheBudget, LayerPrompt
from snapstream.config.pins import MOST_SPANS, last_end, read_spans
from snapstream.errors import ConfigurationError
from tests.reference import naive_pins

POLICIES = ("spans", "snapstream", "mixed", "keydiff", "random")
D = 8


@st.composite
def spans(draw, length):
    start = draw(st.integers(0, length))
    return start, start + draw(st.integers(1, length))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_pinned_tokens_are_below_the_ring(data):
    length = data.draw(st.integers(2, 400), "length")
    budget = CacheBudget.preset(data.draw(st.sampled_from(POLICIES)), data.draw(st.integers(16, 200), "capacity"))
    pin = data.draw(st.lists(spans(length), min_size=1, max_size=5), "pin")
    budget = replace(budget, pin=pin, ring=data.draw(st.sampled_from(["elastic", "paper"])))
    layout, plain = lay_out(length, budget), lay_out(length, replace(budget, pin=()))
    certain, competing = naive_pins(budget, length)
    levels = pinned_levels(budget, length)
    assert {token for token, level in enumerate(levels.tolist()) if level == 2} == certain
    assert {token for token, level in enumerate(levels.tolist()) if level == 1} == competing
    assert layout.base >= plain.base
    assert layout.limit <= budget.capacity
    assert layout.limit - layout.base >= budget.recent
    if not layout.selects:  # token i is entry i
        assert all(token < layout.base for token in certain | competing)
        return
    generator = torch.Generator().manual_seed(length)
    queries, keys = (
        torch.randn(1, heads, rows, D, generator=generator) for heads, rows in ((4, min(64, length)), (2, length))
    )
    prompt = LayerPrompt(queries, keys, None, layout_tensors([layout]), budget.sink, 0.3, pinned=levels[None, None])
    positions = choose_entries(prompt, budget)[0]
    assert bool((positions[:, layout.count :] == -1).all())
    without = choose_entries(replace(prompt, pinned=None), budget)[0] if layout.dropped else None
    for head, kept in enumerate(positions[:, : layout.count].tolist()):
        assert len({*kept}) == layout.count
        assert kept[: budget.sink] == [*range(budget.sink)]
        fixed = {*kept[budget.sink : layout.base]}
        assert certain <= fixed
        # Those that compete get the rest of that half.
        assert len(fixed & (certain | competing)) >= min(budget.top_k // 2, len(certain | competing))
        assert kept[layout.base :] == sorted(kept[layout.base :])
        if without is not None and not fixed & competing:  # the others are what is chosen anyway, as far as they fit
            chosen = {*without[head, budget.sink : layout.base].tolist()}
            assert fixed - certain <= chosen | {*range(length - budget.recent, length)}


def test_competing_tokens_are_those_with_the_best_scores():
    budget = CacheBudget(sink=2, recent=6, top_k=8, policy="snapstream", window=2, kernel=1)
    budget = replace(budget, pin=((10, 13), (20, 40)))  # three certain ones, and one more
    layout, length = lay_out(60, budget), 60
    keys = torch.zeros(1, 1, length, D)
    keys[0, 0, :, 0] = torch.linspace(0, 1, length)
    keys[0, 0, 31, 0] = 5.0
    queries = torch.zeros(1, 1, 2, D)
    queries[..., 0] = 1.0
    shown = LayerPrompt(
        queries, keys, None, layout_tensors([layout]), 2, 1.0, pinned=pinned_levels(budget, 60)[None, None]
    )
    kept = choose_entries(shown, budget)[0, 0].tolist()
    assert kept == [0, 1, 10, 11, 12, 31, *range(50, 60)]


def test_batches_and_padding():
    """Rows of a batch do not affect each other."""
    budget = replace(CacheBudget.of(64), pin=((30, 40), (90, 95)))
    lengths, N = (100, 180), 2
    keys, queries = torch.randn(2, N, 180, D), torch.randn(2, 4, 64, D)
    levels = torch.stack([torch.nn.functional.pad(pinned_levels(budget, n), (0, 180 - n)) for n in lengths])[:, None]
    layouts = [lay_out(n, budget) for n in lengths]
    both = choose_entries(
        LayerPrompt(queries, keys, None, layout_tensors(layouts), budget.sink, 0.3, pinned=levels), budget
    )
    for row, layout in enumerate(layouts):
        alone = LayerPrompt(
            queries[row : row + 1],
            keys[row : row + 1, :, : layout.length],
            None,
            layout_tensors([layout]),
            budget.sink,
            0.3,
            pinned=levels[row : row + 1, :, : layout.length],
        )
        assert torch.equal(choose_entries(alone, budget)[0], both[row])


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ([], ()),
        ([(0, 3), [5, 9]], ((0, 3), (5, 9))),
        (["0:3", "12:40", (0, 3)], ((0, 3), (12, 40))),
        ("7:8", ((7, 8),)),
    ],
)
def test_spans_are_read(given, read):
    assert read_spans(given) == read
    assert CacheBudget(4, 32, 28, pin=given).pin == read


@pytest.mark.parametrize(
    "given",
    [5, None, [5], [(3, 3)], [(-1, 3)], [(1, 2, 3)], ["a:b"], ["1:2:3"], ["-1:2"], [(0.0, 2)], [(True, 2)], "x"],
)
def test_bad_spans_are_refused(given):
    with pytest.raises(ConfigurationError, match="pin"):
        read_spans(given)


def test_there_are_not_too_many():
    read_spans([(i, i + 1) for i in range(MOST_SPANS)])
    with pytest.raises(ConfigurationError, match="257 spans"):
        read_spans([(i, i + 1) for i in range(MOST_SPANS + 1)])


def test_a_budget_with_pins_survives_json():
    budget = replace(CacheBudget.preset("mixed", 256), pin=((4, 9), (0, 2)))
    assert CacheBudget.parse(budget.as_dict()) == budget
    assert CacheBudget.parse({"capacity": 256, "pin": ["4:9"]}).pin == ((4, 9),)
    assert "pin" not in CacheBudget.of(256).as_dict()


def test_a_cache_without_selected_tokens_has_no_places():
    budget = replace(CacheBudget.preset("streaming", 64), pin=((10, 20),))
    assert lay_out(200, budget) == lay_out(200, CacheBudget.preset("streaming", 64))


def test_ends():
    assert last_end([(3, 9), (20, 30)], 25) == 25
    assert last_end([(30, 40)], 25) == 0
    assert last_end([], 25) == 0

"""The blocks of a sequence, against a walk through its life; no vLLM needed."""

from hypothesis import given
from hypothesis import strategies as st

from snapstream.config import CacheBudget
from snapstream.integrations.vllm.pages import lay_out_pages


@st.composite
def layouts(draw):
    window = draw(st.integers(1, 8))
    budget = CacheBudget(
        sink=draw(st.integers(0, 5)),
        recent=draw(st.integers(max(16, window), 40)),
        top_k=draw(st.integers(0, 40)),
        window=window,
        ring=draw(st.sampled_from(["elastic", "paper"])),
    )
    length, size = draw(st.integers(1, 200)), draw(st.sampled_from([1, 3, 16, 32]))
    return lay_out_pages(length, budget, size, shares=draw(st.booleans()), drafts=draw(st.integers(0, 20)))


@given(layouts())
def test_a_row_is_never_shorter_than_what_it_holds(layout):
    prompt, size = layout.prompt, layout.block_size
    rows = [layout.blocks(tokens) for tokens in range(1, prompt.length + 150)]
    assert rows == sorted(rows)  # a row only grows; blocks are given back by emptying its front
    for tokens, row in enumerate(rows, start=1):
        front = layout.front_blocks if layout.has_moved(tokens) else 0
        used = tokens if layout.compressed else min(tokens, prompt.limit)
        if layout.compressed and front:  # all of the prompt in the front of the row, what is kept of it behind
            assert front * size >= prompt.length
            used = min(prompt.count + tokens - prompt.length, prompt.limit)
        assert (row - front) * size >= used
    assert rows[-1] == layout.front_blocks + layout.cache_blocks  # and then it stays


@given(layouts(), st.integers(1, 150))
def test_what_is_shared_is_never_written_again(layout, output):
    """Walk through decoding and note every address that is written, as (block of the row, offset)."""
    prompt, size = layout.prompt, layout.block_size
    written = []
    for step in range(output):
        computed, stored = prompt.length + step, prompt.count + step
        turns = stored >= prompt.limit
        slot = prompt.base + (stored - prompt.base) % max(1, prompt.limit - prompt.base) if turns else stored
        front = layout.front_blocks if layout.has_moved(computed) else 0
        written.append((front + slot // size, slot % size))
    shared = layout.shareable(prompt.length + output) if layout.shares or layout.compressed else 0
    first = {(token // size, token % size) for token in range(shared)}
    for step, address in enumerate(written):
        is_first_write = not layout.compressed and prompt.length + step < shared
        assert is_first_write or address not in first
    assert 0 <= layout.reusable() < prompt.length


def test_a_long_prompt():
    layout = lay_out_pages(700, CacheBudget(sink=4, recent=64, top_k=60, window=32, policy="mixed"), 32, shares=True)
    assert (layout.compressed, layout.front_blocks, layout.cache_blocks) == (True, 22, 4)
    assert [layout.blocks(n) for n in (1, 32, 33, 699, 700, 5000)] == [1, 1, 2, 22, 26, 26]
    assert [layout.shareable(n) for n in (1, 700, 900)] == [1, 700, 700]
    assert layout.reusable() == 700 - 32


def test_a_prompt_that_fits():
    """It grows to the full cache, which moves out of shared blocks before its ring turns."""
    budget = CacheBudget(sink=4, recent=64, top_k=60, policy="snapstream")
    shared = lay_out_pages(100, budget, 32, shares=True)
    assert (shared.compressed, shared.front_blocks, shared.cache_blocks) == (False, 4, 4)
    assert [shared.blocks(n) for n in (96, 97, 127, 128, 5000)] == [3, 4, 4, 8, 8]
    assert [shared.shareable(n) for n in (100, 128, 129)] == [100, 128, 128]
    assert shared.reusable() == 99
    alone = lay_out_pages(100, budget, 32, shares=False)
    assert [alone.blocks(n) for n in (96, 97, 127, 128, 5000)] == [3, 4, 4, 4, 4]
    assert alone.front_blocks == alone.shareable(5000) == 0


def test_a_prompt_that_leaves_no_room_for_the_ring():
    """The default policy selects from it; not if it became that long by answers before a preemption."""
    budget = CacheBudget(sink=4, recent=64, top_k=60)
    layout = lay_out_pages(100, budget, 32, shares=True)
    assert (layout.compressed, layout.prompt.dropped, layout.front_blocks, layout.cache_blocks) == (True, 0, 4, 4)
    assert [layout.blocks(n) for n in (96, 97, 99, 100, 5000)] == [3, 4, 4, 8, 8]
    resumed = [lay_out_pages(100, budget, 32, shares=True, generated=n) for n in (35, 36, 99)]
    assert [each.compressed for each in resumed] == [True, False, False]
    assert lay_out_pages(129, budget, 32, shares=True, generated=99).compressed

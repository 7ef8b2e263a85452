"""The blocks of a sequence, against a walk through its life; no vLLM needed."""

from hypothesis import given
from hypothesis import strategies as st

from snapstream.config import CacheBudget
from snapstream.integrations.vllm.pages import plan_pages


@st.composite
def plans(draw):
    window = draw(st.integers(1, 8))
    budget = CacheBudget(
        sink=draw(st.integers(0, 5)),
        recent=draw(st.integers(max(16, window), 40)),
        top_k=draw(st.integers(0, 40)),
        window=window,
        ring=draw(st.sampled_from(["elastic", "paper"])),
    )
    return plan_pages(draw(st.integers(1, 200)), budget, draw(st.sampled_from([1, 3, 16, 32])))


@given(plans())
def test_a_row_is_never_shorter_than_what_it_holds(plan):
    prompt, size = plan.prompt, plan.block_size
    rows = [plan.blocks(tokens) for tokens in range(1, prompt.length + 120)]
    assert rows == sorted(rows)  # a row only grows; blocks are given back by emptying its front
    for tokens, row in enumerate(rows, start=1):
        if tokens <= prompt.length:  # all of the prompt lies in the front of the row
            assert row * size >= tokens
        held = row - plan.prompt_blocks if tokens >= prompt.length else row
        if tokens >= prompt.length:
            used = min(prompt.count + tokens - prompt.length, prompt.limit)
            assert held * size >= used
    assert rows[-1] == plan.prompt_blocks + plan.cache_blocks  # and then it stays


@given(plans(), st.integers(0, 150))
def test_what_is_shared_is_never_written_again(plan, output):
    prompt = plan.prompt
    longest = prompt.length + output
    written = set()
    stored = prompt.count
    for _ in range(output):
        slot = stored
        if stored >= prompt.limit:
            slot = prompt.base + (stored - prompt.base) % max(1, prompt.limit - prompt.base)
        written.add(slot)
        stored += 1
    shared = plan.shareable(longest)
    if plan.compressed:  # decoding writes to blocks of its own
        assert shared == prompt.length
        assert plan.reusable(longest) == prompt.length - plan.budget.window
    else:
        late = {slot for slot in written if slot < min(shared, prompt.length)}
        assert not late
        assert plan.reusable(longest) == shared


def test_the_example_of_the_documentation():
    budget = CacheBudget(sink=4, recent=64, top_k=60)
    plan = plan_pages(700, budget, 32)
    assert (plan.compressed, plan.prompt_blocks, plan.cache_blocks) == (True, 22, 4)
    assert [plan.blocks(n) for n in (1, 32, 33, 699, 700, 5000)] == [1, 1, 2, 22, 26, 26]
    fits = plan_pages(100, budget, 32)
    assert (fits.compressed, fits.prompt_blocks) == (False, 0)
    assert [fits.blocks(n) for n in (100, 128, 129, 5000)] == [4, 4, 4, 4]
    assert fits.shareable(128) == 128
    assert fits.shareable(129) == 4 + 32  # the ring turns: only what lies below it is safe

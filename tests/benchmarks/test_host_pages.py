"""Pages fetched from a host: what is chosen, what is seen, what is counted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks import host_pages
from benchmarks.host_pages import NEWEST, PAGE, HostPages
from snapstream.assets import TASK_MODEL
from snapstream.errors import ConfigurationError


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 200), st.integers(1, 40), st.sampled_from([(1, 1), (4, 2), (6, 2)]), st.integers(0, 99))
def test_attention_to_the_pages_of_the_highest_bounds(length, more, heads, seed):
    """Beside loops in float64: bounds, choice, softmax, and what was not there a step before."""
    H, N = heads
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, N, length + more, 8, generator=generator).double()
    room = 4
    entries = room * PAGE + -(-(length + more) // PAGE)
    pages, held = HostPages(entries), [set() for _ in range(N)]
    fetched = seen = 0
    for now in range(length, length + more):
        query = torch.randn(H, 8, generator=generator).double()
        out = pages.attend(3, query, keys[:, :now], values[:, :now], 0.3)
        count = -(-now // PAGE)
        fits = (entries - count) // PAGE
        for n in range(N):
            bounds = []
            for page in range(count):
                block = keys[n, page * PAGE : min(now, (page + 1) * PAGE)]
                bounds.append(
                    max(
                        sum(max(q[d] * block[:, d].min(), q[d] * block[:, d].max()) for d in range(8))
                        for q in query[n * H // N : (n + 1) * H // N]
                    )
                )
            always = {0, *range(max(0, count - NEWEST), count)}
            others = sorted((page for page in range(count) if page not in always), key=lambda page: -bounds[page])
            chosen = always | set(others[: max(0, fits - len(always))])
            entries_of = [at for at in range(now) if at // PAGE in chosen]
            for h in range(n * H // N, (n + 1) * H // N):
                weights = torch.softmax(keys[n, entries_of] @ query[h] * 0.3, 0)
                torch.testing.assert_close(out[h], weights @ values[n, entries_of])
            before = -(-(now - 1) // PAGE) if now > length else count
            new = {page for page in chosen - held[n] if page < before} if now > length else ()
            fetched += sum(min(now, (page + 1) * PAGE) - page * PAGE for page in new)
            seen += len(entries_of)
            held[n] = chosen
    assert (pages.fetched, pages.looked_at, pages.steps) == (fetched, seen, more)


def test_too_little_memory():
    with pytest.raises(
        ConfigurationError, match="60 entries hold the bounds of 20 pages and 2 whole pages; at least 68"
    ):
        HostPages(60).choose(0, torch.zeros(4, 8), torch.zeros(2, 320, 8))


@torch.no_grad()
def test_with_all_pages_it_is_the_full_cache():
    host_pages.register()
    full = AutoModelForCausalLM.from_pretrained(TASK_MODEL)
    paged = AutoModelForCausalLM.from_pretrained(TASK_MODEL, attn_implementation=host_pages.ATTENTION)
    tokens = torch.randint(5, 200, (1, 90), generator=torch.Generator().manual_seed(0))
    logits = []
    for model in (full, paged):
        more = {} if model is full else {"host_pages": HostPages(1000)}
        cache = DynamicCache()
        model(tokens[:, :70], past_key_values=cache, **more)
        steps = [model(tokens[:, at : at + 1], past_key_values=cache, **more).logits for at in range(70, 90)]
        logits.append(torch.cat(steps))
    torch.testing.assert_close(logits[0], logits[1])
    assert more["host_pages"].looked_at > 0
    few = HostPages(60)
    other = paged(tokens[:, :1], past_key_values=cache, host_pages=few).logits
    assert 0 < few.looked_at < 91 * few.steps * paged.config.num_key_value_heads
    assert not torch.equal(other, full(tokens[:, :1], past_key_values=cache).logits)

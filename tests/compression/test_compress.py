"""The fast, padded, batched code against the oracle."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from snapstream.cache import EntryShape, GroupedCache
from snapstream.compression import (
    choose_entries,
    lay_out,
    layout_tensors,
    next_entry,
    observation_votes,
    pool_votes,
    ranks,
    scoring,
    select_entries,
)
from snapstream.compression import compress as compress_module
from snapstream.compression import keys as keys_module
from snapstream.compression.scoring import KEY_CHUNK, kept_attention
from snapstream.config import CacheBudget, LayerPrompt
from tests.compression.test_layout import budgets
from tests.reference import naive_attention, naive_compress, naive_select, naive_votes

D = 8


class Compressed(NamedTuple):
    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor


def compress(queries, keys, values, layout, budget, *, scale, layer=0):
    """What is kept of a batch of prompts, put into a cache as the engine does it, and where it came from."""
    prompt = LayerPrompt(queries, keys, values, layout, budget.sink, scale, layer)
    positions = choose_entries(prompt, budget)
    N, D = keys.shape[1], keys.shape[3]
    into = EntryShape(N, D, latent=False).empty(len(keys), budget.capacity, entry_type=keys.dtype)
    for row, kept in enumerate(positions):
        GroupedCache([keys[row : row + 1], values[row : row + 1]]).gather(kept.clamp(min=0), into.row(row))
    return Compressed(into.keys, into.values, positions)


def window_of(queries, length, window):
    """The last rows of [H, L, D], as the engine hands them over: garbage where the prompt is too short."""
    rows = torch.full((queries.shape[0], window, queries.shape[2]), 1e3)
    kept = min(window, length)
    rows[:, window - kept :] = queries[:, length - kept : length]
    return rows


def random_prompt(length, padded, heads, kv_heads, seed):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(heads, length, D, generator=generator) * 2
    keys = torch.full((kv_heads, padded, D), float("nan"))  # padding must never be read as a token
    values = torch.full((kv_heads, padded, D), float("nan"))
    keys[:, :length] = torch.randn(kv_heads, length, D, generator=generator) * 2
    values[:, :length] = torch.randn(kv_heads, length, D, generator=generator)
    return queries, keys, values


@settings(deadline=None, max_examples=150)
@given(budgets(), st.integers(1, 80), st.integers(0, 30), st.sampled_from([(1, 1), (4, 2), (3, 1)]), st.integers(0, 99))
def test_compress_equals_oracle(budget, length, padding, heads, seed):
    H, N = heads
    queries, keys, values = random_prompt(length, length + padding, H, N, seed)
    layout = lay_out(length, budget)
    out = compress(
        window_of(queries, length, budget.window)[None],
        keys[None],
        values[None],
        layout_tensors([layout]),
        budget,
        scale=D**-0.5,
    )
    assert out.keys.shape == (1, N, budget.capacity, D)
    for n in range(N):
        group = queries[n * H // N : (n + 1) * H // N]
        kept = naive_compress(group, keys[n, :length], budget).tokens()
        positions = out.positions[0, n]
        if positions[: layout.count].tolist() != kept:  # only a tie in exact arithmetic may be broken otherwise
            scores = naive_votes(group, keys[n, :length], budget)
            odd = set(positions[: layout.count].tolist()) ^ set(kept)
            assert all(abs(scores[a] - scores[b]) < 1e-6 for a in odd for b in odd)
        assert positions[layout.count :].eq(-1).all()
        index = positions[: layout.count]
        torch.testing.assert_close(out.keys[0, n, : layout.count], keys[n, index])
        torch.testing.assert_close(out.values[0, n, : layout.count], values[n, index])


@settings(deadline=None, max_examples=60)
@given(budgets(), st.integers(1, 70), st.integers(0, 99), st.sampled_from([1, 7, 16, 4096]))
def test_votes_equal_oracle(budget, length, seed, key_chunk):
    queries, keys, _ = random_prompt(length, length + 5, 4, 2, seed)
    layout = layout_tensors([lay_out(length, budget)])
    votes = observation_votes(
        window_of(queries, length, budget.window)[None],
        keys[None],
        layout,
        sink=budget.sink,
        scale=D**-0.5,
        normalize=budget.policy.normalize,
        key_chunk=key_chunk,
    )
    scores = pool_votes(votes, pooling=budget.policy.pooling, kernel=budget.policy.kernel)
    for n in range(2):
        expected = naive_votes(queries[2 * n : 2 * n + 2], keys[n, :length], budget)
        for p in range(length + 5):
            if p in expected:
                assert float(scores[0, n, p]) == pytest.approx(expected[p], rel=1e-4, abs=1e-6)
            else:
                assert votes[0, n, p] == 0


@settings(deadline=None, max_examples=50)
@given(budgets(), st.lists(st.integers(1, 60), min_size=2, max_size=4), st.integers(0, 99))
def test_batch_equals_alone(budget, lengths, seed):
    padded = max(lengths) + 3
    prompts = [random_prompt(n, padded, 4, 2, seed + i) for i, n in enumerate(lengths)]
    windows = [window_of(p[0], n, budget.window) for p, n in zip(prompts, lengths, strict=True)]
    layouts = [lay_out(n, budget) for n in lengths]
    together = compress(
        torch.stack(windows),
        torch.stack([p[1] for p in prompts]),
        torch.stack([p[2] for p in prompts]),
        layout_tensors(layouts),
        budget,
        scale=D**-0.5,
    )
    for i, (prompt, layout) in enumerate(zip(prompts, layouts, strict=True)):
        alone = compress(
            windows[i][None], prompt[1][None], prompt[2][None], layout_tensors([layout]), budget, scale=D**-0.5
        )
        assert together.positions[i].tolist() == alone.positions[0].tolist()
        torch.testing.assert_close(together.keys[i, :, : layout.count], alone.keys[0, :, : layout.count])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(0, 99))
def test_equal_scores_go_to_the_earlier_token(levels, seed):
    budget = CacheBudget(sink=2, recent=10, top_k=9, window=1)
    length = len(levels) + 12
    scores = {p + 2: level * 0.25 for p, level in enumerate(levels)}
    table = torch.zeros(1, 1, length)
    table[..., :2] = -1.0
    for p, score in scores.items():
        table[0, 0, p] = score
    layout = lay_out(length, budget)
    chosen = select_entries(table, layout_tensors([layout]), sink=2, top_k=9, capacity=budget.capacity)
    sink, pinned, recent = naive_select(scores, length, budget)
    assert chosen[0, 0, : layout.count].tolist() == [*sink, *pinned, *recent]


@settings(deadline=None, max_examples=40)
@given(budgets(), st.integers(1, 60), st.integers(1, 90), st.integers(0, 99))
def test_attention_over_the_ring_equals_naive_concatenation(budget, length, decoded, seed):
    queries, keys, values = random_prompt(length, length + 4, 1, 1, seed)
    layout = lay_out(length, budget)
    tensors = layout_tensors([layout])
    out = compress(
        window_of(queries, length, budget.window)[None], keys[None], values[None], tensors, budget, scale=D**-0.5
    )
    cache_k, cache_v = out.keys[0, 0].clone(), out.values[0, 0].clone()
    scores = (
        dict.fromkeys(out.positions[0, 0, budget.sink : layout.base].tolist(), 1.0)
        if layout.count > budget.sink
        else {}
    )
    naive = naive_compress(None, keys[0, :length], budget, scores)
    all_keys, all_values = list(keys[0, :length]), list(values[0, :length])
    generator = torch.Generator().manual_seed(seed)
    count = tensors.count
    for step in range(decoded):
        query, key, value = torch.randn(3, D, generator=generator)
        slot = int(next_entry(count, tensors.base, tensors.limit))
        cache_k[slot], cache_v[slot] = key, value
        count = count + 1
        all_keys.append(key)
        all_values.append(value)
        naive.append(length + step)
        valid = min(int(count), layout.limit)
        got = naive_attention(query, cache_k[:valid], cache_v[:valid])
        kept = naive.tokens()
        want = naive_attention(
            query, torch.stack([all_keys[p] for p in kept]), torch.stack([all_values[p] for p in kept])
        )
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("policy", ["full", "streaming", "sage-kv", "snapstream", "random"])
@pytest.mark.parametrize("length", [1, 4, 31, 32, 33, 200])
def test_every_policy(policy, length):
    budget = CacheBudget.preset(policy, 32 if policy != "full" else 256)
    queries, keys, values = random_prompt(length, 210, 4, 2, 0)
    layout = lay_out(length, budget)
    out = compress(
        window_of(queries, length, budget.window)[None],
        keys[None],
        values[None],
        layout_tensors([layout]),
        budget,
        scale=D**-0.5,
    )
    for n in range(2):
        kept = out.positions[0, n, : layout.count].tolist()
        assert kept == sorted(set(kept))
        assert kept[-1] == length - 1
        assert kept[: budget.sink] == list(range(min(budget.sink, length)))
        if policy in ("full", "streaming") or length <= budget.capacity:
            naive = naive_compress(queries[:2], keys[n, :length], budget)
            assert kept == naive.tokens()
    if policy == "random" and length > 32:
        assert out.positions[0, 0].tolist() != out.positions[0, 1].tolist()  # a choice per head
        again = compress(
            window_of(queries, length, 32)[None],
            keys[None],
            values[None],
            layout_tensors([layout]),
            budget,
            scale=D**-0.5,
            layer=1,
        )
        assert again.positions.tolist() != out.positions.tolist()  # and per layer


def test_smaller_budget_of_one_request_in_the_same_graph():
    budget = CacheBudget.of(64)
    small = budget.resized(48)
    queries, keys, values = random_prompt(150, 160, 4, 2, 3)
    layout = lay_out(150, small)
    out = compress(
        window_of(queries, 150, budget.window)[None],
        keys[None],
        values[None],
        layout_tensors([layout]),
        budget,
        scale=D**-0.5,
    )
    assert layout.limit == 48
    for n in range(2):
        expected = naive_compress(queries[2 * n : 2 * n + 2], keys[n, :150], small).tokens()
        assert out.positions[0, n, :48].tolist() == expected


def test_memory_of_the_votes_is_bounded(monkeypatch):
    """No temporary of a vote over 128k tokens is larger than a chunk of logits or a few numbers per token."""
    for module, name in (
        (scoring, "window_attention"),
        (scoring, "smoothed"),
        (keys_module, "differences_of_keys"),
        (ranks, "taken_in_turn"),
        (compress_module, "selected"),
    ):  # what an operation does inside is not dispatched
        monkeypatch.setattr(module, name, getattr(module, f"plain_{name}"))
    length, H, N, W, head_dim = 131_072, 8, 2, 32, 64
    budget = CacheBudget.of(4096)
    largest = 0

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                    largest = max(largest, tensor.untyped_storage().nbytes())
            return out

    keys = torch.randn(1, N, length, head_dim).bfloat16()
    queries = torch.randn(1, H, W, head_dim).bfloat16()
    given = {keys.untyped_storage().data_ptr(), queries.untyped_storage().data_ptr()}
    with Recorder():
        compress(queries, keys, keys, layout_tensors([lay_out(length, budget)]), budget, scale=head_dim**-0.5)
    assert 0 < largest <= max(4 * H * W * KEY_CHUNK, 3 * 4 * N * length)  # the default has three kinds of votes
    assert largest < keys.nbytes / 4


def test_half_precision_votes_are_summed_in_float32():
    """A thousand equal small votes must not be rounded away."""
    length, window = 400, 32
    budget = CacheBudget(sink=0, recent=32, top_k=16, window=window, kernel=1)
    keys = torch.zeros(1, 1, length, D, dtype=torch.bfloat16)
    queries = torch.zeros(1, 1, window, D, dtype=torch.bfloat16)
    votes = observation_votes(
        queries, keys, layout_tensors([lay_out(length, budget)]), sink=0, scale=1.0, normalize="candidates"
    )
    assert votes.dtype == torch.float32
    torch.testing.assert_close(votes.sum(), torch.tensor(float(window)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("cap", [0.0, 0.7])
@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, -2.0, 3.0, 200.0])])
def test_kept_attention_is_a_share_of_what_went_to_tokens(cap, sinks):
    H, N, W, L = 4, 2, 3, 20
    queries, keys = torch.randn(1, H, W, D), torch.randn(1, N, L, D)
    positions = torch.tensor([[[0, 3, 7, 19], [2, 18, -1, -1]]])
    layout = layout_tensors([lay_out(L, CacheBudget(2, 10, 4, window=W))], torch.device("cpu"))
    got = kept_attention(queries, keys, positions, layout, scale=0.4, cap=cap, sinks=sinks)
    for n in range(N):
        kept, all_tokens = 0.0, 0.0
        for h in (2 * n, 2 * n + 1):
            for w in range(W):
                logits = keys[0, n, : L - W + w + 1].double() @ queries[0, h, w].double() * 0.4
                logits = cap * (logits / cap).tanh() if cap else logits
                weights = logits if sinks is None else torch.cat((logits, sinks[h, None].double()))
                shares = weights.softmax(0)[: len(logits)]
                kept += sum(float(shares[p]) for p in positions[0, n].tolist() if 0 <= p < len(shares))
                all_tokens += float(shares.sum())
        assert float(got[0, n]) == pytest.approx(kept / all_tokens, abs=1e-4)

"""Votes, smoothing, choice and copy, against the oracle and against plain torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.compression import lay_out, layout_tensors
from snapstream.compression.compress import plain_selected
from snapstream.compression.scoring import plain_smoothed, plain_window_attention
from snapstream.config import CacheBudget
from tests.kernels.triton.devices import DEVICE, DTYPES, SIZES, column, random

pytest.importorskip("triton")
from snapstream.kernels.triton import select, votes


def check_votes(
    size, dtype, group, window, lengths, sink, everything, summed, largest, seed, padding=13, cap=0.0, has_sinks=False
):
    B, N, L = len(lengths), 1 if size == 576 else 2, max(lengths) + padding
    queries = random(B, N * group, window, size, seed=seed, dtype=dtype)
    keys = random(B, N, L, size, seed=seed + 1, dtype=dtype)
    first_voter = [max(0, length - window + seed % 3) for length in lengths]
    candidate_end = [max(0, length - seed % 20) for length in lengths]
    arguments = (column(lengths), column(first_voter), column(candidate_end))
    sinks = random(N * group, seed=seed + 2, dtype=torch.float32, scale=4.0) if has_sinks else None
    want = plain_window_attention(
        queries.double(), keys.double(), *arguments, size**-0.5, sink, everything, summed, largest, 64, cap, sinks
    )
    for b, length in enumerate(lengths):
        keys[b, :, length:] = float("nan")
        queries[b, :, : max(0, window - length)] = float("nan")
    got = votes.window_attention(
        queries, keys, *arguments, size**-0.5, sink, everything, summed, largest, 64, cap, sinks
    )
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    for b, length in enumerate(lengths):
        mine = (slice(None), b, slice(None), slice(length))
        torch.testing.assert_close(got[mine], want[mine].float(), rtol=1e-4, atol=1e-6)
        assert (got[:, b, :, length:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@settings(deadline=None, max_examples=4)
@given(
    group=st.sampled_from((1, 3)),
    window=st.integers(1, 33),
    lengths=st.lists(st.integers(1, 200) | st.sampled_from((1, 63, 64, 65, 128)), min_size=1, max_size=2),
    sink=st.sampled_from((0, 4)),
    everything=st.booleans(),
    kind=st.sampled_from(("sums", "largest", "both")),
    cap=st.sampled_from((0.0, 0.0, 2.5)),
    has_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_votes(size, dtype, group, window, lengths, sink, everything, kind, cap, has_sinks, seed):
    summed = 0 if kind == "largest" else 1 + seed % window
    largest = 0 if kind == "sums" else 1 + seed // 2 % window
    special = {"cap": cap, "has_sinks": has_sinks}
    check_votes(size, dtype, group, window, lengths, sink, everything, summed, largest, seed, **special)


@pytest.mark.parametrize("length", [2047, 2048, 2049, 4500])
def test_votes_of_prompts_that_several_programs_normalise(length):
    check_votes(64, torch.bfloat16, 2, 8, [length], 4, True, 3, largest=8 if length % 2 == 0 else 0, seed=4)


def test_logits_that_overflow_without_care():
    queries, keys = torch.full((1, 1, 4, 64), 30.0, device=DEVICE), random(1, 1, 90, 64, seed=0, dtype=torch.float32)
    arguments = (column([90]), column([86]), column([80]), 1.0, 0, True, 4, 0)
    got = votes.window_attention(queries, keys, *arguments)
    torch.testing.assert_close(got, plain_window_attention(queries, keys, *arguments, 64), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got.sum(), torch.tensor(4.0, device=DEVICE))


@settings(deadline=None, max_examples=20)
@given(
    length=st.integers(1, 3000),
    kernel=st.sampled_from((3, 7, 15)),
    shift=st.sampled_from((0, 1, 16)),
    largest=st.booleans(),
    seed=st.integers(0, 99),
)
def test_smoothing_is_the_same_to_the_bit(length, kernel, shift, largest, seed):
    """Or equal scores would not stay equal, and the choice another one."""
    scores = random(1, 3, length, seed=seed, dtype=torch.float32).abs()
    got = votes.pool_votes(scores, largest, kernel, shift)
    expected = plain_smoothed(scores.cpu(), largest, kernel, shift)  # torch's average on CUDA is another
    assert torch.equal(got.cpu(), expected)


@settings(deadline=None, max_examples=25)
@given(
    length=st.integers(1, 400) | st.sampled_from((8191, 8192, 8193, 9000)),
    sink=st.integers(0, 5),
    recent=st.integers(15, 40),
    top_k=st.integers(1, 90),
    levels=st.sampled_from((1, 2, 7, 10**6)),
    ring=st.sampled_from(("elastic", "paper")),
    seed=st.integers(0, 99),
)
def test_the_choice_is_the_same_with_ties(length, sink, recent, top_k, levels, ring, seed):
    budget = CacheBudget(sink, recent, top_k, ring=ring, window=1)
    layout = layout_tensors([lay_out(length, budget), lay_out(max(1, length // 2), budget)], DEVICE)
    scores = random(2, 3, length, seed=seed, dtype=torch.float32).abs()
    scores = (scores * levels).round() / levels
    at = torch.arange(length, device=DEVICE)
    scores = scores.masked_fill((at >= layout.candidate_end[:, None])[:, None], 0.0)
    scores = scores.masked_fill(((at < sink) | (at >= layout.length[:, None]))[:, None], -1.0)
    arguments = (layout.base, layout.count, layout.length, budget.sink, budget.top_k, budget.capacity)
    got = select.select_entries(scores, *arguments)
    assert torch.equal(got, plain_selected(scores, *arguments))


@pytest.mark.parametrize("size", [2, 40, 64, 96, 576])
@pytest.mark.parametrize("entries", [1, 7, 64, 65])
def test_copies(size, entries):
    source = random(2, 300, size, seed=1, dtype=torch.bfloat16)
    positions = torch.randint(0, 300, (2, entries + 3), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    target = torch.zeros(2, entries + 5, size, dtype=torch.bfloat16, device=DEVICE)
    select.gather(source, positions[:, :entries], target)
    want = source.gather(1, positions[:, :entries, None].expand(-1, -1, size))
    assert torch.equal(target[:, :entries], want)
    assert (target[:, entries:] == 0).all()

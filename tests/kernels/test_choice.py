"""Kernels of the choice: the same numbers as plain torch, ties included, and keys' differences against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.compression import compress, keys, lay_out, layout_tensors, ranks, scoring
from snapstream.config import CacheBudget
from snapstream.kernels import compression
from snapstream.kernels import cpu as kernels
from snapstream.kernels.cpu import choice
from tests.kernels.threads import on_threads

pytestmark = pytest.mark.skipif(not kernels.library.available(), reason="no kernels, and no C++ compiler")

ONE = torch.ones(1, 1, dtype=torch.int64)
LENGTHS = st.integers(1, 300) | st.sampled_from((511, 512, 513, 3000))


@pytest.fixture(autouse=True)
def loaded():
    assert kernels.available()


def scores_of(generator, levels, *shape):
    """Scores with ties, with ``levels`` different values; 0: magnitudes over the whole range of float32."""
    if levels == 0:
        return torch.exp(torch.randn(*shape, generator=generator) * 40).clamp(max=3e38)
    return (torch.rand(*shape, generator=generator) * levels).round() / levels


@settings(deadline=None, max_examples=150)
@given(
    length=LENGTHS,
    sink=st.integers(0, 5),
    recent=st.integers(16, 40),
    top_k=st.integers(0, 90),
    levels=st.sampled_from((0, 1, 2, 7, 10**6)),
    policy=st.sampled_from(("snapstream", "mixed", "spans")),
    ring=st.sampled_from(("elastic", "paper")),
    seed=st.integers(0, 99),
)
def test_the_choice_is_the_same_with_ties(length, sink, recent, top_k, levels, policy, ring, seed):
    budget = CacheBudget(sink, recent, top_k, ring=ring, policy=policy, window=1)
    layout = layout_tensors([lay_out(length, budget), lay_out(max(1, length // 2), budget)])
    scores = scores_of(torch.Generator().manual_seed(seed), levels, 2, 3, length)
    at = torch.arange(length)
    scores = scores.masked_fill((at >= layout.candidate_end[:, None])[:, None], 0.0)
    scores = scores.masked_fill(((at < sink) | (at >= layout.length[:, None]))[:, None], -1.0)
    arguments = (layout.base, layout.count, layout.length, budget.sink, budget.top_k, budget.capacity)
    got = on_threads(lambda: choice.select_entries(scores, *arguments))
    assert torch.equal(got, compress.plain_selected(scores, *arguments))


@settings(deadline=None, max_examples=100)
@given(
    length=LENGTHS,
    kernel=st.sampled_from((1, 3, 7, 63, 511)),
    shift=st.sampled_from((0, 0, 1, 16, 500)),
    largest=st.booleans(),
    start=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_smoothing_is_the_same_to_the_bit(length, kernel, shift, largest, start, seed):
    """Or equal scores would not stay equal, and the choice another one; also of a part of a tensor."""
    votes = torch.rand(2, 3, length + start, generator=torch.Generator().manual_seed(seed))[..., start:]
    got = on_threads(lambda: choice.smooth(votes, largest, kernel, shift))
    assert torch.equal(got, scoring.plain_smoothed(votes, largest, kernel, shift))


@settings(deadline=None, max_examples=150)
@given(
    length=LENGTHS,
    lists=st.integers(1, 4),
    sink=st.integers(0, 5),
    most=st.integers(1, 400),
    levels=st.sampled_from((0, 1, 2, 7, 10**6)),
    data=st.data(),
)
def test_places_are_the_same_with_ties(length, lists, sink, most, levels, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    scores = [scores_of(generator, levels, 2, 3, length) for _ in range(lists)]
    ends = torch.tensor([data.draw(st.integers(0, length)) for _ in range(2)])
    every = torch.tensor([[data.draw(st.integers(1, 3)) for _ in ends] for _ in scores])
    got = on_threads(lambda: choice.take_in_turn(scores, every, ends, sink, most))
    assert torch.equal(got, ranks.plain_taken_in_turn(scores, every, ends, sink, most))


def differences_in_float64(rows, ends, sink, near):
    """The definition: one minus the cosine between a key's direction and the sum of directions around it."""
    exact, (B, N, length, _) = rows.double().cpu().nan_to_num(0.0, 0.0, 0.0), rows.shape
    want = torch.zeros(B, N, length, dtype=torch.float64)
    for b, end in enumerate(ends.tolist()):
        directions = exact[b, :, sink:end] / exact[b, :, sink:end].norm(dim=-1, keepdim=True).clamp(min=keys.SHORTEST)
        at = torch.arange(sink, max(end, sink)) // (near or length)
        around = (at[:, None] - at).abs() <= 1  # same block, or side by side
        mean = around.double() @ directions
        mean = mean / mean.norm(dim=-1, keepdim=True).clamp(min=keys.SHORTEST)
        want[b, :, sink : max(end, sink)] = 1 - (directions * mean).sum(-1)
    return want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(deadline=None, max_examples=60)
@given(
    length=LENGTHS,
    size=st.sampled_from((32, 64, 96, 576)),
    sink=st.integers(0, 5),
    odd=st.sampled_from((None, float("inf"), float("nan"), 0.0)),
    near=st.sampled_from((keys.EVERYWHERE, 1, 7, 32, 600)),
    data=st.data(),
)
def test_differences_of_keys_equal_the_definition(dtype, length, size, sink, odd, near, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    rows = torch.randn(2, length + 1, 3, size, generator=generator).to(dtype).transpose(1, 2)[:, :, 1:]
    rows = rows + torch.randn(size, generator=generator).to(dtype)
    ends = torch.tensor([data.draw(st.integers(0, length)) for _ in range(2)])
    if odd is not None:
        rows[0, 1, length // 2, :: 1 if odd == 0 else 3] = odd  # a key of no length, or with numbers that are none
    want = differences_in_float64(rows, ends, sink, near)
    for b, end in enumerate(ends.tolist()):
        rows[b, :, end:] = float("nan")  # of padding nothing is read
    got = on_threads(lambda: choice.key_differences(rows, ends, sink, near, keys.SHORTEST))
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)
    plain = keys.plain_differences_of_keys(rows, ends, sink, near, 64)
    torch.testing.assert_close(plain.double(), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("near", [keys.EVERYWHERE, 32])
def test_padding_changes_nothing(near):
    """A prompt in a longer buffer gets the same numbers to the bit, or hosts would keep other tokens."""
    rows, ends = torch.randn(1, 2, 2000, 64), torch.tensor([1500])
    long, short = (choice.key_differences(each, ends, 4, near, keys.SHORTEST) for each in (rows, rows[:, :, :1500]))
    assert torch.equal(long[..., :1500], short)
    assert not long[..., 1500:].any()
    long, short = (choice.take_in_turn([each, 1 - each], ONE.expand(2, 1), ends, 4, 300) for each in (long, short))
    assert torch.equal(long[..., :1500], short)


@settings(deadline=None, max_examples=40)
@given(
    heads=st.integers(1, 4),
    size=st.sampled_from((1, 5, 64)),
    length=st.integers(1, 300),
    entries=st.integers(0, 300),
    dtype=st.sampled_from((torch.bfloat16, torch.float32, torch.uint8)),
    seed=st.integers(0, 99),
)
def test_rows_are_copied_as_in_plain_torch(heads, size, length, entries, dtype, seed):
    """From a part of a buffer, to the first entries of a longer cache."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(200, (heads, length + 3, size), generator=generator).to(dtype)[:, 1 : 1 + length]
    positions = torch.randint(length, (heads, entries), generator=generator)
    got, want = (torch.zeros(heads, entries + 2, size, dtype=dtype) for _ in range(2))
    compression.copy_rows(source, positions, got[:, :entries])
    compression.plain_copy_rows(source, positions, want[:, :entries])
    assert torch.equal(got, want)


def test_operations_choose_the_kernels(monkeypatch):
    """Plain torch is for what the kernels do not do."""
    plain = []
    for name in ("plain_selected", "plain_taken_in_turn", "plain_differences_of_keys"):
        own = getattr(compression, name)
        monkeypatch.setattr(compression, name, lambda *given, name=name, own=own: (plain.append(name), own(*given))[1])
    budget = CacheBudget(2, 10, 8, policy="mixed")
    layout = layout_tensors([lay_out(50, budget)])
    for size, want in ((64, []), (40, ["plain_differences_of_keys"])):
        scores = keys.key_differences(torch.randn(1, 1, 50, size), layout, sink=2)
        scores = ranks.take_in_turn([scores], layout, sink=2, most=8)
        assert scores.count_nonzero() == 50 - 2
        compress.select_entries(scores, layout, sink=2, top_k=8, capacity=20)
        assert plain == want


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("key_differences", (torch.zeros(1, 1, 5, 40), torch.tensor([5]), 0, 0, 1e-12), "multiple of 32"),
        ("key_differences", (torch.zeros(1, 1, 5, 64).half(), torch.tensor([5]), 0, 0, 1e-12), "float16"),
        ("key_differences", (torch.zeros(1, 1, 5, 64), torch.tensor([5, 5]), 0, 0, 1e-12), "lengths"),
        ("take_in_turn", ([torch.zeros(1, 1, 5), torch.zeros(1, 1, 6)], ONE, torch.tensor([5]), 0, 3), "float32"),
        ("take_in_turn", ([torch.zeros(1, 1, 5)], ONE, torch.tensor([5]).int(), 0, 3), "int64"),
        ("take_in_turn", ([torch.zeros(1, 1, 5)] * 2, ONE, torch.tensor([5]), 0, 3), "rounds"),
        ("select_entries", (torch.zeros(1, 1, 5).double(), *[torch.tensor([5])] * 3, 0, 3, 4), "float32"),
    ],
)
def test_what_does_not_fit_is_refused(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        getattr(choice, function)(*arguments)

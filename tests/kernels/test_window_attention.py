"""The kernel of the votes, with whatever instructions this processor has, against plain torch in float64."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.compression import scoring
from snapstream.kernels import compression
from snapstream.kernels import cpu as kernels
from tests.kernels.test_prefill_attention import KINDS
from tests.kernels.threads import on_threads

pytestmark = pytest.mark.skipif(not kernels.library.available(), reason="no kernels, and no C++ compiler")


def attend(queries, keys, lengths, *rest, **how):
    return kernels.attend_window(queries, keys, *lengths, *rest, **how)


def exactly(queries, keys, lengths, scale, sink, everything, summed, largest, cap=0.0, sinks=None):
    """The definition, query by query."""
    (_, H, W, _), N = queries.shape, keys.shape[1]
    votes = torch.zeros(2, *keys.shape[:3], dtype=torch.float64)
    for b, (length, first_voter, candidate_end) in enumerate(zip(*(each.tolist() for each in lengths), strict=True)):
        for h in range(H):
            of_head = torch.zeros(2, keys.shape[2], dtype=torch.float64)
            for w in range(W):
                position = length - W + w
                if position < first_voter:
                    continue
                of_voter = torch.zeros(2, keys.shape[2], dtype=torch.float64)
                for kind, whole in enumerate((everything, False)):
                    first, end = (0, position + 1) if whole else (sink, min(position + 1, candidate_end))
                    seen = keys[b, h // (H // N), first : max(first, end)].double()
                    logits = seen @ queries[b, h, w].double() * scale
                    logits = cap * (logits / cap).tanh() if cap else logits
                    if whole and sinks is not None:
                        logits = torch.cat((logits, sinks[h, None].double()))
                    of_voter[kind, first : max(first, end)] = logits.softmax(0)[: len(seen)]
                if w >= W - summed:
                    of_head[0] += of_voter[0]
                if w >= W - largest:
                    of_head[1] = of_head[1].maximum(of_voter[1])
            votes[:, b, h // (H // N)] += of_head
    return votes[0 if summed else 1 : 2 if largest else 1] / (H // N)


@pytest.mark.parametrize(("dtype", "instructions"), KINDS)
@settings(deadline=None, max_examples=40)
@given(
    size=st.sampled_from([32, 64, 96, 256, 576]),
    heads=st.integers(1, 3),
    group=st.integers(1, 7),
    window=st.integers(1, 9) | st.sampled_from([16, 17, 32, 33, 64]),
    length=st.integers(9, 200),
    other=st.integers(9, 200),
    everything=st.booleans(),
    kind=st.sampled_from(("sums", "largest", "both")),
    cap=st.sampled_from([0.0, 0.0, 2.5]),
    has_sinks=st.booleans(),
    data=st.data(),
)
def test_equals_the_definition(
    dtype, instructions, size, heads, group, window, length, other, everything, kind, cap, has_sinks, data
):
    summed = 0 if kind == "largest" else data.draw(st.integers(1, window))
    largest = 0 if kind == "sums" else data.draw(st.integers(1, window))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    entries = max(length, other) + data.draw(st.integers(0, 70))
    queries = (torch.randn(2, heads * group, window, size, generator=generator) * 3).to(dtype)
    keys = torch.randn(2, heads, entries, size, generator=generator).to(dtype)
    lengths = [torch.tensor([length, other])]
    lengths.append(torch.tensor([data.draw(st.integers(0, n)) for n in (length, other)]))
    lengths.append(torch.tensor([data.draw(st.integers(0, n)) for n in (length, other)]))
    for b, n in enumerate((length, other)):
        keys[b, :, n:] = float("nan")
        queries[b, :, : max(0, int(lengths[1][b]) - (n - window))] = float("nan")  # before the first voter
    rest = (0.1, data.draw(st.integers(0, 8)), everything, summed, largest)
    how = {"cap": cap, "sinks": torch.randn(heads * group, generator=generator) * 4 if has_sinks else None}
    got = attend(queries, keys, lengths, *rest, instructions, **how)
    want = exactly(queries, keys, lengths, *rest, **how)
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("largest", [0, 20])
@pytest.mark.parametrize(("dtype", "instructions"), KINDS)
def test_long_prompts_equal_plain_torch_and_threads_do_not_change_a_bit(dtype, instructions, largest):
    queries, keys = torch.randn(1, 6, 32, 64).to(dtype) * 4, torch.randn(1, 2, 5000, 64).to(dtype)
    lengths = [torch.tensor([4900]), torch.tensor([4880]), torch.tensor([4800])]
    rest = (0.125, 4, True, 32, largest)
    got = on_threads(lambda: attend(queries, keys, lengths, *rest, instructions))
    want = scoring.plain_window_attention(queries.double(), keys.double(), *lengths, *rest, scoring.KEY_CHUNK)
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("host", ["snapstream.engine.engine", "snapstream.integrations.transformers"])
def test_every_host_has_the_kernels(host):
    """Whoever chooses entries does it with the kernels there are."""
    code = f"import sys, {host}; assert 'snapstream.kernels.compression' in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_operation_chooses_the_kernel(monkeypatch):
    """Plain torch is for what the kernel does not do."""
    assert kernels.available()
    plain = []
    monkeypatch.setattr(compression, "plain_window_attention", lambda *arguments: plain.append(arguments[0].shape[-1]))
    queries, keys = torch.randn(1, 2, 4, 32), torch.randn(1, 1, 50, 32)
    lengths = [torch.tensor([50]), torch.tensor([0]), torch.tensor([40])]
    got = scoring.window_attention(queries, keys, *lengths, 0.1, 0, True, 4, 0, 1024)
    torch.testing.assert_close(got.sum(), torch.tensor(4.0))
    assert plain == []
    monkeypatch.undo()
    odd = scoring.window_attention(queries[..., :20], keys[..., :20], *lengths, 0.1, 0, True, 4, 0, 1024)
    torch.testing.assert_close(odd.sum(), torch.tensor(4.0))

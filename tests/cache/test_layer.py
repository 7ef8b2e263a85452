"""The two kinds of caches against plain indexing."""

import pytest
import torch

from snapstream.cache import EntryShape

N, D = 3, 8


def filled(latent, rows, entries, seed=0):
    cache = EntryShape(N, D, latent).empty(rows, entries, entry_type=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for tensor in cache.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


@pytest.mark.parametrize("latent", [False, True])
def test_bytes_and_shapes(latent):
    shape = EntryShape(N, D, latent)
    cache = shape.empty(4, 5, entry_type=torch.bfloat16)
    assert (cache.rows, cache.entries) == (4, 5)
    assert cache.nbytes == 4 * 5 * shape.nbytes(torch.bfloat16) == 4 * 5 * N * D * 2 * (1 if latent else 2)
    assert cache.keys.shape == cache.values.shape == (4, N, 5, D)
    assert (cache.values.data_ptr() == cache.keys.data_ptr()) == latent


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_write(latent, tokens):
    """Each row at its own entries; rows that are not active stay as they are, to the bit."""
    cache, before = filled(latent, 4, 9), filled(latent, 4, 9)
    key, value = torch.randn(2, 4, tokens, N, D)
    entries = torch.stack([torch.randperm(9)[:tokens] for _ in range(4)])
    active = torch.tensor([True, False, True, False])
    cache.write(entries, key, value, active)
    for mine, old, new in zip(cache.tensors, before.tensors, (key, value), strict=False):
        for row in range(4):
            for token, entry in enumerate(entries[row].tolist()):
                if active[row]:
                    old[row, :, entry] = new[row, token]
        assert torch.equal(mine, old)
    cache.write(entries, key, value)
    for row, entry in ((1, int(entries[1, 0])), (3, int(entries[3, -1]))):
        assert torch.equal(cache.keys[row, :, entry], key[row, (entries[row] == entry).nonzero()[0, 0]])


@pytest.mark.parametrize("latent", [False, True])
def test_gather_take_and_put(latent):
    source, into = filled(latent, 1, 20), filled(latent, 3, 7, seed=1)
    untouched = into.row(0, 7).keys.clone()
    positions = torch.stack([torch.randperm(20)[:5].sort().values for _ in range(N)])
    source.gather(positions, into.row(1))
    for mine, theirs in zip(into.tensors, source.tensors, strict=True):
        for head in range(N):
            assert torch.equal(mine[1, head, :5], theirs[0, head, positions[head]])
    taken = into.take(1, torch.tensor([4, 0]))
    assert (taken.rows, taken.entries) == (1, 2)
    assert torch.equal(taken.keys[0, :, 0], into.keys[1, :, 4])
    taken.keys.zero_()  # a copy
    assert into.keys[1, :, 4].any()
    into.row(2).put(source.row(0, 3))
    assert torch.equal(into.values[2, :, :3], source.values[0, :, :3])
    assert torch.equal(into.row(0, 7).keys, untouched)


def test_a_row_is_the_same_memory():
    cache = filled(False, 3, 6)
    cache.row(1, 4).keys.fill_(7)
    assert bool((cache.keys[1, :, :4] == 7).all())
    assert not bool((cache.keys[1, :, 4:] == 7).any())


@pytest.mark.parametrize("latent", [False, True])
def test_tensors_of_another_shape_are_refused(latent):
    shape = EntryShape(N, D, latent)
    good = list(filled(latent, 1, 4).tensors)
    assert shape.of(good, torch.float32).entries == 4
    for bad in (good * 2, [t[:, :2] for t in good], [t[..., :4] for t in good], list(filled(latent, 2, 4).tensors)):
        with pytest.raises(ValueError, match="are not entries"):
            shape.of(bad, torch.float32)

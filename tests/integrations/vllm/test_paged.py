"""Reading caches laid out in ways that only their owner knows; no vLLM needed."""

from types import SimpleNamespace

import pytest
import torch

from snapstream.errors import ConfigurationError
from snapstream.integrations.vllm.paged import PagedCache

BLOCKS, SIZE, HEADS, DIM = 5, 16, 3, 32
VALUES = DIM // 2


class Shuffled:
    """A kernel that keeps every element of a block somewhere: in an order of its own."""

    def __init__(self, seed, lossy=False):
        generator = torch.Generator().manual_seed(seed)
        self.order = torch.randperm(SIZE * HEADS * (DIM + VALUES), generator=generator)
        self.lossy = lossy

    def do_kv_cache_update(self, layer, key, value, cache, slots):
        entry = torch.cat([key.flatten(1), value.flatten(1)], 1)
        if self.lossy:
            entry = (entry / 3).round() * 3
        pages = cache.view(BLOCKS, -1)
        for number, slot in enumerate(slots.tolist()):
            if slot >= 0:
                places = self.order.view(SIZE, -1)[slot % SIZE]
                pages[slot // SIZE, places] = entry[number].to(cache.dtype)


class Latents:
    """One vector per token; stored back to front."""

    def do_kv_cache_update(self, latent, rope, cache, slots, dtype, scale):
        cache.view(-1, cache.shape[-1])[slots] = torch.cat([latent, rope[:, 0]], -1).flip(-1).to(cache.dtype)


def attention_layer(dtype, impl):
    cache = torch.zeros(BLOCKS, SIZE, HEADS * (DIM + VALUES), dtype=dtype)
    return SimpleNamespace(impl=impl, kv_cache=cache, num_kv_heads=HEADS, head_size=DIM, head_size_v=VALUES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_written_is_read_back(dtype, seed):
    layer = attention_layer(dtype, Shuffled(seed))
    layer.kv_cache.normal_()
    before = layer.kv_cache.clone()
    paged = PagedCache(layer, SIZE, BLOCKS)
    assert torch.equal(layer.kv_cache, before)  # finding out leaves no trace
    blocks = torch.tensor([3, 1])
    length = SIZE + 5
    keys = torch.randn(HEADS, length, DIM).to(dtype)
    values = torch.randn(HEADS, length, VALUES).to(dtype)
    slots = torch.tensor([int(blocks[t // SIZE]) * SIZE + t % SIZE for t in range(length)])
    paged.write(layer.kv_cache, keys, values, slots)
    pages = paged.read_pages(layer.kv_cache, blocks)
    assert torch.equal(paged.keys(pages, length), keys)
    some = torch.randint(0, length, (7,))
    for read, wanted in zip(paged.read(layer.kv_cache, slots[some]), (keys, values), strict=True):
        assert torch.equal(read, wanted[:, some])
    positions = torch.randint(0, length, (HEADS, 9))
    for head in range(HEADS):
        assert torch.equal(paged.values(pages, positions)[head], values[head, positions[head]])


def test_latents():
    cache = torch.zeros(BLOCKS, SIZE, 40, dtype=torch.bfloat16)
    layer = SimpleNamespace(
        impl=Latents(), kv_cache=cache, kv_lora_rank=24, qk_rope_head_dim=16, kv_cache_dtype="auto", _k_scale=None
    )
    paged = PagedCache(layer, SIZE, BLOCKS)
    keys = torch.randn(1, 20, 40).to(torch.bfloat16)
    paged.write(cache, keys, None, torch.arange(2 * SIZE, 2 * SIZE + 20))
    assert torch.equal(paged.keys(paged.read_pages(cache, torch.tensor([2, 3])), 20), keys)
    read, nothing = paged.read(cache, torch.tensor([2 * SIZE + 3, 2 * SIZE + 19]))
    assert torch.equal(read, keys[:, [3, 19]])
    assert nothing is None


def test_a_cache_that_does_not_give_back_what_it_got_is_refused():
    with pytest.raises(ConfigurationError, match=r"cannot read the cache of Shuffled.*--attention-backend"):
        PagedCache(attention_layer(torch.float32, Shuffled(0, lossy=True)), SIZE, BLOCKS)


def test_blocks_that_are_not_in_front_are_refused():
    layer = attention_layer(torch.float32, Shuffled(0))
    layer.kv_cache = layer.kv_cache[None]
    with pytest.raises(ConfigurationError, match="not 5 blocks"):
        PagedCache(layer, SIZE, BLOCKS)

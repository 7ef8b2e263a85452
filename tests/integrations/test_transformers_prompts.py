"""Prompts of the transformers cache that the CPU kernel reads, beside transformers' own attention."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM

from snapstream.integrations.transformers import SnapStreamCache, prompt
from snapstream.kernels import cpu as kernels

pytestmark = pytest.mark.skipif(not kernels.library.available(), reason="no kernels, and no C++ compiler")


@pytest.fixture
def calls(monkeypatch):
    """Shapes of the queries that the kernel was given."""
    made, kernel = [], kernels.prefill_attention

    def counted(query, *rest, **how):
        made.append(tuple(query.shape))
        return kernel(query, *rest, **how)

    monkeypatch.setattr(kernels, "prefill_attention", counted)
    return made


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    own = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=3, **sizes)).eval()
    own.set_attn_implementation("snapstream")
    peer = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=3, **sizes)).eval()
    peer.load_state_dict(own.state_dict())
    peer.set_attn_implementation("sdpa")
    return own, peer


def logits_of(model, tokens, cache, mask=None, **options):
    with torch.no_grad():
        return model(tokens, attention_mask=mask, past_key_values=cache, **options).logits


@pytest.mark.parametrize("padding", [[0, 0], [0, 70], [130, 5], [200, 299]])
def test_logits_equal_transformers(models, calls, padding):
    own, peer = models
    tokens = torch.randint(0, 97, (2, 300), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(300) >= torch.tensor(padding)[:, None]).long() if any(padding) else None
    got = logits_of(own, tokens, SnapStreamCache(own.config, 512), mask)
    want = logits_of(peer, tokens, DynamicCache(), mask)
    for row, unseen in enumerate(padding):
        torch.testing.assert_close(got[row, unseen:], want[row, unseen:], rtol=1e-4, atol=1e-4)
    assert calls == [(300 - unseen, 4, 32) for _ in range(3) for unseen in padding]


def test_prompt_in_chunks_equals_transformers(models, calls):
    """What comes before a chunk is in the cache: with nothing dropped it is seen in full."""
    own, peer = models
    tokens = torch.randint(0, 97, (1, 500), generator=torch.Generator().manual_seed(2))
    cache = SnapStreamCache(own.config, 512)
    want = logits_of(peer, tokens, DynamicCache())
    for start, end in ((0, 200), (200, 360), (360, 500)):
        got = logits_of(own, tokens[:, start:end], cache)
        torch.testing.assert_close(got, want[:, start:end], rtol=1e-4, atol=1e-4)
    assert [shape[0] for shape in calls] == [200, 200, 200, 160, 160, 160, 140, 140, 140]


def test_what_the_kernel_does_not_do_is_left_to_torch(models, calls):
    own, _ = models
    tokens = torch.randint(0, 97, (1, 200))
    logits_of(own, tokens[:, :100], SnapStreamCache(own.config, 512))  # short
    own(tokens, past_key_values=SnapStreamCache(own.config, 512))  # with gradients
    query, key = torch.randn(1, 4, 200, 32), torch.randn(1, 2, 200, 32)
    assert prompt.kernel_fits(query, key, key, 0.1)
    assert not prompt.kernel_fits(query, key, key, -0.1)
    assert not prompt.kernel_fits(query.half(), key.half(), key.half(), 0.1)
    assert not prompt.kernel_fits(query[..., :24], key[..., :24], key[..., :24], 0.1)
    assert not prompt.kernel_fits(query[:, :3], key, key, 0.1)
    snapstream_attention = AttentionInterface()["snapstream"]
    for unusual in ({"dropout": 0.1}, {"s_aux": torch.zeros(4, requires_grad=True)}):
        taken = SnapStreamCache(own.config, 512)
        keys, values = taken.update(key, key, 0)
        snapstream_attention(own.model.layers[0].self_attn, query, keys, values, None, **unusual)
    everything = torch.zeros(1, 1, 200, 200)  # every token sees every other
    free = logits_of(own, tokens, SnapStreamCache(own.config, 512), everything)
    assert calls == []
    causal = logits_of(own, tokens, SnapStreamCache(own.config, 512))
    assert len(calls) == 3
    assert not torch.allclose(free[:, 0], causal[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [0, 37])
@pytest.mark.parametrize("special", [False, True])
def test_attend_causally_equals_float64(dtype, before, special):
    """Padding may end in what comes before, or among the queries; heads of values may have another size."""
    generator = torch.Generator().manual_seed(3)
    length = before + 140
    query = torch.randn(3, 6, 140, 96, generator=generator).to(dtype)
    key = torch.randn(3, 2, length, 96, generator=generator).to(dtype)
    value = torch.randn(3, 2, length, 64, generator=generator).to(dtype)
    assert prompt.kernel_fits(query, key, value, 0.1)
    real = torch.arange(length) >= torch.tensor([0, 20, 60])[:, None]
    real[2, before // 2 : before] = False  # entries that are not in use yet
    fresh = real[:, before:]
    sinks = torch.linspace(-2, 3, 6)
    how = {"cap": 1.5, "sinks": sinks.to(dtype)} if special else {}
    got = prompt.attend_causally(query, key, value, 0.1, real, fresh, **how)
    mask = torch.ones(140, length, dtype=torch.bool).tril(before) & real[:, None]
    key, value = (t.repeat_interleave(3, 1).double() for t in (key, value))
    want = F.scaled_dot_product_attention(query.double(), key, value, attn_mask=mask[:, None], scale=0.1)
    if special:
        logits = (query.double() @ key.transpose(2, 3) * 0.1 / 1.5).tanh() * 1.5
        weights = logits.masked_fill(~mask[:, None], -torch.inf).exp()
        total = weights.sum(-1, keepdim=True) + how["sinks"].double().exp()[:, None, None]
        want = weights / total @ value
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    want = want.transpose(1, 2)
    torch.testing.assert_close(got[fresh].double(), want[fresh], rtol=tolerance, atol=tolerance)
    assert not got[~fresh].any()
    holes = fresh.clone()
    holes[0, 70] = False
    assert prompt.attend_causally(query, key, value, 0.1, real, holes) is None


@pytest.mark.parametrize("rows", [1, 3, 1024])
def test_masks_are_told_apart(monkeypatch, rows):
    monkeypatch.setattr(prompt, "MASK_ROWS", rows)
    real = torch.tensor([[False, True, True, True], [True, True, True, True]])
    mask = (torch.ones(4, 4, dtype=torch.bool).tril() & real[:, None])[:, None]
    assert prompt.is_causal(mask, real)
    assert prompt.is_causal(torch.where(mask, 0.0, -torch.inf), real)
    odd = mask.clone()
    odd[0, 0, 0] = True  # what a token of padding sees does not matter
    assert prompt.is_causal(odd, real)
    for row, column in ((1, 3), (3, 1), (2, 0)):  # the future, a gap in the past, padding
        odd = mask.clone()
        odd[0, 0, row, column] = ~odd[0, 0, row, column]
        assert not prompt.is_causal(odd, real)

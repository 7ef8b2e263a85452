"""The cache for transformers: against the oracle, against DynamicCache, and against the built-in engine."""

import copy
import random
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache

from snapstream import LLM, CacheBudget, ConfigurationError, RequestError, SamplingParams
from snapstream.integrations.transformers import SnapStreamCache, SnapStreamLayer
from tests.checkpoints import GROUPED, LATENT, load_peer, prompt, save_checkpoint
from tests.conftest import needs_compiler
from tests.conversation import NaiveConversation
from tests.peers import peer_generate

FAMILIES = [*GROUPED, *LATENT]
SMALL = CacheBudget(sink=2, recent=8, top_k=14, window=4, kernel=3)


def load(checkpoint, attention="snapstream"):
    return load_peer(checkpoint, attn_implementation=attention, dtype=torch.float32)


@pytest.fixture(scope="module")
def model(checkpoint):
    return load(checkpoint)


def generate(model, prompts, cache, steps=20, **settings):
    """New tokens per prompt; prompts of several lengths are padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(one)) + list(one) for one in prompts])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
    out = model.generate(
        ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=steps,
        eos_token_id=None,
        pad_token_id=0,
        **({"do_sample": False} | settings),
    )
    return out[:, longest:].tolist()


def random_budget(rng):
    window = rng.choice([1, 4, 8])
    return CacheBudget(
        sink=rng.randrange(0, 5),
        recent=rng.randrange(16, 30),
        top_k=rng.choice([0, rng.randrange(8, 24)]),
        window=window,
        kernel=rng.choice([1, 5]),
        ring=rng.choice(["elastic", "paper"]),
        normalize=rng.choice(["all", "candidates"]),
        pooling=rng.choice(["avg", "max"]),
        policy=rng.choice(["snapstream", "mixed", "spans"]),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_the_oracle(tmp_path, family):
    save_checkpoint(tmp_path, family)
    model, rng = load(tmp_path), random.Random(family)
    for seed in range(4):
        budget, tokens = random_budget(rng), prompt(rng.randrange(2, 120), seed)
        expected = peer_generate(tmp_path, tokens, budget, 50, latent=family in LATENT)
        cache = SnapStreamCache(model.config, budget)
        assert generate(model, [tokens], cache, 50) == [expected]
        assert [tuple(layer.keys.shape[:3:2]) for layer in cache.layers] == [(1, budget.capacity)] * 2


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2-windows"])
def test_equal_to_the_engine(tmp_path, family):
    from tests.conftest import save_tokenizer

    save_checkpoint(tmp_path, family)
    save_tokenizer(tmp_path)
    # Of latent attention only the engine has the latents, so choices by keys are others here.
    budget = CacheBudget.preset("snapstream", SMALL.capacity) if family in LATENT else SMALL
    llm = LLM(str(tmp_path), budget=budget, max_model_len=256, enforce_eager=True)
    model = load(tmp_path)
    for length in (1, 20, 24, 25, 100):
        expected = llm.generate([prompt(length)], SamplingParams(max_tokens=40, ignore_eos=True))[0]
        got = generate(model, [prompt(length)], SnapStreamCache(model.config, budget), 40)
        assert got == [list(expected.token_ids)]


@pytest.mark.parametrize("family", FAMILIES)
def test_with_room_for_everything_equal_to_dynamic_cache(tmp_path, family):
    save_checkpoint(tmp_path, family)
    model, stock = load(tmp_path), load(tmp_path, "sdpa")
    prompts = [prompt(n, n) for n in (1, 50, 7)]
    for settings in ({}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9}, {"num_beams": 3}):
        torch.manual_seed(0)
        expected = generate(stock, prompts, DynamicCache(), 30, **settings)
        torch.manual_seed(0)
        assert generate(model, prompts, SnapStreamCache(model.config, 128), 30, **settings) == expected


def test_rows_of_a_padded_batch_equal_each_row_alone(model):
    prompts = [prompt(n, n) for n in (60, 1, 90, 24, 25, 3, 33)]
    for budget in (SMALL, CacheBudget(0, 16, 8, window=16, ring="paper"), CacheBudget.preset("streaming", 20)):
        together = generate(model, prompts, SnapStreamCache(model.config, budget), 40)
        alone = [generate(model, [one], SnapStreamCache(model.config, budget), 40)[0] for one in prompts]
        assert together == alone


def check_turns(model, naive, rng, seed):
    """Three turns, of generate on one cache and of lists."""
    cache, history = SnapStreamCache(model.config, naive.budget), []
    for turn in range(3):
        new = prompt(rng.choice([2, 5, 31, 60]), seed=seed * 10 + turn)
        steps = rng.choice([2, 10, 25])
        expected = naive.turn([*history[naive.length :], *new], steps)
        history += new
        made = generate(model, [history], cache, steps, suppress_tokens=[0, 1, 2])[0]
        assert made == expected
        history += made


def random_pins(rng, length):
    starts = [rng.randrange(length) for _ in range(rng.randint(1, 3))]
    return [(start, start + rng.choice([1, 3, 8, 30])) for start in starts]


@pytest.mark.parametrize("family", FAMILIES)
def test_pins_equal_the_oracle(tmp_path, family):
    save_checkpoint(tmp_path, family)
    model, rng = load(tmp_path), random.Random(family)
    for seed in range(6):
        budget, tokens = random_budget(rng), prompt(rng.randrange(2, 120), seed)
        pin = random_pins(rng, len(tokens))
        expected = peer_generate(tmp_path, tokens, replace(budget, pin=pin), 50, latent=family in LATENT)
        assert generate(model, [tokens], SnapStreamCache(model.config, budget, pin=pin), 50) == [expected]
        assert generate(model, [tokens], SnapStreamCache(model.config, replace(budget, pin=pin)), 50) == [expected]


def test_each_row_of_a_padded_batch_has_its_own_pins(model):
    rng, prompts = random.Random(0), [prompt(n, n) for n in (60, 2, 90, 24, 25, 3, 33)]
    pins = [random_pins(rng, len(one)) for one in prompts[:-1]] + [[]]
    for settings in ({}, {"num_beams": 2}):
        together = generate(model, prompts, SnapStreamCache(model.config, SMALL, pin=pins), 40, **settings)
        alone = [
            generate(model, [one], SnapStreamCache(model.config, SMALL, pin=pin), 40, **settings)[0]
            for one, pin in zip(prompts, pins, strict=True)
        ]
        assert together == alone
        without = generate(model, prompts, SnapStreamCache(model.config, SMALL), 40, **settings)
        assert together != without


@pytest.mark.parametrize("seed", range(16))
def test_pins_hold_in_later_turns(checkpoint, model, seed):
    rng = random.Random(seed)
    budget = replace(random_budget(rng), pin=tuple(random_pins(rng, 120)))
    check_turns(model, NaiveConversation(checkpoint, budget, same_layout=False), rng, seed)


def test_bad_pins_are_refused(model):
    for pin in ([(5, 5)], ["x"], [[(1, 2)], [(3, 3)]], [5]):
        with pytest.raises(ConfigurationError, match="pin"):
            SnapStreamCache(model.config, SMALL, pin=pin)
    cache = SnapStreamCache(model.config, SMALL, pin=[[(1, 2)], [(3, 4)]])
    with pytest.raises(RequestError, match="pins for 2 sequences, but 3"):
        generate(model, [prompt(30)] * 3, cache, 5)


def test_sampling_in_a_batch_is_repeatable(model):
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        cache = SnapStreamCache(model.config, SMALL)
        made.append(generate(model, [prompt(70), prompt(40)], cache, 20, do_sample=True, temperature=1.0))
    assert made[0] == made[1]
    assert made[0][0] != made[0][1]


@pytest.mark.parametrize("seed", range(8))
def test_turns_equal_naive_turns(checkpoint, model, seed):
    """Several calls of generate on one cache: what is new is read over what was kept, and all compressed again."""
    rng = random.Random(seed)
    check_turns(model, NaiveConversation(checkpoint, random_budget(rng)), rng, seed)


@pytest.mark.parametrize("lengths", [(9, 9), (12, 3), (1, 30)])
def test_turns_of_a_batch_equal_each_alone(model, lengths):
    """Texts of a second turn may differ in length: they are padded on the left, in the middle of the conversation."""
    prompts, turns = [prompt(60, 1), prompt(25, 2)], [prompt(n, 3 + i) for i, n in enumerate(lengths)]

    def talk(rows):
        cache = SnapStreamCache(model.config, SMALL)
        texts = [prompts[row] for row in rows]
        longest = max(map(len, texts))
        texts = [[0] * (longest - len(one)) + one for one in texts]
        mask = [[int(token != 0) for token in one] for one in texts]
        for turn in range(2):
            if turn:
                new = [turns[row] for row in rows]
                widest = max(map(len, new))
                mask = [m + [1] * (len(t) - len(m)) for m, t in zip(mask, texts, strict=True)]
                mask = [m + [0] * (widest - len(n)) + [1] * len(n) for m, n in zip(mask, new, strict=True)]
                texts = [t + [0] * (widest - len(n)) + n for t, n in zip(texts, new, strict=True)]
            texts = model.generate(
                torch.tensor(texts),
                attention_mask=torch.tensor(mask),
                past_key_values=cache,
                max_new_tokens=30,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                suppress_tokens=[0],
            ).tolist()
        return [text[-30:] for text in texts]

    assert talk([0, 1]) == [talk([0])[0], talk([1])[0]]


@pytest.mark.parametrize("family", ["llama3-gqa", "deepseek-v3"])
@pytest.mark.parametrize("chunk", [2, 7, 32, 64])
def test_a_prompt_in_chunks_is_compressed_once(tmp_path, family, chunk):
    save_checkpoint(tmp_path, family)
    model, prompts = load(tmp_path), [prompt(100), prompt(61, 1)]
    expected = generate(model, prompts, SnapStreamCache(model.config, SMALL), 30)
    cache = SnapStreamCache(model.config, SMALL, chunked_prefill=True)
    assert generate(model, prompts, cache, 30, prefill_chunk_size=chunk) == expected
    whole = SnapStreamCache(model.config, SMALL, chunked_prefill=True)
    assert generate(model, prompts, whole, 30) == expected


def test_beams_are_scored_as_their_tokens_are_alone(model):
    """Each beam is a sequence of its own: its score is that of its tokens decoded one by one after the same prompt."""
    tokens, steps = prompt(80), 25
    out = model.generate(
        torch.tensor([tokens]),
        past_key_values=SnapStreamCache(model.config, SMALL),
        max_new_tokens=steps,
        num_beams=4,
        num_return_sequences=4,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    made = out.sequences[:, len(tokens) :].tolist()
    assert len({tuple(row) for row in made}) == 4
    for row, score in zip(made, out.sequences_scores.tolist(), strict=True):
        cache = SnapStreamCache(model.config, SMALL)
        with torch.no_grad():
            logits = [model(torch.tensor([tokens]), past_key_values=cache).logits[0, -1]]
            logits += [model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1] for token in row[:-1]]
        chosen = torch.stack(logits).log_softmax(-1)[range(steps), row]
        assert float(chosen.mean()) == pytest.approx(score, abs=1e-4)


def test_rows_can_be_selected_and_repeated(model):
    prompts = [prompt(60, 1), prompt(60, 2)]
    ids = torch.tensor(prompts)
    cache = SnapStreamCache(model.config, SMALL)
    with torch.no_grad():
        first = model(ids, past_key_values=cache).logits[:, -1].argmax(-1)
        more = copy.deepcopy(cache)
        more.batch_repeat_interleave(2)
        more.batch_select_indices(torch.tensor([3, 0]))
        swapped = model(first[[1, 0], None], past_key_values=more).logits
        plain = model(first[:, None], past_key_values=cache).logits
    torch.testing.assert_close(swapped, plain[[1, 0]])


def test_reset_is_a_new_cache(model):
    cache = SnapStreamCache(model.config, SMALL)
    first = generate(model, [prompt(70)], cache)
    generate(model, [prompt(70) + first[0] + prompt(30, 5)], cache)
    keys = cache.layers[0].keys
    cache.reset()
    assert cache.get_seq_length() == 0
    assert generate(model, [prompt(70)], cache) == first
    assert cache.layers[0].keys.data_ptr() == keys.data_ptr()


def test_memory_is_fixed_and_told(model):
    cache = SnapStreamCache(model.config, SMALL)
    assert cache.nbytes == 0
    generate(model, [prompt(100)] * 3, cache, 5)
    per_token = 2 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, head size, float32
    assert cache.nbytes == 3 * SMALL.capacity * per_token
    assert cache.nbytes_uncompressed == 3 * 104 * per_token
    held = cache.nbytes
    generate(model, [prompt(300)] * 3, cache, 50)
    assert cache.nbytes == held


@needs_compiler
@pytest.mark.parametrize("family", ["llama3-gqa", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_a_compiled_decode_step_is_compiled_once(tmp_path, family):
    save_checkpoint(tmp_path, family)
    model = load(tmp_path)
    step = torch.compile(model, fullgraph=True, dynamic=False)

    def run(decode, tokens, cache, steps=40):
        with torch.no_grad():
            made = [int(model(torch.tensor([tokens]), past_key_values=cache).logits[0, -1].argmax())]
            for _ in range(steps):
                made.append(int(decode(torch.tensor([made[-1:]]), past_key_values=cache).logits[0, -1].argmax()))
        return made

    cache = SnapStreamCache(model.config, SMALL)
    run(step, prompt(50), cache, 3)
    before = counters["stats"]["unique_graphs"]
    assert before > 0
    for length in (2, 20, 24, 90):  # prompts that fit, that fill the ring while decoding, that are compressed
        cache.reset()
        with torch.compiler.set_stance("fail_on_recompile"):
            compiled = run(step, prompt(length), cache)
        assert compiled == run(model, prompt(length), SnapStreamCache(model.config, SMALL))
    assert counters["stats"]["unique_graphs"] == before


def test_chunks_are_not_compiled(model):
    from transformers import CompileConfig

    everywhere = CompileConfig(backend="eager", mode=None)
    everywhere._compile_all_devices = True
    expected = generate(model, [prompt(70)], SnapStreamCache(model.config, SMALL))
    cache = SnapStreamCache(model.config, SMALL, chunked_prefill=True)
    assert not cache.is_compileable
    assert generate(model, [prompt(70)], cache, prefill_chunk_size=16, compile_config=everywhere) == expected


@needs_compiler
def test_generate_compiles_the_decode_step_by_itself(model):
    from transformers import CompileConfig

    everywhere = CompileConfig(fullgraph=True, dynamic=False, mode="default")
    everywhere._compile_all_devices = True
    expected = generate(model, [prompt(70), prompt(30, 1)], SnapStreamCache(model.config, SMALL), 30)
    cache = SnapStreamCache(model.config, SMALL)
    settings = {"compile_config": everywhere}
    assert generate(model, [prompt(70), prompt(30, 1)], cache, 30, **settings) == expected
    before = counters["stats"]["unique_graphs"]
    cache.reset()
    with torch.compiler.set_stance("fail_on_recompile"):
        assert generate(model, [prompt(70), prompt(30, 1)], cache, 30, **settings) == expected
    assert counters["stats"]["unique_graphs"] == before


def test_other_attention_is_refused_at_once(checkpoint):
    model = load(checkpoint, "sdpa")
    with pytest.raises(ConfigurationError, match="set_attn_implementation\\('snapstream'\\)"):
        SnapStreamCache(model.config, 64)
    model.set_attn_implementation("snapstream")
    cache = SnapStreamCache(model.config, 64)
    model.set_attn_implementation("sdpa")  # behind the cache's back
    generate(model, [prompt(50)], DynamicCache(), 2)
    with pytest.raises(RequestError, match="does not use the implementation"):
        generate(model, [prompt(50)], cache, 2)


def test_other_caches_work_under_our_attention(model, checkpoint):
    expected = generate(load(checkpoint, "sdpa"), [prompt(50), prompt(20)], DynamicCache(), 20)
    assert generate(model, [prompt(50), prompt(20)], DynamicCache(), 20) == expected
    assert generate(model, [prompt(50), prompt(20)], None, 20, use_cache=False) == expected


def test_bad_use_is_refused_with_reasons(model):
    cache = SnapStreamCache(model.config, SMALL)
    generate(model, [prompt(50)] * 2, cache, 2)
    with pytest.raises(RequestError, match="holds 2 sequences, but 3"):
        generate(model, [prompt(50)] * 3, cache, 2)
    with pytest.raises(RequestError, match="cannot remove tokens"):
        cache.crop(-1)
    with pytest.raises(RequestError, match="does not support offloading"):
        cache.layers[0].offload()
    with pytest.raises(ConfigurationError, match="cannot be offloaded"):
        SnapStreamCache(model.config, SMALL, offloading=True)
    with pytest.raises(ConfigurationError, match="too few"):
        SnapStreamCache(model.config, 3)
    right = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    with pytest.raises(RequestError, match="padded on the right"):
        model(torch.tensor([prompt(5)] * 2), attention_mask=right, past_key_values=SnapStreamCache(model.config, SMALL))
    with pytest.raises(RequestError, match="attention weights"):
        model(torch.tensor([prompt(5)]), output_attentions=True)
    with pytest.raises(RequestError, match="cannot remove tokens, because the entries they overwrote are lost"):
        generate(model, [prompt(50)], SnapStreamCache(model.config, SMALL), 20, prompt_lookup_num_tokens=3)


def test_tokens_after_the_end_of_a_row_cannot_be_hidden_later(model):
    """generate() fills a finished row up; DynamicCache could hide that in the next turn, this cache says it cannot."""
    ids, mask = torch.tensor([prompt(40, 1), prompt(40, 2)]), torch.ones(2, 40, dtype=torch.int64)
    cache = SnapStreamCache(model.config, SMALL)
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    first = generate(model, ids[:1].tolist(), SnapStreamCache(model.config, SMALL), 10)[0]
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, eos_token_id=first[3], **settings)
    assert (out[0, 44:] == 0).all()
    more = torch.cat((out, torch.tensor([prompt(5, 3)] * 2)), 1)
    shown = torch.cat((mask, (out[:, 40:] != 0).long(), torch.ones(2, 5, dtype=torch.int64)), 1)
    with pytest.raises(RequestError, match="hides tokens that are already in the cache"):
        model.generate(more, attention_mask=shown, past_key_values=cache, eos_token_id=None, **settings)


def test_a_cache_of_inference_mode_goes_on_outside(model):
    cache = SnapStreamCache(model.config, SMALL)
    with torch.inference_mode():
        model(torch.tensor([prompt(50)]), past_key_values=cache)
    with torch.no_grad():
        logits = model(torch.tensor([[5]]), past_key_values=cache).logits
    fresh = SnapStreamCache(model.config, SMALL)
    with torch.no_grad():
        model(torch.tensor([prompt(50)]), past_key_values=fresh)
        assert torch.equal(model(torch.tensor([[5]]), past_key_values=fresh).logits, logits)


def test_masks_that_are_more_than_padding_are_refused(model):
    ids = torch.tensor([prompt(6)])
    causal = torch.zeros(1, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), torch.finfo(torch.float32).min)
    model(ids, attention_mask=causal, past_key_values=SnapStreamCache(model.config, SMALL))
    with pytest.raises(RequestError, match="adds to attention's logits"):
        model(ids, attention_mask=causal + 0.5, past_key_values=SnapStreamCache(model.config, SMALL))
    with pytest.raises(RequestError, match="for each head"):
        model(ids, attention_mask=causal.expand(1, 4, 6, 6), past_key_values=SnapStreamCache(model.config, SMALL))


def test_a_decode_step_that_breaks_off_is_noticed(model, monkeypatch):
    cache = SnapStreamCache(model.config, SMALL)
    with torch.no_grad():
        model(torch.tensor([prompt(50)]), past_key_values=cache)
        with monkeypatch.context() as patched:
            patched.setattr(model.model.layers[1], "forward", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(torch.tensor([[5]]), past_key_values=cache)
        with pytest.raises(RequestError, match="layers with different tokens"):
            model(torch.tensor([[5]]), past_key_values=cache)


def test_right_padding_of_a_chunk_is_refused_when_it_is_compressed(model):
    cache = SnapStreamCache(model.config, SMALL, chunked_prefill=True)
    mask = torch.tensor([[1] * 20 + [0] * 4])
    with torch.no_grad():
        model(torch.tensor([prompt(20)]), attention_mask=mask[:, :20], past_key_values=cache)
        assert cache.nbytes > 2 * SMALL.capacity  # what waits is counted
        model(torch.tensor([prompt(4)]), attention_mask=mask, past_key_values=cache)
        with pytest.raises(RequestError, match="padded on the right"):
            model(torch.tensor([[5]]), past_key_values=cache)


def test_no_graph_of_gradients_is_kept(model):
    """A loop that forgets torch.no_grad() gets the same tokens, and a cache without history."""
    cache = SnapStreamCache(model.config, SMALL)
    made = [int(model(torch.tensor([prompt(70)]), past_key_values=cache).logits[0, -1].argmax())]
    for _ in range(9):
        made.append(int(model(torch.tensor([made[-1:]]), past_key_values=cache).logits[0, -1].argmax()))
    assert [made] == generate(model, [prompt(70)], SnapStreamCache(model.config, SMALL), 10)
    assert not any(layer.keys.requires_grad or layer.values.requires_grad for layer in cache.layers)


def test_a_forward_that_breaks_off_is_noticed(model, monkeypatch):
    cache = SnapStreamCache(model.config, SMALL)
    with monkeypatch.context() as patched:
        patched.setattr(SnapStreamLayer, "attend_prompt", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(model, [prompt(50)], cache, 2)
    with pytest.raises(RequestError, match="reset"):
        generate(model, [prompt(50)], cache, 2)
    cache.reset()
    assert generate(model, [prompt(50)], cache) == generate(model, [prompt(50)], SnapStreamCache(model.config, SMALL))

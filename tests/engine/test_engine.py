"""The engine against a naive decoder with growing Python lists, and against itself in other company."""

import random
import re
import time

import numpy
import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from snapstream import LLM, CacheBudget, ConfigurationError, MemoryPlanError, RequestError, SamplingParams
from snapstream.engine.requests.detokenizer import Detokenizer, special_tokens
from snapstream.models.weights import load_model, load_spec
from tests.attending import logits_with
from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.reference import naive_attention, naive_compress, naive_renew

BUDGET = CacheBudget(sink=4, recent=24, top_k=20, window=8, kernel=5)


def make(checkpoint, budget=BUDGET, **settings):
    """A small engine; without a prefix cache, so that every prompt is read."""
    defaults = {"max_model_len": 256, "slots": 3, "prefill_chunk": 32, "enforce_eager": True, "decode_steps": 3}
    return LLM(str(checkpoint), budget=budget, **(defaults | {"prefix_cache": 0} | settings))


def greedy(tokens, **kwargs):
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **kwargs)


def naive_generate(checkpoint, tokens, budget, steps, forced=(), seen=None):
    """Prefill in one shot, then decode in per-head lists, attention in float64.

    The output begins with `forced`. `seen` gets queries, keys and what was kept of the prompt, per layer and KV head.
    """
    spec = load_spec(checkpoint)
    model = load_model(checkpoint, spec, torch.float32, torch.device("cpu"))
    group = spec.heads // spec.kv_heads
    keys, values, caches = {}, {}, {}

    def attend_prompt(layer, query, key, value):
        keys[layer], values[layer] = list(key), list(value)
        for n in range(spec.kv_heads):
            queries = query[:, n * group : (n + 1) * group].transpose(0, 1)
            caches[layer, n] = naive_compress(queries, key[:, n], budget, values=value[:, n])
            if seen is not None:
                seen[layer, n] = queries, key[:, n], caches[layer, n].tokens()
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (query, key, value)), is_causal=True, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def attend_token(layer, query, key, value):
        position = len(keys[layer])
        keys[layer].append(key[0])
        values[layer].append(value[0])
        out = []
        for h in range(spec.heads):
            n = h // group
            cache = caches[layer, n]
            if h % group == 0:
                if budget.ring == "resnap":
                    known = {p: keys[layer][p][n] for p in cache.tokens()}
                    naive_renew(cache, known, budget, len(tokens), position)
                cache.append(position)
            kept = cache.tokens()
            k = torch.stack([keys[layer][p][n] for p in kept])
            v = torch.stack([values[layer][p][n] for p in kept])
            out.append(naive_attention(query[0, h], k, v).float())
        return torch.stack(out)[None]

    with torch.no_grad():
        logits = logits_with(model, torch.tensor(tokens), torch.arange(len(tokens)), attend_prompt)
        made = [int(logits[-1].argmax())]
        made[: len(forced)] = forced[:1]
        while len(made) < steps:
            position = torch.tensor([len(tokens) + len(made) - 1])
            best = int(logits_with(model, torch.tensor(made[-1:]), position, attend_token)[-1].argmax())
            made.append(forced[len(made)] if len(made) < len(forced) else best)
    return tuple(made)


@pytest.mark.parametrize("ring", ["elastic", "paper", "resnap"])
@pytest.mark.parametrize("length", [1, 3, 4, 27, 28, 29, 47, 48, 49, 130])
def test_equals_naive_decoding(checkpoint, ring, length):
    """Below, at and above every boundary; 120 tokens wrap the ring several times."""
    budget = CacheBudget(sink=4, recent=24, top_k=20, window=8, kernel=5, ring=ring)
    got = make(checkpoint, budget).generate(prompt(length), greedy(120))[0]
    assert got.token_ids == naive_generate(checkpoint, prompt(length), budget, 120)
    assert got.finish_reason == "length"


@pytest.mark.parametrize("policy", ["full", "streaming", "sage-kv", "snapstream", "mixed", "spans"])
def test_every_policy_equals_naive_decoding(checkpoint, policy):
    budget = CacheBudget.preset(policy, 48 if policy != "full" else 256)
    got = make(checkpoint, budget).generate(prompt(150), greedy(60))[0]
    assert got.token_ids == naive_generate(checkpoint, prompt(150), budget, 60)


def test_full_cache_equals_transformers(tmp_path):
    for family in ("qwen3", "qwen2", "mistral"):
        peer = save_checkpoint(tmp_path / family, family)
        save_tokenizer(tmp_path / family)
        tokens = prompt(90, 3)
        with torch.no_grad():
            want = peer.generate(torch.tensor([tokens]), max_new_tokens=40, do_sample=False, eos_token_id=None)
        got = make(tmp_path / family, budget=None).generate(tokens, greedy(40))[0]
        assert got.token_ids == tuple(want[0, 90:].tolist())


@pytest.mark.parametrize("attention", ["sdpa", "auto"])
def test_greedy_output_depends_on_nothing_else(tmp_path, attention):
    """Not on company, chunk size, decode steps or slots. Head size 32, so `auto` is the fast backend."""
    save_checkpoint(tmp_path, "qwen3")
    save_tokenizer(tmp_path)
    lengths = [5, 60, 131, 48, 33, 200, 97]
    prompts = [prompt(n, seed=n) for n in lengths]
    alone = [make(tmp_path, attention=attention).generate(p, greedy(50))[0].token_ids for p in prompts]
    for settings in (
        {"slots": 1, "prefill_chunk": 256, "decode_steps": 1},
        {"slots": 7, "prefill_chunk": 7, "decode_steps": 8},
        {"slots": 4, "prefill_chunk": 64, "decode_steps": 5},
    ):
        together = make(tmp_path, attention=attention, **settings).generate(prompts, greedy(50))
        assert [o.token_ids for o in together] == alone


def test_request_budget_equals_an_engine_with_that_budget(checkpoint):
    small = BUDGET.resized(36)
    want = make(checkpoint, small).generate(prompt(140), greedy(50))[0]
    got = make(checkpoint).generate([prompt(140), prompt(90)], [greedy(50, kv_budget=small), greedy(50)])
    assert got[0].token_ids == want.token_ids
    assert got[0].cache.limit == 36
    assert got[1].cache.limit == 48


@pytest.mark.parametrize(
    "host", [None, 256, 192, CacheBudget.preset("streaming", 192), CacheBudget(4, 180, 8, window=1)]
)
def test_a_number_is_the_same_cache_on_every_engine(checkpoint, host):
    """Whatever the engine's own policy and window are: ``kv_budget=64`` is ``CacheBudget.of(64)``."""
    llm = make(checkpoint, host, slots=1)
    for entries in (16, 36, 64, 150, 192):
        want = make(checkpoint, CacheBudget.of(entries)).generate(prompt(220), greedy(12, return_kept_tokens=True))[0]
        for asked in (entries, CacheBudget.of(entries)):
            got = llm.generate(prompt(220), greedy(12, kv_budget=asked, return_kept_tokens=True))[0]
            assert got.token_ids == want.token_ids
            assert got.cache == want.cache


@pytest.mark.parametrize("asked", [CacheBudget(4, 60, 0), CacheBudget.preset("random", 64), CacheBudget(0, 40, 20)])
def test_a_policy_that_was_accepted_is_served(checkpoint, asked):
    """Its window of 32 is larger than what is recent in the engine's own cache, 24."""
    want = make(checkpoint, asked).generate(prompt(200), greedy(40))[0]
    got = make(checkpoint, 64).generate(prompt(200), greedy(40, kv_budget=asked))[0]
    assert (got.error, got.token_ids) == (None, want.token_ids)


def test_requests_come_and_go(checkpoint):
    """Random arrivals and aborts; every finished request equals the one computed alone; slots return."""
    rng = random.Random(4)
    llm = make(checkpoint)
    jobs = {f"job{i}": (prompt(rng.randrange(1, 200), i), rng.randrange(1, 40)) for i in range(20)}
    want = {}
    for name, (tokens, amount) in jobs.items():
        want[name] = llm.generate(tokens, greedy(amount))[0].token_ids
    waiting, aborted, finished = list(jobs), set(), {}
    while waiting or llm.engine.busy:
        if waiting and rng.random() < 0.5:
            name = waiting.pop()
            llm.engine.add_request(jobs[name][0], greedy(jobs[name][1]), request_id=name)
        if rng.random() < 0.1 and llm.engine.request_ids:
            name = rng.choice(llm.engine.request_ids)
            llm.engine.abort(name)
            aborted.add(name)
        for output in llm.engine.step():
            assert (output.request_id in aborted) == (output.finish_reason == "abort")
            if output.finished and output.finish_reason != "abort":
                finished[output.request_id] = output.token_ids
    assert aborted
    assert set(finished) == set(jobs) - aborted
    assert finished == {name: want[name] for name in finished}
    assert llm.engine.table.running == []
    assert not llm.engine.model_runner.decoder.active.any()
    assert llm.engine.request_ids == []


def test_a_long_prompt_stalls_decoding_by_one_chunk(checkpoint):
    llm = make(checkpoint, decode_steps=2)
    llm.engine.add_request(prompt(5), greedy(60), request_id="short")
    llm.engine.step()
    llm.engine.add_request(prompt(200), greedy(5), request_id="long")
    seen = 1
    while "long" not in (outputs := {o.request_id: o for o in llm.engine.step()}):
        assert len(outputs["short"].token_ids) >= seen + 2  # a launch after every chunk
        seen = len(outputs["short"].token_ids)
    assert llm.engine.prefill_progress("long") == (200, 200)
    assert seen > 10


def test_first_tokens_are_handed_out_before_the_launch(checkpoint):
    llm = make(checkpoint, decode_steps=2, slots=3)
    counts = []
    for name in "abc":
        llm.engine.add_request(prompt(5), greedy(60), request_id=name)
        for _ in range(2):
            counts.append({o.request_id: len(o.token_ids) for o in llm.engine.step()})
    assert counts == [{"a": 1}, {"a": 3}, {"b": 1}, {"a": 5, "b": 3}, {"c": 1}, {"a": 7, "b": 5, "c": 3}]
    # Prompts that wait do not keep the others from decoding.
    llm.engine.reset()
    llm.engine.add_request(prompt(5), greedy(60), request_id="a")
    for number in range(4):
        llm.engine.add_request(prompt(6 + number), greedy(1), request_id=str(number))
    steps = [{o.request_id for o in llm.engine.step()} for _ in range(6)]
    assert steps == [{"a"}, {"a"}, {"0", "a"}, {"1", "a"}, {"2", "a"}, {"3", "a"}]


def test_first_come_first_served(checkpoint):
    llm = make(checkpoint, slots=1)
    for i in range(4):
        llm.engine.add_request(prompt(40, i), greedy(5), request_id=str(i))
    order = []
    while llm.engine.busy:
        order += [o.request_id for o in llm.engine.step() if o.finished]
    assert order == ["0", "1", "2", "3"]


def test_stop_token_stop_string_and_length(checkpoint):
    llm = make(checkpoint)
    base = llm.generate(prompt(50, 1), greedy(20))[0]
    assert (base.finish_reason, len(base.token_ids)) == ("length", 20)
    fifth = base.token_ids[5]
    first = base.token_ids.index(fifth)
    by_token = llm.generate(prompt(50, 1), greedy(20, stop_token_ids=(fifth,)))[0]
    assert by_token.finish_reason == "stop"
    assert by_token.token_ids == base.token_ids[: first + 1]
    assert by_token.text == "".join(f"w{t}" for t in base.token_ids[:first])
    # A stop string that begins in one token and ends in the next.
    words = [f"w{t}" for t in base.token_ids]
    stop = words[3][-1] + words[4]
    by_string = llm.generate(prompt(50, 1), greedy(20, stop=stop))[0]
    assert by_string.finish_reason == "stop"
    assert by_string.text == "".join(words)[: "".join(words).index(stop)]


def test_streamed_text_adds_up_and_never_shows_a_stop_string(checkpoint):
    llm = make(checkpoint, decode_steps=1)
    varied = {"temperature": 1.5, "seed": 1}
    whole = llm.generate(prompt(50), greedy(40, **varied))[0].text
    stop = next(whole[i : i + 4] for i in range(30, 90) if whole.index(whole[i : i + 4]) == i)
    pieces, outputs = "", []
    for output in llm.stream(prompt(50), greedy(40, stop=(stop, "never there"), **varied)):
        pieces += output.new_text
        outputs.append(output)
        assert stop not in pieces
        assert output.text == pieces
    assert pieces == whole[: whole.index(stop)]
    assert outputs[-1].finished
    assert len(outputs) > 5


def test_closing_a_stream_frees_its_slot(checkpoint):
    llm = make(checkpoint)
    stream = llm.stream(prompt(50), greedy(100))
    next(stream)
    assert llm.engine.table.running
    stream.close()
    assert not llm.engine.busy


def test_max_model_len_ends_a_sequence(checkpoint):
    out = make(checkpoint, max_model_len=64).generate(prompt(60), greedy(100))[0]
    assert (len(out.token_ids), out.finish_reason) == (4, "length")


def test_bad_requests_are_refused_and_hurt_nobody(checkpoint):
    llm = make(checkpoint)
    want = llm.generate(prompt(70), greedy(30))[0].token_ids
    llm.engine.add_request(prompt(70), greedy(30), request_id="good")
    for bad, message in [
        ([], "no tokens"),
        ("", "no tokens"),
        (prompt(256), "at most 255 fit"),
        ([5, 96], "token 96 is not in the model's vocabulary of 96"),
        ([5, -1], "token -1"),
        ([5, "a"], "a prompt is text or a list of token ids"),
        (5, "a prompt is text or a list of token ids"),
        ("\udce9", "not valid text"),
    ]:
        with pytest.raises(RequestError, match=message):
            llm.engine.add_request(bad)
        llm.engine.step()
    for params, message in [
        ({"kv_budget": 1000}, "a cache has 48 entries here"),
        ({"kv_budget": 5}, "at least"),
        ({"logprobs": 21}, "at most 20"),
    ]:
        with pytest.raises(RequestError, match=message):
            llm.engine.add_request(prompt(5), SamplingParams(**params))
    with pytest.raises(RequestError, match="in use"):
        llm.engine.add_request(prompt(5), request_id="good")
    with pytest.raises(RequestError, match=r"params is .*; give SamplingParams"):
        llm.generate(prompt(5), {"max_tokens": 3})
    with pytest.raises(RequestError, match="2 prompts but 1 sampling"):
        llm.generate([prompt(5), prompt(6)], [SamplingParams()])
    with pytest.raises(RequestError):  # the good half of a failed call does not stay behind
        llm.generate([prompt(5), []])
    finished = [o for _ in range(60) for o in llm.engine.step() if o.finished]
    assert [o.token_ids for o in finished] == [want]
    assert not llm.engine.busy


def test_bad_settings(checkpoint):
    for settings, message in [
        ({"slot": 3}, "unknown engine setting slot"),
        ({"device": "tpu"}, "allowed: auto, cpu, cuda"),
        ({"device": "cuda:99"}, "CUDA devices"),
        ({"max_model_len": 100000}, "made for 4096"),
        ({"budget": 3}, "at least 16"),
        ({"attention": "magic"}, "unknown attention backend"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            make(checkpoint, **settings)


def test_budget_above_max_model_len_is_a_full_cache(checkpoint):
    assert make(checkpoint, budget=100_000).engine.budget.capacity == 256


def test_memory_is_refused_before_loading_and_the_advice_fits(checkpoint, monkeypatch):
    monkeypatch.setattr("snapstream.engine.engine.available_memory", lambda *_: 8_000_000)
    plans = []
    with monkeypatch.context() as patched:
        patched.setattr("snapstream.engine.engine.load_model", lambda *_: pytest.fail("loaded"))
        with pytest.raises(MemoryPlanError, match="it would fit with") as error:
            make(checkpoint, device="cpu", slots=300, report_plan=plans.append)
    assert plans[0].ours.total > 8_000_000
    advice = dict(re.findall(r"(slots|budget)=(\d+)", str(error.value)))
    assert set(advice) == {"slots", "budget"}
    make(checkpoint, device="cpu", slots=int(advice["slots"]))
    make(checkpoint, device="cpu", slots=300, budget=int(advice["budget"]))
    monkeypatch.setattr("snapstream.engine.engine.available_memory", lambda *_: 100_000)
    with pytest.raises(MemoryPlanError, match="the weights alone do not fit"):
        make(checkpoint, device="cpu")


def test_no_chat_template(checkpoint):
    with pytest.raises(RequestError, match="no chat template"):
        make(checkpoint).chat([{"role": "user", "content": "w5"}])


def test_chat(checkpoint):
    llm = make(checkpoint)
    llm.tokenizer.chat_template = "{% for m in messages %}{{ m['role'] and m['content'] }} {% endfor %}w3"
    assert llm.chat_prompt([{"role": "user", "content": "w5 w6"}]) == [5, 6, 3]
    # A template writes special tokens itself; the tokenizer must not add them a second time.
    llm.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    llm.tokenizer.chat_template = "<s> {{ messages[0]['content'] }}"
    assert llm.tokenizer.encode("w5") == [1, 5]
    assert llm.chat_prompt([{"role": "user", "content": "w5 w6"}]) == [1, 5, 6]
    llm.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    llm.tokenizer.chat_template = "{% for m in messages %}{{ m['role'] and m['content'] }} {% endfor %}w3"
    direct = llm.generate("w5 w6 w3", greedy(8))[0]
    assert llm.chat([{"role": "user", "content": "w5 w6"}], greedy(8)).token_ids == direct.token_ids
    llm.tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(RequestError, match="rejects"):
        llm.chat([{"role": "user", "content": "w5"}])


def test_two_streams_at_once_and_a_foreign_abort(checkpoint):
    llm = make(checkpoint, decode_steps=1)
    want = [llm.generate(prompt(50, i), greedy(12))[0].text for i in range(2)]
    one, two = llm.stream(prompt(50, 0), greedy(12)), llm.stream(prompt(50, 1), greedy(12))
    pieces = ["", ""]
    for a, b in zip(one, two, strict=True):
        pieces[0] += a.new_text
        pieces[1] += b.new_text
    assert pieces == want
    stream = llm.stream(prompt(50), greedy(50))
    next(stream)
    llm.engine.abort(llm.engine.request_ids[0])
    assert [o.finish_reason for o in stream] == ["abort"]
    assert llm.engine.request_ids == []


def test_an_error_of_one_request_ends_that_one_alone(checkpoint, monkeypatch):
    llm = make(checkpoint)
    want = llm.generate(prompt(70), greedy(30))[0].token_ids
    llm.engine.add_request(prompt(70), greedy(30), request_id="good")
    llm.engine.add_request(prompt(60), greedy(30), request_id="bad")

    def fail(token):
        raise OverflowError("cannot decode")

    bad = next(request for request in llm.engine.table.waiting if request.request_id == "bad")
    bad.text.detokenizer.add = fail
    finished = {}
    while llm.engine.busy:
        finished.update((o.request_id, o) for o in llm.engine.step() if o.finished)
    assert finished["good"].token_ids == want
    assert finished["bad"].finish_reason == "error"
    assert finished["bad"].error == "OverflowError: cannot decode"
    assert llm.generate(prompt(70), greedy(30))[0].token_ids == want


def test_a_huge_top_k_is_all_tokens(checkpoint):
    params = greedy(5, temperature=1.0, seed=3)
    huge = greedy(5, temperature=1.0, seed=3, top_k=10**30)
    llm = make(checkpoint)
    assert llm.generate(prompt(9), huge)[0].token_ids == llm.generate(prompt(9), params)[0].token_ids


def test_prompts_as_arrays(checkpoint):
    llm = make(checkpoint)
    want = llm.generate([prompt(9)], greedy(5))[0].token_ids
    assert llm.generate(torch.tensor(prompt(9)), greedy(5))[0].token_ids == want
    assert llm.generate(numpy.array([prompt(9)]), greedy(5))[0].token_ids == want
    with pytest.raises(RequestError, match="give text"):
        llm.generate(5)


def test_a_budget_too_large_for_short_sequences_is_a_full_cache(checkpoint):
    llm = make(checkpoint, CacheBudget.of(4096), max_model_len=32)
    assert llm.engine.budget.capacity == 32
    assert llm.generate(prompt(20), greedy(12))[0].cache.dropped == 0


def test_half_precision_runs(checkpoint):
    for dtype in ("bfloat16", "float16"):
        out = make(checkpoint, dtype=dtype).generate([prompt(100), prompt(20)], greedy(20))
        assert [len(o.token_ids) for o in out] == [20, 20]


def test_a_smaller_budget_of_a_full_cache_is_snapstream(checkpoint):
    """Not StreamingLLM, which a full cache with fewer entries would be."""
    params = greedy(30, kv_budget=64, return_kept_tokens=True)
    full = make(checkpoint, budget=None).generate([prompt(150)], params)[0]
    streaming = make(checkpoint, budget=CacheBudget.preset("streaming", 64)).generate(
        [prompt(150)], greedy(30, return_kept_tokens=True)
    )[0]
    assert full.cache.pinned > 0
    assert full.cache.kept.positions != streaming.cache.kept.positions
    same = make(checkpoint, budget=64).generate([prompt(150)], params)[0]
    assert full.token_ids == same.token_ids
    assert full.cache.kept.positions == same.cache.kept.positions
    assert full.cache.limit == 64


def test_special_tokens_are_no_text_and_cost_nothing(checkpoint):
    """A stream of them was read again in full with every token."""
    llm = make(checkpoint)
    detokenizer = Detokenizer(llm.tokenizer, special_tokens(llm.tokenizer))
    began = time.perf_counter()
    assert {detokenizer.add(1) for _ in range(200_000)} == {""}
    assert time.perf_counter() - began < 2
    assert not detokenizer.pending
    assert detokenizer.add(5) == "w5"


@pytest.fixture(scope="module")
def byte_tokenizer():
    """As Llama 2 has it: words with a sign for the space before, single bytes for what is no word."""
    words = ["\u2581Hello", "\u2581world", "a"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


HELLO, WORLD, A = 256, 257, 258


@pytest.mark.parametrize("seed", range(20))
def test_text_in_pieces_equals_text_at_once(byte_tokenizer, seed):
    rng = random.Random(seed)
    words = ["\u2581Hello", "\u2581world", "a", "\N{EURO SIGN}", "\N{GRINNING FACE}", "\u00e9"]
    text = [rng.choice(words) for _ in range(30)]
    tokens = []
    for word in text:
        tokens += [HELLO + words.index(word)] if word in words[:3] else list(word.encode())
    detokenizer = Detokenizer(byte_tokenizer, frozenset())
    pieces = [detokenizer.add(token) for token in tokens]
    assert "".join(pieces) + detokenizer.flush() == byte_tokenizer.decode(tokens)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize(
    "tokens",
    [[HELLO, 0xC3, 0xA9, 0xFF, A], [HELLO, 0xE4, 0xBD, 0xA0, 0xE5, WORLD], [0xF0, 0x9F, 0x98, 0x80, 0xF0, 0x9F, A]],
)
def test_stray_bytes_are_no_error(byte_tokenizer, tokens):
    """A run of bytes is decoded as one, so a stray one changes what was text before."""
    detokenizer = Detokenizer(byte_tokenizer, frozenset())
    text = "".join(detokenizer.add(token) for token in tokens) + detokenizer.flush()
    assert "\N{REPLACEMENT CHARACTER}" in text
    assert text.endswith("a") or text.endswith(" world")


def test_bytes_that_never_become_a_character_are_not_kept_for_ever(byte_tokenizer):
    detokenizer = Detokenizer(byte_tokenizer, frozenset())
    began = time.perf_counter()
    made = "".join(detokenizer.add(0xE2) for _ in range(20_000))
    assert time.perf_counter() - began < 5
    assert set(made) == {"\N{REPLACEMENT CHARACTER}"}
    assert (made + detokenizer.flush() + detokenizer.add(WORLD)).endswith("\N{REPLACEMENT CHARACTER} world")


def test_the_space_before_the_first_word_is_kept_after_a_prompt(byte_tokenizer):
    assert Detokenizer(byte_tokenizer, frozenset()).add(WORLD) == "world"  # the beginning of a text
    assert Detokenizer(byte_tokenizer, frozenset(), [HELLO]).add(WORLD) == " world"
    cut = Detokenizer(byte_tokenizer, frozenset(), [HELLO, 0xE2])  # a prompt of token ids may end anywhere
    assert [cut.add(byte) for byte in "\N{EURO SIGN}".encode()] == ["", "", "\N{EURO SIGN}"]

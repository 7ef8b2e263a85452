"""Pinned places that are given anew while a sequence is decoded; beside lists in float64 in test_engine and others."""

import functools

import pytest
import torch

from snapstream import LLM, CacheBudget, ConfigurationError, RequestError, SamplingParams
from snapstream.compression import lay_out
from snapstream.engine.renewal import Stand, choice, newest, renewed
from snapstream.evaluation.tasks import TASKS, make_sample
from snapstream.integrations.transformers import SnapStreamCache
from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.engine.test_conversation import NO_SPECIAL, run
from tests.engine.test_engine import greedy, make
from tests.integrity import check_integrity

BUDGET = CacheBudget(4, 24, 20, window=8, kernel=5, ring="resnap")
FAMILIES = {"qwen3": {"head_dim": 32}, "deepseek-v3": {}}


@pytest.mark.parametrize("length", [1, 40, 48, 49, 200])
def test_what_is_about_to_be_dropped_has_competed(length):
    """Followed token by token: nobody leaves the ring that was not looked at, but for what was pinned then."""
    stand, decoded = Stand(lay_out(length, BUDGET)), 0
    judged = length if stand.layout.dropped else 0
    for decoded in range(300):
        due = stand.due(BUDGET)
        assert due >= decoded
        if due == decoded:
            assert stand.count(decoded) >= stand.layout.limit
            layout = renewed(stand.layout, BUDGET)
            stand = Stand(layout, decoded, stand.renewals + 1)
            judged = length + decoded - newest(BUDGET)
        stored = length + decoded + 1
        ring = stand.layout.limit - stand.layout.base
        if stand.count(decoded + 1) > stand.layout.limit:
            assert stored - ring <= max(judged, length)
    assert stand.renewals > 10
    assert choice(stand, BUDGET).capacity == BUDGET.capacity


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_depend_on_nothing_else(tmp_path, family):
    """Not on slots, steps of a launch, guesses or who else is decoded; at every step the state is whole."""
    save_checkpoint(tmp_path, family, **FAMILIES[family])
    save_tokenizer(tmp_path)
    prompts = [prompt(n, seed=n) for n in (5, 60, 131, 47, 48, 49)]
    alone = [make(tmp_path, BUDGET).generate(p, greedy(100))[0].token_ids for p in prompts]
    elastic = CacheBudget(4, 24, 20, window=8, kernel=5)
    assert alone != [out.token_ids for out in make(tmp_path, elastic).generate(prompts, greedy(100))]
    for settings in ({"slots": 1, "decode_steps": 1}, {"slots": 4, "decode_steps": 8}, {"speculative": "lookup"}):
        llm = make(tmp_path, BUDGET, **settings)
        names = [llm.engine.add_request(tokens, greedy(100)) for tokens in prompts]
        found = {}
        while len(found) < len(names):
            found |= {output.request_id: output.token_ids for output in llm.engine.step() if output.finished}
            check_integrity(llm.engine)
        assert [found[name] for name in names] == alone
    other = make(tmp_path, elastic)
    params = [greedy(100, kv_budget=BUDGET), greedy(100)] * 3
    mixed = other.generate(prompts, params)
    assert [out.token_ids for out in mixed[::2]] == alone[::2]


@pytest.mark.parametrize("stop", [None, "w7", "w41 w"])
def test_a_kept_cache_says_where_its_entries_come_from(checkpoint, stop):
    """In the first layer a key is that of its token and position, whatever was dropped before."""
    llm = make(checkpoint, BUDGET, sessions=1)
    full = make(checkpoint, None, sessions=1, max_model_len=300)
    renewed_once = 0
    for seed in range(12 if stop else 6):
        tokens = prompt(30 + 17 * seed, seed=seed)
        params = SamplingParams(
            max_tokens=90, temperature=1.0, seed=seed, stop=stop or (), logit_bias=NO_SPECIAL, ignore_eos=True
        )
        saved = run(llm, tokens, params, keep=True).saved
        saved.check_integrity()
        whole = run(full, list(saved.tokens), greedy(1), keep=True).saved
        for head, positions in enumerate(saved.positions[0].long()):
            torch.testing.assert_close(saved.layers[0].keys[0, head], whole.layers[0].keys[0, head, positions])
        heads = {tuple(sorted(head)) for layer in saved.positions for head in layer.tolist()}
        renewed_once += len(heads) > 1 and max(map(max, heads)) > len(tokens)
    assert renewed_once


def test_a_fact_told_while_decoding_is_kept():
    """By the shipped model: told early in what is decoded, asked for 1,000 tokens later, out of 256 entries."""
    llm = LLM("task-model", budget=256, max_model_len=4096, slots=4, enforce_eager=True)
    encode = functools.partial(llm.tokenizer.encode, add_special_tokens=False)
    samples = [make_sample(TASKS["told-later"], 700, n, lambda text: len(encode(text)), decode=1000) for n in range(6)]
    right = {}
    for ring in ("elastic", "resnap"):
        budget = CacheBudget.parse({"capacity": 256, "ring": ring})
        forced = [tuple(encode(sample.reply + sample.second)) for sample in samples]
        params = [greedy(len(tokens) + 12, forced=tokens, kv_budget=budget) for tokens in forced]
        outputs = llm.generate([sample.prompt + sample.lead for sample in samples], params)
        texts = [llm.tokenizer.decode(out.token_ids[len(each) :]) for out, each in zip(outputs, forced, strict=True)]
        right[ring] = sum(sample.parts[0] in text for sample, text in zip(samples, texts, strict=True))
    assert right["elastic"] <= 1
    assert right["resnap"] >= 5


def test_with_a_next_token_module():
    """Its cache has places that are given anew, too."""
    budget = CacheBudget.parse({"capacity": 64, "ring": "resnap"})
    settings = {"budget": budget, "max_model_len": 1024, "enforce_eager": True, "dtype": "float32"}
    plain, ahead = LLM("task-model-mla", **settings), LLM("task-model-mla", speculative="mtp", **settings)
    prompts = [prompt(n, seed=n) for n in (40, 150)]
    want = [out.token_ids for out in plain.generate(prompts, greedy(200))]
    outputs = ahead.generate(prompts, greedy(200))
    assert [out.token_ids for out in outputs] == want
    assert sum(out.accepted for out in outputs) > 10


def test_refusals(checkpoint, tmp_path):
    with pytest.raises(
        ConfigurationError, match="recent is 5 and top_k 40; ring='resnap' needs recent of at least 6 and"
    ):
        CacheBudget(4, 5, 40, ring="resnap", policy="keydiff")
    with pytest.raises(ConfigurationError, match="top_k 0"):
        CacheBudget(4, 40, 0, ring="resnap", policy="streaming")
    with pytest.raises(ConfigurationError, match="allowed: elastic, paper, resnap"):
        CacheBudget(4, 24, 20, ring="round")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="snapstream")
    with pytest.raises(ConfigurationError, match="ring='resnap' works in the built-in engine, not in transformers"):
        SnapStreamCache(model.config, BUDGET)
    llm = make(checkpoint, BUDGET, sessions=1)
    params = SamplingParams(max_tokens=5, stop="a stop string that is too long")
    with pytest.raises(RequestError, match="30 bytes is too long for a conversation in a cache"):
        llm.engine.add_request(prompt(9), params, keep=True)
    assert llm.generate(prompt(9), params)[0].finish_reason  # not kept, so nothing is taken back

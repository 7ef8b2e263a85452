"""Pinned places that are given anew while a sequence is decoded; beside lists in float64 in test_engine and others."""

import functools
import re
from dataclasses import replace

import pytest
import torch

from snapstream import LLM, CacheBudget, ConfigurationError, SamplingParams
from snapstream.compression import lay_out
from snapstream.engine.decode.renewal import Placement, newest
from snapstream.evaluation.tasks import TASKS, make_sample
from snapstream.integrations.transformers import SnapStreamCache
from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.engine.test_conversation import NO_SPECIAL, run
from tests.engine.test_engine import greedy, make
from tests.integrity import check_integrity

BUDGET = CacheBudget(4, 24, 20, window=8, kernel=5, ring="resnap")
FAMILIES = {"qwen3": {"head_dim": 32}, "deepseek-v3": {}}


@pytest.mark.parametrize("policy", ["spans", "mixed", "snapstream"])
@pytest.mark.parametrize("length", [1, 3, 40, 47, 48, 49, 200])
def test_what_is_about_to_be_dropped_has_competed(length, policy):
    """Followed token by token: nothing leaves the ring that was not looked at, and never more often than needed."""
    budget = replace(BUDGET, policy=BUDGET.policy if policy == "spans" else CacheBudget.preset(policy, 48).policy)
    layout = lay_out(length, budget)
    placement, renewals = Placement.of_prompt(layout, budget), 0
    competed = layout.candidate_end if layout.selects else layout.base  # tokens before this one
    for decoded in range(300):
        count, ring = placement.count(decoded), placement.layout.limit - placement.layout.base
        full = count >= placement.layout.limit
        overwritten = length + decoded - ring  # by the next token, the oldest in the ring at the earliest
        if placement.due(budget) == decoded:
            assert full
            assert overwritten >= competed  # not before it is time
            placement, renewals = placement.renewed(decoded, budget), renewals + 1
            competed, ring = length + decoded - newest(budget), placement.layout.limit - placement.layout.base
            assert placement.choice().capacity == budget.capacity
            assert placement.fixed == max(budget.sink, min(layout.base, budget.sink + 15))
        if full:
            assert length + decoded - ring < competed
    assert renewals > 10


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


def renewals_of(llm):
    """Counts how often places are given anew."""
    decode, counted = llm.engine.model_runner.decoder, []
    renew = decode.renew

    def count(*given):
        counted.append(renew(*given))
        return counted[-1]

    decode.renew = count
    return counted


def check_where_entries_come_from(saved, full):
    """In the first layer a key is that of its token and position, whatever was dropped before."""
    saved.check_integrity()
    whole = run(full, list(saved.tokens), greedy(1), keep=True).saved
    for head, positions in enumerate(saved.positions[0].long()):
        torch.testing.assert_close(saved.layers[0].keys[0, head], whole.layers[0].keys[0, head, positions])


@pytest.mark.parametrize("policy", ["spans", "mixed", "snapstream"])
def test_a_kept_cache_says_where_its_entries_come_from(checkpoint, policy):
    budget = CacheBudget(4, 24, 20, window=8, kernel=5, ring="resnap", policy=policy)
    llm, full = make(checkpoint, budget, sessions=1), make(checkpoint, None, sessions=1, max_model_len=300)
    counted = renewals_of(llm)
    for seed in range(6):
        params = SamplingParams(max_tokens=90, temperature=1.0, seed=seed, logit_bias=NO_SPECIAL, ignore_eos=True)
        check_where_entries_come_from(run(llm, prompt(30 + 17 * seed, seed=seed), params, keep=True).saved, full)
    assert len(counted) > 12


def test_a_stop_string_takes_back_tokens_from_before_a_renewal(checkpoint):
    """A string that ends just behind one; if it has too many tokens, the cache is not kept, and that is all."""
    llm, full = make(checkpoint, BUDGET, sessions=1), make(checkpoint, None, sessions=1, max_model_len=300)
    counted = renewals_of(llm)
    tokens, params = prompt(100, seed=1), SamplingParams(max_tokens=60, logit_bias=NO_SPECIAL, ignore_eos=True)
    words = re.findall(r"w\d+", llm.generate(tokens, params)[0].text)
    taken_back = 0
    for length in (2, 4, 20):
        for end in range(length + 20, 50):
            del counted[:]
            output = run(llm, tokens, replace(params, stop="".join(words[end - length : end])), keep=True)
            assert output.finish_reason == "stop"
            before = counted[-1].decoded - output.text.count("w") if counted else 0
            if before > newest(BUDGET):
                assert output.saved is None
            else:
                check_where_entries_come_from(output.saved, full)
            taken_back += before > 0
    assert taken_back > 4


def test_a_cache_of_unknown_budget_is_never_renewed(checkpoint):
    """Its layout may be any; it is decoded as it is."""
    llm = make(checkpoint, CacheBudget(4, 40, 80, window=8, ring="resnap"), sessions=1)
    small = CacheBudget(4, 12, 20, window=8)
    read = run(llm, prompt(100), SamplingParams(max_tokens=0, kv_budget=small), keep=True).saved
    answers = [run(llm, [], greedy(80), past=each).token_ids for each in (read, replace(read, budget=None))]
    assert answers[0] == answers[1] == make(checkpoint, small).generate(prompt(100), greedy(80))[0].token_ids


def test_with_a_draft_model(checkpoint):
    """Which has a ring that nobody renews, and guesses as it may."""
    want = make(checkpoint, BUDGET).generate(prompt(60), greedy(90))[0].token_ids
    llm = make(checkpoint, BUDGET, speculative="draft-model", draft_model=str(checkpoint), speculative_tokens=3)
    assert llm.generate(prompt(60), greedy(90))[0].token_ids == want


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
    budget = CacheBudget.parse({"capacity": 64, "ring": "resnap", "policy": "mixed"})
    settings = {"budget": budget, "max_model_len": 1024, "enforce_eager": True, "dtype": "float32"}
    plain, ahead = LLM("task-model-mla", **settings), LLM("task-model-mla", speculative="mtp", **settings)
    prompts = [prompt(n, seed=n) for n in (40, 150)]
    want = [out.token_ids for out in plain.generate(prompts, greedy(200))]
    outputs = ahead.generate(prompts, greedy(200))
    assert [out.token_ids for out in outputs] == want
    assert sum(out.accepted for out in outputs) > 10


def test_refusals(checkpoint):
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

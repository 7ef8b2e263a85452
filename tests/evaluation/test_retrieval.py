"""The task generator, and the shipped model on it: right answers, and what each cache policy makes of them."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from snapstream import LLM, CacheBudget, SamplingParams
from snapstream.assets import RETRIEVAL_MODEL
from snapstream.evaluation.tasks.retrieval import QUESTION_TOKENS, make_document, max_facts, vocabulary

MODEL = str(RETRIEVAL_MODEL)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.mark.parametrize(("tokens", "facts"), [(64, 1), (128, 8), (512, 32), (8192, 64)])
def test_documents_have_the_asked_length_and_facts(tokenizer, tokens, facts):
    document = make_document(tokens, facts, seed=3)
    assert len(tokenizer.encode(document.text)) == tokens
    assert document == make_document(tokens, facts, seed=3)
    assert document != make_document(tokens, facts, seed=4)
    assert len({fact.key for fact in document.facts}) == facts
    for fact in document.facts:
        assert document.words[fact.position - 1] == fact.key
        assert document.words[fact.position : fact.position + 2] == fact.answer
        assert document.words.count(fact.key) == 1
        prompt = tokenizer.encode(document.prompt(fact.key))
        assert len(prompt) == tokens + QUESTION_TOKENS
        assert prompt[-1] == tokenizer.convert_tokens_to_ids(fact.key)
    assert "<unk>" not in tokenizer.decode(tokenizer.encode(document.text))
    assert tokenizer.decode(tokenizer.encode(document.text)) == document.text


def test_depth_is_controlled():
    document = make_document(4000, 3, seed=0, depths=[0.1, 0.5, 0.9])
    assert [fact.depth for fact in document.facts] == pytest.approx([0.1, 0.5, 0.9], abs=0.01)


def test_impossible_documents_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        make_document(64, max_facts(64) + 1)
    with pytest.raises(ValueError, match="depths"):
        make_document(640, 2, depths=[0.5])


def test_loads_in_transformers_with_the_same_logits(tokenizer):
    peer = AutoModelForCausalLM.from_pretrained(MODEL)
    assert len(tokenizer) == peer.config.vocab_size == len(vocabulary())
    document = make_document(1000, 8, seed=1)
    for fact in document.facts:
        prompt = torch.tensor([tokenizer.encode(document.prompt(fact.key))])
        made = peer.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
        assert tokenizer.decode(made, skip_special_tokens=True).strip() == document.answer(fact.key)


def accuracy(llm, tokens, facts, samples):
    """Share of right answers; one fact of each document is asked for, outside the last quarter of the text."""
    prompts, want = [], []
    for seed in range(samples):
        document = make_document(tokens, facts, seed=seed, depths=[0.7 * (i + 0.5) / facts for i in range(facts)])
        fact = document.facts[seed % facts]
        prompts.append(document.prompt(fact.key))
        want.append(document.answer(fact.key))
    outputs = llm.generate(prompts, SamplingParams(max_tokens=8))
    return sum(o.text.strip() == w for o, w in zip(outputs, want, strict=True)) / samples


def engine(budget, tokens):
    return LLM(MODEL, budget=budget, max_model_len=tokens + 64, slots=4, prefill_chunk=1024, enforce_eager=True)


@pytest.mark.parametrize(("tokens", "facts", "samples"), [(1024, 8, 50), (4096, 32, 40), (8192, 8, 40)])
def test_a_quarter_of_the_cache_keeps_the_answers(tokens, facts, samples):
    full = accuracy(engine(None, tokens), tokens, facts, samples)
    assert full >= 0.97
    assert accuracy(engine(tokens // 4, tokens), tokens, facts, samples) >= full - 0.02
    for baseline in ("streaming", "random"):
        assert accuracy(engine(CacheBudget.preset(baseline, tokens // 4), tokens), tokens, facts, samples) < 0.6


def test_one_random_word_is_not_an_answer():
    """The scoring above can fail: a model that is asked for a fact the text does not hold is not counted right."""
    document = make_document(1024, 4, seed=0)
    other = make_document(1024, 4, seed=1)
    prompt = document.text + other.question(other.facts[0].key)
    out = engine(None, 1024).generate(prompt, SamplingParams(max_tokens=8))[0]
    assert out.text.strip() != other.answer(other.facts[0].key)

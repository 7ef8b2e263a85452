"""Pinned spans in the engine: against lists in float64, over turns, in company, and what is refused."""

import random
from dataclasses import replace

import pytest

from snapstream import CacheBudget, RequestError, SamplingParams
from tests.checkpoints import prompt
from tests.conversation import NaiveConversation
from tests.engine.test_conversation import NO_SPECIAL, STEPS, run
from tests.engine.test_engine import BUDGET, greedy, make, naive_generate


def random_spans(rng, longest):
    starts = [rng.randrange(longest) for _ in range(rng.randint(1, 3))]
    return tuple((start, start + rng.choice([1, 4, 10, 30])) for start in starts)


@pytest.mark.parametrize("ring", ["elastic", "paper", "resnap"])
@pytest.mark.parametrize("length", [3, 27, 40, 48, 49, 130])
def test_equals_naive_decoding(checkpoint, ring, length):
    """The ring wraps several times; pins are at the beginning, in the middle and among the last tokens."""
    for spans in ([(0, 8)], [(length // 2, length // 2 + 6)], [(length - 3, length)], [(2, 40), (length - 2, length)]):
        pin = [(start, min(end, length)) for start, end in spans]
        budget = CacheBudget(sink=4, recent=24, top_k=20, window=8, kernel=5, ring=ring)
        llm = make(checkpoint, budget)
        got = llm.generate(prompt(length), greedy(100, pin=pin))[0]
        assert got.token_ids == naive_generate(checkpoint, prompt(length), replace(budget, pin=pin), 100)


@pytest.mark.parametrize("seed", range(24))
def test_turns_equal_naive_turns(checkpoint, seed):
    """Pins of the first turn hold in later ones, also where the spans are not yet complete."""
    rng = random.Random(seed)
    budget = CacheBudget(
        sink=rng.randrange(0, 5),
        recent=rng.randrange(8, 30),
        top_k=rng.randrange(8, 40),
        window=4,
        ring=rng.choice(["elastic", "paper", "resnap"]),
        policy=rng.choice(["snapstream", "mixed", "spans"]),
        pin=random_spans(rng, 120),
    )
    llm = make(checkpoint, budget=budget, sessions=1, decode_steps=STEPS)
    naive, saved, pending = NaiveConversation(checkpoint, budget, overrun=STEPS), None, []
    for turn in range(3):
        tokens = pending + prompt(rng.choice([1, 5, 31, 33, 60]), seed=seed * 10 + turn)
        steps = rng.choice([1, 2, 10, 25])
        expected = naive.turn(tokens, steps)
        output = run(llm, tokens, greedy(steps, return_kept_tokens=True, logit_bias=NO_SPECIAL), past=saved, keep=True)
        assert list(output.token_ids) == expected
        saved, pending = output.saved, expected[-1:]
        assert [[head.tolist() for head in layer] for layer in saved.positions] == naive.positions()
        assert saved.budget.pin == budget.pin


def held(saved):
    """The tokens that every head of every layer holds."""
    return set.intersection(*({*head.tolist()} for layer in saved.positions for head in layer))


def test_pins_of_a_turn_hold_in_the_next_ones_and_in_files(checkpoint, tmp_path):
    llm = make(checkpoint, sessions=2, max_model_len=600)
    first = run(llm, prompt(120), greedy(60, pin=[(50, 57)]), keep=True)
    assert {*range(50, 57)} <= held(first.saved)
    path = tmp_path / "turn.safetensors"
    llm.engine.files.save(first.saved, path)
    loaded = llm.engine.files.load(path)
    assert loaded.budget.pin == ((50, 57),)
    for past in (first.saved, loaded):
        second = run(llm, prompt(150, seed=1), greedy(90, pin=[(300, 303)]), past=past, keep=True)
        assert {*range(50, 57), *range(300, 303)} <= held(second.saved)
        assert second.saved.budget.pin == ((300, 303), (50, 57))


def test_requests_that_share_a_prompt_pin_different_parts(checkpoint):
    llm = make(checkpoint, slots=4)
    pins = [(), [(60, 70)], [(80, 84), (20, 24)]]
    together = llm.generate([prompt(140)] * 3, [greedy(30, pin=pin, return_kept_tokens=True) for pin in pins])
    for pin, output in zip(pins, together, strict=True):
        alone = make(checkpoint).generate(prompt(140), greedy(30, pin=pin))[0]
        assert output.token_ids == alone.token_ids
        for layer in output.cache.kept.positions:
            assert all({*range(start, end)} <= {*head} for start, end in pin for head in layer)
    assert len({output.token_ids for output in together}) > 1


def test_a_context_keeps_its_pins(checkpoint):
    llm = make(checkpoint, sessions=2)
    budget = replace(BUDGET, pin=((70, 78),))
    context = llm.read(prompt(130), budget=budget)
    assert {*range(70, 78)} <= held(context.sequence)
    answer = run(llm, prompt(60, seed=2), greedy(40), past=context.sequence, keep=True)
    assert {*range(70, 78)} <= held(answer.saved)


def test_the_system_message_of_a_context_is_pinned(tmp_path):
    from snapstream.assets import PLAIN_CHAT
    from tests.bytelevel import MERGES, save_model

    llm = make(save_model(tmp_path, MERGES), 64, sessions=1, max_model_len=1000)
    llm.chat_template = PLAIN_CHAT.read_text()
    context = llm.read("There once was a ship. " * 20, system="Be brief.")
    ((start, end),) = context.sequence.budget.pin
    assert start == 0
    assert "Be brief." in llm.tokenizer.decode(context.sequence.tokens[:end])
    assert {*range(min(end, 32))} <= held(context.sequence)


def test_slots_show_pins(checkpoint):
    llm = make(checkpoint, slots=1)
    llm.generate(prompt(140), greedy(5, pin=[(60, 70)]))
    assert llm.engine.slots()[0].pin == ((60, 70),)


@pytest.mark.parametrize("family", ["gemma3", "deepseek-v3", "qwen3-next"])
def test_other_kinds_of_layers(tmp_path, family):
    """Windows and states have no places for pins; latents have one head."""
    from tests.checkpoints import save_checkpoint
    from tests.conftest import save_tokenizer, skip_wide_experts

    skip_wide_experts(family)
    save_checkpoint(tmp_path, family)
    save_tokenizer(tmp_path)
    budget = replace(CacheBudget.of(64), pin=((40, 48),))
    llm = make(tmp_path, budget, sessions=1)
    output = run(llm, prompt(150), greedy(40, return_kept_tokens=True), keep=True)
    spec = llm.engine.spec
    full = [layer for group in spec.groups if group.has_budget for layer in group.layers]
    assert full
    for layer in full:
        assert all({*range(40, 48)} <= {*head.tolist()} for head in output.saved.positions[layer])


def test_bad_pins_are_refused(checkpoint):
    llm = make(checkpoint, sessions=1)
    for pin in ([(5, 5)], [(-1, 3)], ["a"], 7):
        with pytest.raises(RequestError, match="pin"):
            SamplingParams(pin=pin)
    with pytest.raises(RequestError, match="ends after the prompt, which has 20 tokens"):
        llm.generate(prompt(20), greedy(5, pin=[(10, 21)]))
    saved = run(llm, prompt(20), SamplingParams(max_tokens=0), keep=True).saved
    with pytest.raises(RequestError, match="pin"):
        llm.engine.add_request([], greedy(5, pin=[(0, 4)]), past=saved)
    many = [(i, i + 1) for i in range(200)]
    first = run(llm, prompt(200), greedy(1, pin=many), keep=True)
    again = run(llm, prompt(5), greedy(1, pin=[(i, i + 2) for i in range(100)]), past=first.saved, keep=True)
    assert len(again.saved.budget.pin) == 256
    assert again.saved.budget.pin[:100] == tuple((i, i + 2) for i in range(100))  # the newest ones

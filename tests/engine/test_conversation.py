"""Turns over a compressed cache: against lists in float64, against one long prompt, and what is kept between turns."""

import random

import pytest
import torch

from snapstream import CacheBudget, RequestError, SamplingParams
from snapstream.compression import entry_of, lay_out, next_entry, surviving_tokens
from snapstream.engine.requests.output import KEPT_PARTS
from tests.checkpoints import prompt, prompt_before_words
from tests.conversation import NaiveConversation
from tests.engine.test_engine import greedy, make

STEPS = 3  # of a decode launch, in make()
NO_SPECIAL = dict.fromkeys(range(3), -100.0)  # special tokens are no text, so a turn would not end after them


def run(llm, tokens, params, **kwargs):
    name = llm.engine.add_request(tokens, params, **kwargs)
    while True:
        for output in llm.engine.step():
            if output.request_id == name and output.finished:
                assert output.error is None
                return output


def check_turns(checkpoint, seed):
    """Three turns, of the engine and of lists, under a random policy."""
    rng = random.Random(seed)
    window = rng.choice([1, 4, 8])
    budget = CacheBudget(
        sink=rng.randrange(0, 5),
        recent=rng.randrange(max(window, 8), 30),
        top_k=rng.randrange(8, 24),
        window=window,
        kernel=rng.choice([1, 5]),
        ring=rng.choice(["elastic", "paper", "resnap"]),
        normalize=rng.choice(["all", "candidates"]),
        pooling=rng.choice(["avg", "max"]),
        policy=rng.choice(["snapstream", "mixed", "spans"]),
    )
    llm = make(checkpoint, budget=budget, sessions=1, decode_steps=STEPS)
    naive, saved, pending = NaiveConversation(checkpoint, budget, overrun=STEPS), None, []
    for turn in range(3):
        tokens = pending + prompt(rng.choice([1, 5, 31, 32, 33, 60]), seed=seed * 10 + turn)
        steps = rng.choice([1, 2, 10, 25])
        expected = naive.turn(tokens, steps)
        output = run(llm, tokens, greedy(steps, return_kept_tokens=True, logit_bias=NO_SPECIAL), past=saved, keep=True)
        assert list(output.token_ids) == expected
        saved, pending = output.saved, expected[-1:]
        assert len(saved.tokens) == naive.length
        assert [[head.tolist() for head in layer] for layer in saved.positions] == naive.positions()
        assert saved.nbytes <= llm.engine.plan.sessions


@pytest.mark.parametrize("seed", range(12))
def test_turns_equal_naive_turns(checkpoint, seed):
    check_turns(checkpoint, seed)


def check_full_cache(checkpoint):
    """Nothing is dropped, so two turns are one prompt, and a third ends where the longest sequence does."""
    llm = make(checkpoint, budget=None, sessions=1, max_model_len=250)
    first = run(llm, prompt(100), greedy(20), keep=True)
    more = prompt(70, seed=1)
    second = run(llm, [first.token_ids[-1], *more], greedy(30), past=first.saved, keep=True)
    alone = make(checkpoint, budget=None, max_model_len=250)
    at_once = alone.generate([prompt(100) + list(first.token_ids) + more], greedy(30))[0]
    assert second.token_ids == at_once.token_ids
    assert second.cache.prompt_tokens == 190
    assert second.cache.dropped == 0
    assert second.cache.bytes_full == at_once.cache.bytes_full
    third = run(llm, [second.token_ids[-1], *prompt(20, seed=3)], greedy(100), past=second.saved)
    assert len(third.token_ids) == 250 - 240  # up to max_model_len, though the last chunk of the staging cache is short
    assert third.saved is None


def test_a_full_cache_goes_on_as_if_the_conversation_were_one_prompt(checkpoint):
    check_full_cache(checkpoint)


def test_a_turn_does_not_depend_on_who_else_runs_or_on_chunks(checkpoint):
    def talk(llm, company):
        saved, answers, pending = None, [], []
        for turn in range(3):
            others = [llm.engine.add_request(prompt(40 + i, seed=50 + i), greedy(7 + i)) for i in range(company)]
            output = run(llm, pending + prompt(45, seed=turn), greedy(23), past=saved, keep=True)
            for name in others:
                llm.engine.abort(name)
            saved, pending = output.saved, list(output.token_ids[-1:])
            answers.append((output.token_ids, [layer.tolist() for layer in saved.positions]))
        return answers

    alone = talk(make(checkpoint, sessions=1), 0)
    assert talk(make(checkpoint, sessions=1, slots=4, prefill_chunk=16), 3) == alone


def test_a_saved_cache_can_be_used_again(checkpoint):
    llm = make(checkpoint, sessions=1)
    first = run(llm, prompt(90), greedy(20), keep=True)
    question = [first.token_ids[-1], *prompt(12, seed=1)]
    once = run(llm, question, greedy(20, return_kept_tokens=True), past=first.saved, keep=True)
    llm.generate([prompt(100, seed=9)] * 3, greedy(30))
    again = run(llm, question, greedy(20, return_kept_tokens=True), past=first.saved)
    assert again.token_ids == once.token_ids
    assert again.cache.kept.positions == once.cache.kept.positions
    assert again.cache.kept.mass == pytest.approx(once.cache.kept.mass)
    # Another request with the same new tokens and no past is not mistaken for it.
    fresh = run(llm, question, greedy(20))
    assert fresh.token_ids == run(make(checkpoint), question, greedy(20)).token_ids


@pytest.mark.parametrize("stop", ["token", "string", "length"])
def test_the_saved_answer_is_whole_tokens(checkpoint, stop):
    llm = make(checkpoint, sessions=1)
    asked = prompt_before_words(lambda tokens: llm.generate(tokens, greedy(11))[0].token_ids, 60, 11)
    free = llm.generate(asked, greedy(11))[0]
    words = llm.tokenizer.convert_ids_to_tokens(list(free.token_ids))
    assert "".join(words) == free.text
    at = next(i for i in range(4, 11) if free.token_ids[i] not in free.token_ids[:i])
    if stop == "token":
        params = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(free.token_ids[at],))
    elif stop == "string":  # begins inside of one word and ends inside of the next
        params = SamplingParams(max_tokens=12, ignore_eos=True, stop=(words[at - 1][-1] + words[at][:2],))
        assert free.text.index(params.stop[0]) == len("".join(words[:at])) - 1
    else:
        params = greedy(at + 1)
    output = run(llm, asked, params, keep=True)
    kept = at - 1 if stop == "string" else at
    assert output.saved.answer == "".join(words[:kept])
    assert list(output.saved.tokens) == asked + list(free.token_ids[:kept])
    rest = prompt(9, seed=4)
    going_on = run(llm, rest, greedy(10), past=output.saved)
    # The same from a turn that ended there by itself, but for the oldest of a full ring.
    plain = run(llm, asked, greedy(kept + 1), keep=True)
    assert plain.saved.answer == output.saved.answer
    if stop == "string":
        further = len(output.token_ids) - (kept + 1)
        ends = [set(kept_by.positions[0][0].tolist()) for kept_by in (plain.saved, output.saved)]
        assert len(ends[0] - ends[1]) == further
        assert ends[1] < ends[0]
    else:
        assert run(llm, rest, greedy(10), past=plain.saved).token_ids == going_on.token_ids


def test_what_a_slot_holds(checkpoint):
    llm = make(checkpoint, sessions=1, slots=2)
    assert llm.engine.slots() == [None, None]
    name = llm.engine.add_request(prompt(100), greedy(60, return_kept_tokens=True), keep=True)
    output = None
    while not (output and output.finished):
        output = next((o for o in llm.engine.step() if o.request_id == name), output)
        use = llm.engine.slots()[0]
        if use is None:
            continue
        assert use.request_id == name
        assert use.busy == (not output.finished)
        assert use.seen == 100 + use.generated
        assert (use.sink, use.pinned, use.limit, use.held) == (4, 20, 48, 48)
        assert use.next_entry == 24 + (use.generated - 1) % 24
        assert use.bytes_held * use.seen == use.bytes_full * 48
        kept = [p for layer in output.cache.kept.positions for head in layer for p in head]
        parts = [sum(p * KEPT_PARTS // 100 == part for p in kept) for part in range(KEPT_PARTS)]
        sizes = [sum(p * KEPT_PARTS // 100 == part for p in range(100)) for part in range(KEPT_PARTS)]
        copies = llm.engine.spec.layers * llm.engine.spec.kv_heads
        assert use.kept == pytest.approx([n / (size * copies) for n, size in zip(parts, sizes, strict=True)])
    assert not llm.engine.slots()[0].busy  # and still says what it held last
    assert llm.engine.slots()[1] is None
    llm.engine.add_request(prompt(5), greedy(9))
    llm.engine.step()
    assert llm.engine.slots()[0].busy
    assert llm.engine.slots()[0].kept == (1.0,) * KEPT_PARTS
    assert llm.engine.slots()[0].held == 5 + llm.engine.slots()[0].generated - 1


def test_errors(checkpoint):
    llm = make(checkpoint)
    with pytest.raises(RequestError, match="sessions=1 or more"):
        llm.engine.add_request(prompt(5), keep=True)
    llm = make(checkpoint, sessions=1)
    first = run(llm, prompt(200), greedy(20), keep=True)
    with pytest.raises(RequestError, match=r"40 tokens after 219 of earlier turns.*at most 36 fit"):
        llm.engine.add_request(prompt(40), past=first.saved)
    aborted = llm.engine.add_request(prompt(5), greedy(50), keep=True)
    llm.engine.step()
    llm.engine.abort(aborted)
    assert [o.saved for o in llm.engine.step()] == [None]
    assert not llm.engine.busy


@pytest.mark.parametrize("seed", range(5))
def test_surviving_tokens_equal_a_ring_that_is_written(seed):
    rng = random.Random(seed)
    for _ in range(40):
        budget = CacheBudget(
            sink=rng.randrange(5), recent=rng.randrange(8, 20), top_k=rng.randrange(8, 20), window=1,
            ring=rng.choice(["elastic", "paper"]),
        )  # fmt: skip
        layout = lay_out(rng.randrange(1, 60), budget)
        count = layout.count + rng.randrange(60)
        until = rng.randrange(layout.count, count + 1)
        cache = {entry: entry for entry in range(layout.count)}
        for index in range(layout.count, count):
            slot = int(next_entry(torch.tensor(index), torch.tensor(layout.base), torch.tensor(layout.limit)))
            assert slot == entry_of(layout, index)
            cache[slot] = index
        assert surviving_tokens(layout, until, count) == sorted(i for i in cache.values() if i < until)

"""Errors and interrupts at random places: what finishes is right, what cannot says so, and the engine goes on."""

import contextlib
import gc
import math
import os
import random
import signal
import time
from functools import partial

import pytest
import torch

import snapstream
from snapstream import LLM, CacheBudget, RequestError, SamplingParams
from snapstream.config import StructuredOutputs
from tests.bytelevel import MERGES, save_model
from tests.checkpoints import prompt
from tests.engine.test_engine import greedy, make
from tests.raising import Raise

PACKAGE = os.path.dirname(snapstream.__file__) + os.sep
END_TOKENS = SamplingParams(max_tokens=25, min_tokens=6, stop=("7", "aa"))
SHAPE = StructuredOutputs(regex="(abc|[a-c]x|123456){6,}")
JOBS = [
    (prompt(10, 1), greedy(30)),
    (prompt(150, 2), greedy(25)),
    (prompt(150, 2), greedy(12, kv_budget=32, return_kept_tokens=True)),
    (prompt(97, 3), greedy(20, forced=tuple(prompt(9, seed=8)))),
    (prompt(130, 4), SamplingParams(max_tokens=30, temperature=0.8, seed=5, ignore_eos=True)),
    (prompt(33, 5), greedy(20, logprobs=2, prompt_logprobs=1)),
    (prompt(64, 6), END_TOKENS),
    (prompt(70, 7), greedy(3, kv_budget=CacheBudget.preset("random", 40))),
    (prompt(35, 8), SamplingParams(max_tokens=0)),
    (prompt(40, 9), SamplingParams(max_tokens=20, structured_outputs=SHAPE)),
]


def raising(error=None, after=10**9):
    """Raises an error in the n-th line that the package's code runs; counts lines otherwise."""
    # Between the last lines of step() no signal is ever handled, as nothing is called there.
    return Raise(error, after, lambda code, _: code.co_filename.startswith(PACKAGE) and code.co_name != "step")


@pytest.fixture(scope="module", params=[("llama3-gqa", 0), ("llama3-gqa", 2**20), ("qwen3-windows", 0)])
def made(request, tmp_path_factory):
    """Makes engines of a model."""
    family, prefixes = request.param
    weights = "q4_0" if prefixes else "auto"
    directory = tmp_path_factory.mktemp(family)
    save_model(directory, MERGES, family)
    return partial(make, directory, weights=weights, sessions=2, slots=2, prefix_cache=prefixes)


@pytest.fixture(scope="module")
def llm(made):
    return made()


@pytest.fixture(scope="module")
def alone(made):
    fresh = made()
    outputs = [fresh.generate(tokens, params)[0] for tokens, params in JOBS]
    assert {output.error for output in outputs} == {None}
    return outputs


def assert_right_or_error(output, want):
    if output.finish_reason in ("stop", "length"):
        assert output.token_ids == want.token_ids
        assert output.text == want.text
        assert output.cache == want.cache
        assert output.logprobs == want.logprobs
        assert output.prompt_logprobs == want.prompt_logprobs
    else:
        assert output.finish_reason in ("error", "abort")
        assert output.finish_reason == "abort" or "interrupted" in output.error or "injected" in output.error


def assert_idle(llm):
    assert not llm.engine.busy
    assert not llm.engine.table.running
    assert not llm.engine.table.waiting
    assert llm.engine.request_ids == []
    assert not llm.engine.model_runner.decoder.active.any()
    assert (llm.engine.model_runner.decoder.forced == -1).all()


def until_idle(llm, outputs):
    """Step through what is left; a request that nobody hears of again would make this loop fail."""
    for _ in range(400):
        if not llm.engine.busy:
            return
        outputs += llm.engine.step()
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError], ids=lambda error: error.__name__)
def test_errors_at_random_lines_of_a_step(llm, alone, error):
    """Under a random mix of requests that come, run and are aborted."""
    rng = random.Random(error.__name__)
    broken = finished = 0
    lines = 500
    for trial in range(60):
        jobs = {f"{trial}-{n}": rng.randrange(len(JOBS)) for n in range(rng.randrange(2, 6))}
        todo, outputs = list(jobs), []
        shots = rng.randrange(1, 4)
        for _ in range(400):
            if todo and rng.random() < 0.4:
                name = todo.pop()
                llm.engine.add_request(*JOBS[jobs[name]], name)
            if rng.random() < 0.03:
                llm.engine.abort(rng.choice(list(jobs)))
            aim = shots and rng.random() < 0.2
            with raising(error("injected"), rng.randrange(1, lines + 1) if aim else 10**9) as shot:
                try:
                    outputs += llm.engine.step()
                except error:
                    broken += 1
            if aim:
                shots -= 1
            else:
                lines = max(shot.lines, 50)
            if not todo and not llm.engine.busy:
                break
        until_idle(llm, outputs)
        ends = {output.request_id: output for output in outputs if output.finished}
        assert set(ends) == set(jobs)
        assert len([output for output in outputs if output.finished]) == len(jobs)  # each ends once
        for name, output in ends.items():
            assert_right_or_error(output, alone[jobs[name]])
            finished += output.finish_reason in ("stop", "length")
        assert_idle(llm)
        number = rng.randrange(len(JOBS))
        assert llm.generate(*JOBS[number])[0].token_ids == alone[number].token_ids
    assert finished > 60  # the test is of some use
    assert broken > 5


def test_an_error_at_the_end_of_a_prompt(llm, monkeypatch):
    """At the end of a prompt, which is not read any more: its request ends, too."""
    runner = llm.engine.runner
    prefill = runner.prefill

    def ending(job, seconds):
        if prefill(job, seconds) is not None:
            monkeypatch.undo()
            raise RuntimeError("injected")

    monkeypatch.setattr(runner, "prefill", ending)
    llm.engine.add_request(prompt(40), greedy(3), "one")
    outputs = []
    until_idle(llm, outputs)
    assert [(output.finish_reason, output.error) for output in outputs] == [("error", "RuntimeError: injected")]
    assert_idle(llm)


def test_interrupts_at_random_lines_of_any_call(llm, alone):
    """Also while a request is being added, discarded or forgotten; then the next one is right, and open streams are."""
    rng = random.Random(7)
    fired = 0
    for trial in range(150):
        numbers = rng.sample(range(len(JOBS)), 2)
        stream = llm.stream(*JOBS[numbers[0]])
        begun = [next(stream)]
        name = llm.engine.add_request(*JOBS[numbers[1]])
        tokens, params = JOBS[numbers[1]]
        calls = [
            (partial(llm.generate, [tokens] * 2, params), 4000),
            (partial(next, llm.stream(tokens, params)), 1200),
            (partial(llm.engine.add_request, tokens, params, f"added-{trial}"), 80),
            (partial(llm.engine.abort, name), 60),
            (partial(llm.engine.discard, [name]), 60),
            (llm.engine.reset, 40),
        ]
        call, lines = rng.choice(calls)
        try:
            with raising(KeyboardInterrupt(), rng.randrange(1, lines)) as shot:
                call()
        except KeyboardInterrupt:
            fired += 1
            assert shot.lines == shot.left
        number = rng.randrange(len(JOBS))
        assert llm.generate(*JOBS[number])[0].token_ids == alone[number].token_ids
        with contextlib.suppress(RequestError):  # forgotten, after a reset
            assert_right_or_error([*begun, *stream][-1], alone[numbers[0]])
        until_idle(llm, [])
        assert_idle(llm)
    assert fired > 40


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers that send signals")
@pytest.mark.parametrize("again", [0.0, 0.002], ids=["one", "several in a row"])
def test_real_signals_while_streams_are_open(llm, alone, again):
    """Ctrl-C in one call, at any moment: open streams go on right, or end with an error that says so."""
    rng = random.Random(again)
    previous = signal.signal(signal.SIGALRM, on_alarm)
    usual = math.inf  # a slow moment of the machine must not move most signals past the end of the calls
    for _ in range(3):
        began = time.perf_counter()
        llm.generate([tokens for tokens, _ in JOBS], [params for _, params in JOBS])
        usual = min(usual, time.perf_counter() - began)
    interrupted = whole = 0
    try:
        for _ in range(40):
            numbers = rng.sample(range(len(JOBS)), 3)
            streams = [llm.stream(*JOBS[number]) for number in numbers[:2]]
            taken = [[next(stream)] for stream in streams]
            try:
                armed[0] = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, usual / 3), again)
                llm.generate([JOBS[numbers[2]][0]] * 2, JOBS[numbers[2]][1])
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                disarm()
            for number, stream, begun in zip(numbers, streams, taken, strict=False):
                outputs = [*begun, *stream]
                assert_right_or_error(outputs[-1], alone[number])
                assert outputs[-1].finished
                if outputs[-1].finish_reason in ("stop", "length"):
                    assert "".join(output.new_text for output in outputs) == alone[number].text
                    whole += 1
            assert llm.generate(*JOBS[numbers[0]])[0].token_ids == alone[numbers[0]].token_ids
            assert torch.is_grad_enabled()
            while llm.engine.busy:  # interrupts in the cleaning up may leave outputs that nobody waits for
                llm.engine.step()
            assert_idle(llm)
    finally:
        disarm()
        signal.signal(signal.SIGALRM, previous)
    assert interrupted > 10
    assert whole > 3


armed = [False]


def on_alarm(_, frame):
    """Interrupt the call that is tested, wherever it is; an interrupt of the test itself would end the process."""
    while armed[0] and frame is not None:
        if frame.f_code is LLM.generate.__code__:
            raise KeyboardInterrupt
        frame = frame.f_back


def disarm():
    """Stop the timer; one that has gone off already, but was not handled yet, does nothing any more."""
    armed[0] = False
    signal.setitimer(signal.ITIMER_REAL, 0)


def test_what_waits_survives_an_interrupt(made, alone, monkeypatch):
    llm = made()
    for number in range(4):
        llm.engine.add_request(*JOBS[number], str(number))
    while len(llm.engine.table.running) < 2:
        llm.engine.step()
    outputs = []
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.model_runner.decoder, "launch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.engine.step()
    until_idle(llm, outputs)
    ends = {output.request_id: output for output in outputs if output.finished}
    assert "interrupted (KeyboardInterrupt)" in ends["0"].error
    assert ends["1"].finish_reason == "error"
    for number in (2, 3):
        assert_right_or_error(ends[str(number)], alone[number])
        assert ends[str(number)].finish_reason == "length"


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_forced_tokens_do_not_outlive_a_broken_launch(made, monkeypatch):
    """Nor a reset: they were the next request's first tokens."""
    llm = made(slots=1)
    want = llm.generate(prompt(50), greedy(20))[0].token_ids
    for clean_up in (lambda: None, llm.engine.reset):
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.model_runner.decoder.program, "run", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompt(50), greedy(20, forced=tuple(prompt(9, seed=3))))
        clean_up()
        assert llm.generate(prompt(50), greedy(20))[0].token_ids == want


@pytest.mark.parametrize("place", ["start", "_compress"])
def test_an_interrupt_between_reading_and_decoding(made, alone, monkeypatch, place):
    """A prompt's cache is in the slot, but is not decoded yet; or one layer has been read, but not compressed."""
    llm = made()
    stream = llm.stream(*JOBS[1])
    next(stream)
    part = llm.engine.model_runner.decoder if place == "start" else llm.engine.model_runner.prefiller
    with monkeypatch.context() as patch:
        patch.setattr(part, place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(*JOBS[3])
    last = list(stream)[-1]
    assert last.finish_reason == "error"
    assert "ask again" in last.error
    assert llm.generate(*JOBS[3])[0].token_ids == alone[3].token_ids


def test_a_stream_that_is_dropped_in_the_middle_of_a_step(made, monkeypatch):
    """The garbage collector may close it anywhere; the step that is running must not notice."""
    llm = made()
    want = llm.generate(prompt(90), greedy(30))[0].token_ids
    stream = llm.stream(prompt(60), greedy(40))
    next(stream)
    holder = [stream]
    holder.append(holder)
    del stream
    launch = llm.engine.model_runner.decoder.launch

    def collecting(*arguments, **named):
        if holder:
            del holder[0]
            gc.collect()
        return launch(*arguments, **named)

    monkeypatch.setattr(llm.engine.model_runner.decoder, "launch", collecting)
    assert llm.generate(prompt(90), greedy(30))[0].token_ids == want
    assert_idle(llm)


def test_a_stream_whose_request_was_forgotten_says_so(made):
    llm = made()
    stream = llm.stream(prompt(60), greedy(40))
    next(stream)
    llm.engine.reset()
    with pytest.raises(RequestError, match="the engine has dropped this request"):
        next(stream)


def test_outputs_do_not_copy_what_came_before(made):
    """The cost of an output does not grow with the tokens before it, also while nobody takes it."""
    llm = made(budget=CacheBudget.of(64), sessions=0, max_model_len=4096, slots=1, decode_steps=8)
    other = llm.stream(prompt(20), greedy(3000, logprobs=1))
    first = next(other)
    last = list(other)[-1]
    assert last._produced is first._produced
    assert first.token_count < last.token_count == 3000
    assert (len(first.token_ids), len(first.logprobs)) == (first.token_count, first.token_count)
    assert last.token_ids[: first.token_count] == first.token_ids
    assert last.text.startswith(first.text)
    assert last.logprobs_after(2990) == list(last.logprobs[2990:])

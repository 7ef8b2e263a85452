"""A bound on how long running sequences wait while prompts are read: the same tokens, in shorter steps."""

import itertools
import time

import pytest

from snapstream import ConfigurationError, EngineConfig
from snapstream.engine.pace import Pace
from snapstream.engine.runner import StepResult
from snapstream.engine.settings import set_up
from snapstream.sizes import parse_seconds
from tests.checkpoints import prompt
from tests.engine.requests.fake import FakeRunner, ask, make_core
from tests.engine.test_engine import greedy, make


def test_without_a_bound_a_step_is_a_chunk_and_a_launch():
    pace = Pace(None)
    with pace.measured() as counts:
        counts.append(4)
    assert pace.seconds(4) is None
    assert pace.steps(prompts=True) is None


@pytest.mark.parametrize(
    ("step", "steps", "seconds"),
    [(0.01, 4, 0.06), (0.02, 2, 0.06), (0.03, 1, 0.07), (0.3, 1, 0.0)],  # of a tenth of a second; 4 steps at most
)
def test_decoding_takes_half_of_the_time_at_most_unless_a_step_is_longer(monkeypatch, step, steps, seconds):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    pace = Pace(0.1)
    assert pace.seconds(4) == 0.1  # nothing is known yet
    assert pace.steps(prompts=True) is None
    for _ in range(3):
        with pace.measured() as counts:
            clock[0] += 4 * step
            counts.append(4)
    assert pace.steps(prompts=False) == max(1, int(0.1 / step + 1e-9))
    assert min(4, pace.steps(prompts=True)) == steps
    assert pace.seconds(4) == pytest.approx(seconds)


def test_launches_that_fail_are_not_measured():
    pace = Pace(0.1)
    with pytest.raises(RuntimeError), pace.measured():
        raise RuntimeError
    assert pace.steps(prompts=True) is None


@pytest.mark.parametrize("speculative", ["off", "lookup"])
def test_tokens_are_the_same_and_steps_are_shorter(checkpoint, monkeypatch, speculative):
    """Every layer of a chunk takes 10 ms or more here; a second one would be too late."""
    prompts = [prompt(length) for length in (40, 150, 90, 120)]

    def run(max_gap):
        llm = make(checkpoint, slots=3, speculative=speculative, max_gap=max_gap)
        prefill, counts = llm.engine.model_runner.prefiller, []
        advance = prefill.advance

        def slow(job):
            time.sleep(0.01)
            advance(job)
            counts[-1] += 1

        monkeypatch.setattr(prefill, "advance", slow)
        names = [llm.engine.add_request(each, greedy(40)) for each in prompts]
        texts, most = {}, 0
        while llm.engine.busy:
            counts.append(0)
            decodes = bool(llm.engine.table.running)
            for output in llm.engine.step():
                texts[output.request_id] = output.token_ids
            most = max(most, counts[-1] if decodes else 0)
        assert len(names) == len(texts)
        return [list(texts[name]) for name in names], most, llm.engine.spec.layers

    want, most, layers = run(None)
    assert most == layers
    for bound, expected in ((0.015, 1), (1e-6, 1), (30.0, layers)):  # there is always some progress
        got, most, _ = run(bound)
        assert got == want
        assert most == expected


@pytest.mark.parametrize("bound", [0.05, 0.1, 0.3])
def test_running_sequences_get_tokens_in_time(monkeypatch, bound):
    """With a clock of its own: a layer takes 15 ms, a decode step 10 ms and 2 ms per sequence."""
    clock, launches = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Runner(FakeRunner):
        def prefill(self, job, seconds=None):
            begin = clock[0]
            for _ in range(20):
                clock[0] += 0.015
                if seconds is not None and clock[0] - begin + 0.015 > seconds:
                    break
            return super().prefill(job)

        def decode(self, batch, most=None):
            steps = min(self.steps, most or self.steps)
            clock[0] += steps * (0.010 + 0.002 * len(batch))
            launches.append((clock[0], steps))
            done = super().decode(batch)
            return StepResult([tokens[:steps] for tokens in done.tokens])

    core = make_core(slots=4, max_gap=bound, kind=Runner)
    for number in range(12):
        core.add(ask(str(number), 40, tokens=60))
    finished = 0
    while core.busy:
        finished += sum(output.finished for output in core.step())
    assert finished == 12
    gaps = [late - early for (early, _), (late, _) in itertools.pairwise(launches)]
    assert max(gaps) <= bound * 1.1
    assert sum(gaps) / len(gaps) > 0.3 * bound or bound == 0.3  # the time is used


@pytest.mark.parametrize("drafts", [False, True])
def test_what_a_step_takes(monkeypatch, drafts):
    """A step that verifies draft tokens takes its time, however many are accepted."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Runner(FakeRunner):
        def decode(self, batch, most=None):
            clock[0] += 0.04
            done = super().decode(batch)
            return StepResult(done.tokens, [3] * len(batch)) if drafts else done

    core = make_core(max_gap=0.1, kind=Runner)
    core.add(ask("one", 10, tokens=20))
    for _ in range(4):
        core.step()
    assert core._pace.steps(prompts=True) == (1 if drafts else 5)


def test_it_is_checked(checkpoint):
    for wrong in (0, -1, True, "0.1", float("nan"), 1e9):
        with pytest.raises(ConfigurationError, match="max_gap"):
            EngineConfig(max_gap=wrong)
    with pytest.raises(ConfigurationError, match="works on a CPU only"):
        set_up(str(checkpoint), None, EngineConfig(max_gap=0.2, device="cuda"), must_exist=False)


@pytest.mark.parametrize(("text", "seconds"), [("200ms", 0.2), ("1.5s", 1.5), ("0.2", 0.2), (" 3 S ", 3.0)])
def test_times(text, seconds):
    assert parse_seconds(text, "gap") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "ms", "0", "-1s", "2m", "nan", "inf", "1e999"])
def test_what_is_no_time(text):
    with pytest.raises(ConfigurationError, match="is not a time"):
        parse_seconds(text, "gap")

"""The lab's bookkeeping: scores, intervals, caches, records, and a grid that is stopped and goes on."""

import json
import random

import pytest

from snapstream import CacheBudget, ConfigurationError
from snapstream.evaluation.grid import Grid
from snapstream.evaluation.hosts import Answer
from snapstream.evaluation.html import render_html
from snapstream.evaluation.lab import run_grid
from snapstream.evaluation.markdown import as_lines, render_markdown, summary_rows, task_rows
from snapstream.evaluation.policies import (
    ENDPOINT_POLICIES,
    ENGINE_POLICIES,
    Variant,
    make_variants,
    parse_lengths,
    parse_sizes,
    parse_sweeps,
)
from snapstream.evaluation.records import Record, RecordFile, read_records
from snapstream.evaluation.scoring import equal, found_parts, interval, paired_difference
from snapstream.evaluation.tables import Results, make_cell
from snapstream.evaluation.tasks import find_tasks, needle


@pytest.mark.parametrize(
    ("part", "output", "right"),
    [
        ("amber river", " amber river.", True),
        ("amber river", "The note says:\nAmber  River", True),
        ("amber river", "amber riverside", False),
        ("482913", '482913"}', True),
        ("482913", "1482913", False),
        ("482913", "482 913", False),
        ("lamp", "a lamp-post", True),
        ("a.b", "axb", False),
    ],
)
def test_parts_are_found_as_whole_words(part, output, right):
    assert found_parts([part], [], output) == [right]


def test_naming_everything_is_no_answer():
    """Only as many names count as there are parts, the first ones, in any order."""
    parts, rivals = ["elm", "oak", "ash"], ["fir", "yew", "oak tree"]
    assert found_parts(parts, rivals, "ash, elm and oak. Then fir.") == [True, True, True]
    assert found_parts(parts, rivals, "ash, fir, elm, oak") == [True, False, True]
    assert found_parts(parts, rivals, "fir yew oak ash elm") == [False, True, False]
    assert found_parts(parts, rivals, "ash ash ash oak ash elm") == [True, True, True]
    assert found_parts(parts, rivals, "") == [False, False, False]


def test_equal_minds_spacing_only():
    assert equal(" amber river.", "amber  river.\n")
    assert not equal(" amber river.", " amber river. And")


@pytest.mark.parametrize(
    ("right", "samples", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962)],
)
def test_intervals_are_wilsons(right, samples, low, high):
    """Values of statsmodels' proportion_confint(method="wilson")."""
    assert interval(right, samples) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("count", "sizes", "loss"), [(200, 1, 0.25), (20, 1, 0.05), (50, 4, 0.15), (5, 1, 0.2)])
def test_paired_difference_covers_the_truth(count, sizes, loss):
    """Of many drawn experiments with a known difference, at least about 95 % have it in their interval.

    Answers to one question at several sizes stand or fall together, for a part of the questions.
    """
    rng = random.Random(0)
    covered = 0
    for _ in range(600):
        gaps = []
        for _ in range(count):
            alike, fate = rng.random() < 0.5, rng.random()
            each = []
            for _ in range(sizes):
                ours = rng.random() < 0.8
                theirs = ours and (fate if alike else rng.random()) >= loss
                each.append(ours - theirs)
            gaps.append(sum(each) / sizes)
        mean, low, high = paired_difference(gaps)
        assert -1 <= low < high <= 1
        assert min(gaps) <= mean <= max(gaps)
        covered += low <= 0.8 * loss <= high
    assert covered / 600 >= 0.92


def test_paired_difference_is_never_sure():
    half = 1.96 * (1 / 7 / 7) ** 0.5  # two questions more, half a one won and half a one lost
    assert paired_difference([0, 0, 0, 0, 0]) == pytest.approx((0, -half, half), abs=1e-3)
    mean, low, high = paired_difference([1, 1, 1])
    assert (mean, high) == (1, 1)
    assert low < 0.6


def test_variants():
    sweeps = parse_sweeps(["window=8,32", "pooling=avg,max"])
    assert len(sweeps) == 4
    made = make_variants(["full", "streaming", "snapstream"], ["1/4", "64"], sweeps, ENGINE_POLICIES)
    assert len(made) == 1 + 2 + 2 * 4
    assert made[0].budget(1000) is None
    assert made[1].budget(1000) == CacheBudget.preset("streaming", 250)
    swept = Variant("snapstream", "1/4", (("window", "8"), ("recent", "1/10"), ("ring", "paper")))
    budget = swept.budget(2000)
    assert (budget.capacity, budget.recent, budget.top_k, budget.window, budget.ring) == (500, 50, 446, 8, "paper")
    assert swept.label == "snapstream window=8 recent=1/10 ring=paper"
    assert Variant("truncated", "1/4").budget(100) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parse_lengths("1k,x"), "'x' is not a number of tokens"),
        (lambda: parse_lengths(" , "), "nothing given"),
        (lambda: parse_lengths("0"), "'0' is not"),
        (lambda: parse_sizes("5/4"), "'5/4' is not a share between 0 and 1"),
        (lambda: parse_sizes("1/0"), "share"),
        (lambda: parse_sizes("-3"), "'-3' is not"),
        (lambda: parse_sweeps(["windows=3"]), "unknown setting 'windows'; allowed: window"),
        (lambda: parse_sweeps(["window=a"]), "window='a' is not a whole number"),
        (lambda: make_variants(["snap"], ["64"], [()], ENGINE_POLICIES), "unknown policy snap; allowed here: full"),
        (lambda: make_variants(["streaming"], ["64"], [()], ENDPOINT_POLICIES), "allowed here: served, truncated"),
        (lambda: make_variants(["snapstream"], [], [()], ENGINE_POLICIES), "need --budgets"),
        (lambda: Variant("snapstream", "64", (("pooling", "median"),)).budget(100), "pooling is 'median'"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ConfigurationError, match=message):
        call()


class Perfect:
    """A host that knows the answers of every other cache, and may be told to fail."""

    max_length = 4096
    overhead = 3
    chat = False
    refused = None

    def __init__(self, fail_after=None):
        self.asked, self.fail_after = [], fail_after

    def describe(self):
        return {"host": "engine", "model": "perfect"}

    def count(self, text):
        return len(text.split())

    def refuses(self, task):
        return self.refused if task.follow_up != "none" else None

    def run(self, jobs):
        for job in jobs:
            if self.fail_after is not None and len(self.asked) >= self.fail_after:
                raise KeyboardInterrupt
            self.asked.append((job.task.name, job.length, job.seed, job.depth, job.variant))
            right = job.variant.policy == "full"
            yield job, Answer(job.sample.answer if right else "no", job.length, 4, "stop", mass=(0.5, 1.0))


def grid(**changes):
    settings = {
        "tasks": find_tasks(["needle", "frequent-words"]),
        "lengths": [200, 400],
        "variants": make_variants(["full", "snapstream"], ["1/4", "300"], [()], ENGINE_POLICIES),
        "samples": 10,
        "depths": [0.0, 0.5, 1.0],
        "decode": 64,
        "seed": 7,
    }
    return Grid(**(settings | changes))


def test_a_stopped_run_goes_on_and_does_nothing_twice(tmp_path):
    path, header = tmp_path / "results.jsonl", {"model": "perfect"}
    whole = Perfect()
    with RecordFile(tmp_path / "whole.jsonl", header) as file:
        notes = run_grid(whole, grid(), file)
    # 10 samples of 2 tasks: full and 1/4 at both lengths, 300 entries only at 400 tokens.
    assert len(whole.asked) == len(set(whole.asked)) == 2 * 10 * (2 + 3)
    assert notes == []
    first = Perfect(fail_after=37)
    with RecordFile(path, header) as file, pytest.raises(KeyboardInterrupt):
        run_grid(first, grid(), file)
    with path.open("a") as file:
        file.write('{"task": "needle", "len')  # killed in the middle of a line
    second, told = Perfect(), []
    with RecordFile(path, header) as file:
        run_grid(second, grid(), file, lambda what, done, total: told.append((done, total)))
    assert first.asked + second.asked == whole.asked
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert told[0] == (37, 100)
    assert told[-1] == (100, 100)
    third = Perfect()
    with RecordFile(path, header) as file:
        run_grid(third, grid(samples=11), file)  # more samples go into the same file
    assert [asked[2] for asked in third.asked] == [17] * 10


def test_records_of_another_run_are_not_mixed_in(tmp_path):
    path = tmp_path / "results.jsonl"
    with RecordFile(path, {"model": "perfect", "decode": 64}) as file:
        run_grid(Perfect(), grid(), file)
    with pytest.raises(ConfigurationError, match=r"another run \(decode: 64 there, 65 now\); give another --output"):
        RecordFile(path, {"model": "perfect", "decode": 65})
    path.write_text('{"header": {}}\n{"task": 3}\n')
    with pytest.raises(ConfigurationError, match="line 2, is not a result"):
        RecordFile(path, {})
    path.write_text("half a line")
    with pytest.raises(ConfigurationError, match="no complete first line"):
        RecordFile(path, {})
    with pytest.raises(ConfigurationError, match="no such file"):
        read_records(tmp_path / "none")


def test_what_cannot_be_run_is_refused_before_anything_is():
    with pytest.raises(ConfigurationError, match=r"lengths: 400 tokens and up to 24 after them .* the model's 420"):
        grid().check(420)
    assert grid().check(424) == ["left out: snapstream at 300, no smaller than the prompt for lengths 200"]
    big = make_variants(["snapstream"], ["400"], [()], ENGINE_POLICIES)
    with pytest.raises(ConfigurationError, match="budgets: snapstream at 400: no smaller than the prompt"):
        grid(variants=big).check(None)
    small = make_variants(["snapstream"], ["1/100"], [()], ENGINE_POLICIES)
    with pytest.raises(ConfigurationError, match="fewer than 16 entries"):
        grid(variants=small).check(None)
    wide = make_variants(["snapstream"], ["1/4"], parse_sweeps(["window=0"]), ENGINE_POLICIES)
    with pytest.raises(ConfigurationError, match="window"):
        grid(variants=wide).check(None)


def test_each_task_has_its_own_limits():
    """A cache larger than the prompt still has something to drop where thousands of tokens are decoded after it."""
    long, needle = find_tasks(["long-decode", "needle"])
    made = grid(
        tasks=[needle, long],
        variants=make_variants(["truncated", "snapstream"], ["500"], [()], ENGINE_POLICIES),
        decode=1000,
    )
    assert made.variants_of(needle, 400) == []
    assert [variant.policy for variant in made.variants_of(long, 400)] == ["snapstream"]
    with pytest.raises(ConfigurationError, match="no room for a prompt for lengths 200, 400 in long-decode"):
        made.check(None)
    fitting = grid(tasks=[long], variants=make_variants(["truncated"], ["1400"], [()], ENGINE_POLICIES), decode=1000)
    assert len(fitting.variants_of(long, 600)) == 1
    every = grid(variants=make_variants(ENGINE_POLICIES, ["1/2"], [()], ENGINE_POLICIES))
    assert every.variants_of(needle, 400)[-1].policy == "truncated"  # the others share one reading of the prompt


def test_what_does_not_fit_is_left_out_and_said(tmp_path):
    host = Perfect()
    with RecordFile(tmp_path / "r.jsonl", {}) as file:
        notes = run_grid(host, grid(tasks=find_tasks(["needle", "multivalue"]), lengths=[40, 200], samples=3), file)
    reason = "the text is too short (8 hidden sentences do not fit into 23 tokens)"
    assert notes == [f"left out: multivalue, 40 tokens, sample {seed}: {reason}" for seed in (7, 8, 9)]
    assert {asked[:2] for asked in host.asked} == {("needle", 40), ("needle", 200), ("multivalue", 200)}


def test_hosts_without_second_turns_leave_those_tasks_out(tmp_path):
    host = Perfect()
    host.refused = "which it cannot"
    with RecordFile(tmp_path / "r.jsonl", {}) as file:
        notes = run_grid(host, grid(tasks=find_tasks(["all"]), lengths=[400]), file)
    left_out = ("late-question", "long-decode", "told-later")
    assert notes == [f"left out: {name}, which it cannot" for name in left_out]
    generated = {task.name for task in find_tasks(["all"])}
    assert {asked[0] for asked in host.asked} == generated - {*left_out}


def test_tables_show_what_is_in_the_records(tmp_path):
    with RecordFile(tmp_path / "r.jsonl", {}) as file:
        run_grid(Perfect(), grid(), file)
    _header, records = read_records(tmp_path / "r.jsonl")
    results = Results(records)
    cell = results.cell("needle", 400, "full", "")
    assert (cell.samples, cell.right, cell.equal, cell.parts, cell.mass) == (10, 10, 10, 1.0, 0.75)
    assert str(cell) == "100 (72-100)"
    assert as_lines(task_rows(results, "needle")) == [
        "| tokens | full | cache | 1/4 | 300 |",
        "|---|---|---|---|---|",
        "| 200 | 100 (72-100) | snapstream | 0 (0-28) |  |",
        "| 400 | 100 (72-100) | snapstream | 0 (0-28) | 0 (0-28) |",
    ]
    assert [r.depth for r in records if r.task == "needle" and r.length == 400 and r.policy == "full"][:4] == [
        0,
        0.5,
        1,
        0,
    ]
    assert all(r.depth is None for r in records if r.task == "frequent-words")
    text = render_markdown({"model": "perfect", "host": "engine"}, results, ["a note"])
    assert "# Accuracy of perfect" in text
    assert "- a note" in text
    assert "| snapstream | 75.0 | 75.0 |" in text
    assert json.loads((tmp_path / "r.jsonl").read_text().splitlines()[1])["answer"].startswith(" ")


def test_swept_settings_are_compared_on_the_same_questions(tmp_path):
    variants = make_variants(["snapstream"], ["1/4"], parse_sweeps(["window=8,16"]), ENGINE_POLICIES)

    class Partial(Perfect):
        def run(self, jobs):
            for job in jobs:
                right = job.variant.settings[0][1] == "8" or job.seed % 2 == 0
                yield job, Answer(job.sample.answer if right else "no", job.length, 4, "stop")

    with RecordFile(tmp_path / "r.jsonl", {}) as file:
        run_grid(Partial(), grid(variants=variants, tasks=find_tasks(["needle"])), file)
        results = Results(file.records)
    mean, low, high, count = results.difference("snapstream window=16", "snapstream window=8", ["needle"])
    assert (mean, count) == (-0.5, 20)
    assert low < -0.5 < high < 0
    text = render_markdown({"model": "m"}, results)
    assert "| window=8 | one prompt | 20 | 100.0 |  |" in text
    assert "| window=16 | one prompt | 20 | 50.0 | -50.0 (-68." in text


def record(task, length, label, size, seed, right, mass=None):
    return Record(
        task, length, seed, None, label, size, {}, None, None, length, "", "", "a", [right], right, 1, "stop", mass
    )


def test_only_lengths_that_all_caches_have_are_compared():
    """The full cache was run at two lengths, the small one at the longer alone: the overview must not mix them."""
    made = [record("needle", 200, "full", "", seed, True, [1.0]) for seed in range(10)]
    made += [record("needle", 400, "full", "", seed, seed < 5, [1.0]) for seed in range(10)]
    made += [record("needle", 400, "snapstream", "300", seed, seed < 4, [0.5]) for seed in range(10)]
    made += [record("needle", 200, "snapstream", "50", seed, False, [0.1]) for seed in range(10)]
    made += [record("needle", 400, "snapstream", "50", seed, True, [0.3]) for seed in range(10)]
    results = Results(made)
    assert results.common_lengths("needle", "300") == [400]
    assert results.over_lengths("needle", "full", "300").right == 5
    assert results.over_lengths("needle", "snapstream", "300").right == 4
    assert results.over_lengths("needle", "full", "50").right == 15
    assert results.kept_mass("snapstream", "50") == pytest.approx(0.2)
    assert results.ceiling("needle") == 0.75
    assert (
        as_lines(summary_rows(results, "300"))[-1]
        == f"| needle | {make_cell(made[10:20])} | {make_cell(made[20:30])} |"
    )


def test_guesses_are_told_by_task_and_cache():
    from dataclasses import replace

    made = [record("needle", 200, "full", "", seed, True) for seed in range(4)]
    assert "Guesses" not in render_markdown({"model": "m"}, Results(made))
    made += [record("needle", 200, "snapstream", "50", seed, True) for seed in range(4)]
    made = [replace(one, drafted=1000 * one.seed, accepted=250 * one.seed) for one in made]
    text = render_markdown({"model": "m"}, Results([*made, record("kv", 200, "full", "", 0, True)]))
    assert "| needle | 25 of 6,000 | 25 of 6,000 |" in text
    assert "| kv |  |  |" in text


def test_one_question_at_several_sizes_is_one_question():
    made = [
        record("needle", 400, label, size, seed, right=label == "truncated" or seed % 2 == 0)
        for label in ("truncated", "snapstream")
        for size in ("50", "60")
        for seed in range(8)
    ]
    mean, _, _, count = Results(made).difference("snapstream", "truncated", ["needle"])
    assert (mean, count) == (-0.5, 8)


def test_texts_of_another_version_are_not_mixed_in(tmp_path, monkeypatch):
    with RecordFile(tmp_path / "r.jsonl", {}) as file:
        run_grid(Perfect(), grid(), file)
    monkeypatch.setattr(needle, "HEADER", "Other notes are hidden in this text.")
    with RecordFile(tmp_path / "r.jsonl", {}) as file, pytest.raises(ConfigurationError, match="other texts of needle"):
        run_grid(Perfect(), grid(), file)


def test_what_the_model_cannot_do_is_said_and_not_drawn():
    made = [record(task, 400, "full", "", seed, task == "needle") for task in ("needle", "qa") for seed in range(10)]
    made += [record(task, 400, "random", "50", seed, seed < 3) for task in ("needle", "qa") for seed in range(10)]
    results = Results(made)
    assert [line.split()[1] for line in as_lines(summary_rows(results, "50"))[2:]] == ["needle"]
    for text in (render_markdown({"model": "m"}, results), render_html({"model": "m"}, results)):
        assert text.count("of the questions correctly. It cannot do this task") == 1
        assert text.count("30 (11-60)") >= 1
    assert "30 (11-60)" not in render_markdown({"model": "m"}, results).partition("## qa")[2]
    assert render_html({"model": "m"}, results).count("<svg") == 1

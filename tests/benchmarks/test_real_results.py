"""Published scores: packing keeps what tables need, and the tables of the pages are theirs."""

import random
from pathlib import Path

import pytest

from benchmarks.real_results import pack, read_packed, render, summary, tables, unpack, write_packed
from snapstream.evaluation.records import Record, RecordFile, read_records

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "docs" / "assets" / "real-models.jsonl"


def a_record(task, seed, policy, size, score, **fields):
    given = {"length": 900 + seed, "depth": None, "prompt_tokens": 900 + seed, "found": [], "settings": {}, **fields}
    given |= {"entries": None, "budget": None, "prompt_sha256": "x", "output": "y", "answer": "z", "equal": False}
    return Record(
        task=task, seed=seed, policy=policy, size=size, score=score, output_tokens=3, finish_reason="stop", **given
    )


def some_records():
    """Questions of a file and generated ones, some of which not every cache was asked."""
    draw, records = random.Random(3), []
    for policy, size in [("full", ""), *((name, size) for name in ("spans", "snapstream") for size in ("1/4", "1/8"))]:
        for seed in (1, 3, 5, 8):
            if policy == "full" or draw.random() < 0.8:
                score = draw.choice([0.0, 1.0, 1 / 3])
                records.append(a_record("facts", seed, policy, size, score, question=str(seed), text=seed // 2))
                found = [draw.random() < 0.7, True]
                records.append(a_record("kv", seed, policy, size, None, length=1000, depth=0.5, found=found))
    return records


def test_packing_keeps_all_that_tables_need(tmp_path):
    results, packed = tmp_path / "results.jsonl", tmp_path / "packed.jsonl"
    with RecordFile(results, {"model": "a.gguf"}) as file:
        for record in some_records():
            file.add(record)
    write_packed(pack(results), packed)
    found = [record for line in read_packed(packed) for record in unpack(line)]
    records = read_records(results)[1]
    assert {record.key: record.cluster for record in found} == {record.key: record.cluster for record in records}
    assert {r.key: pytest.approx(r.right, abs=1e-4) for r in found} == {r.key: r.right for r in records}
    assert tables(found) == tables(records)
    assert len(tables(found)) > 10


def test_tasks_that_say_little_are_named_and_left_out_of_the_last_rows():
    """Where no other task is in a table, its last row is about them nevertheless."""
    records = []
    for task, size, full, streaming in [
        ("facts", "1/4", 1.0, 0.0),
        ("guess", "1/4", 0.5, 0.5),
        ("code", "128", 1.0, 1.0),
    ]:
        caches = {("full", ""): full, ("streaming", size): streaming, ("spans", size): full, ("snapstream", size): 0.0}
        for (policy, at), score in caches.items():
            for seed in range(30):
                records.append(a_record(task, seed, policy, at, score, question=str(seed), text=seed))
    lines = tables(records)
    assert [line for line in lines if line.startswith("- ")] == [
        "- Not in the last rows: guess at 1/4: StreamingLLM against the full cache +0.0 (-6.1 to +6.1)."
    ]
    rows = {line.partition(" | ")[0]: line.split(" | ") for line in lines[: lines.index("**128 entries**")]}
    assert rows["| guess"][3:5] == ["50 (33-67)", "50 (33-67)"]
    assert "| mean of tasks" not in rows  # one is left
    assert rows["| points relative to full"][4].startswith("**-100 (")
    assert lines[-1].split(" | ")[4] == "+0 (-6 to +6)"


def test_swept_settings_are_refused(tmp_path):
    with RecordFile(tmp_path / "results.jsonl", {"model": "a.gguf"}) as file:
        file.add(a_record("facts", 1, "spans", "1/4", 1.0, settings={"span": "31"}, question="1", text=0))
    with pytest.raises(ValueError, match="swept"):
        list(pack(tmp_path / "results.jsonl"))


def test_the_pages_show_the_published_scores():
    """The tables of docs/accuracy.md as they are printed, and the rows of README's."""
    lines = read_packed(PUBLISHED)
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    below = page.partition("<!-- tables of docs/assets/real-models.jsonl -->")[2]
    assert below.partition("<!-- end of tables -->")[0].strip() == render(lines)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for model, name in [("1.5b", "Qwen2.5-Coder-1.5B"), ("0.5b", "Qwen2.5-Coder-0.5B"), ("smollm2", "SmolLM2-135M")]:
        table = readme.partition(f"| {name}-Instruct |")[2].partition("\n\n")[0].split("-Instruct |")[0]
        records = [record for line in lines if model in line["header"]["model"] for record in unpack(line)]
        rows = summary(records, ["streaming", "snapstream", "spans"], ["1/4", "1/8", "1/16"])
        found = [line.partition(" | ")[2].removesuffix(" |") for line in table.splitlines() if line.count("|") > 5]
        assert found
        assert [row for row in found if not any(row.endswith(each) for each in rows)] == []

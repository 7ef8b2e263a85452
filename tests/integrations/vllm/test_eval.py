"""The accuracy lab against a real vLLM with the plugin: the same scores as the built-in engine, answer by answer."""

import pytest
from typer.testing import CliRunner

from snapstream.assets import TASK_MODEL
from snapstream.cli import app
from snapstream.evaluation.records import read_records
from tests.integrations.vllm.servers import running

pytest.importorskip("vllm")
pytest.importorskip("openai")

TASKS = "multikey,multiquery,passkey,kv,tracking,qa"


def run(output, *arguments):
    options = ["--tasks", TASKS, "--lengths", "1100,2000", "--budgets", "1/2,1/8,64", "--samples", "4"]
    done = CliRunner().invoke(app, ["eval", *options, "-o", str(output), *arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return {record.key: record for record in read_records(output / "results.jsonl")[1]}


@pytest.mark.slow
def test_the_same_scores_on_vllm_and_on_the_engine(tmp_path):
    with running(tmp_path, str(TASK_MODEL), "--additional-config", '{"snapstream": 2000}') as (address, _):
        theirs = run(tmp_path / "vllm", "--endpoint", f"{address}/v1", "--policies", "spans")
    ours = run(tmp_path / "engine", "--policies", "spans")
    assert len(ours) == 6 * 2 * 4 * 3
    assert ours.keys() == theirs.keys()
    for key, record in ours.items():
        assert (theirs[key].output, theirs[key].found) == (record.output, record.found), key
        assert theirs[key].prompt_sha256 == record.prompt_sha256
        assert theirs[key].prompt_tokens == record.prompt_tokens
    right = sum(record.right for record in ours.values())
    assert 0.2 < right / len(ours) < 1  # neither all nor none: the caches decide

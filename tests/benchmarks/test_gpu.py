"""The benchmarks for a GPU, every line of them, without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
PARTS = {
    "bandwidth",
    "decode",
    "entries",
    "table5",
    "table4",
    "prefill",
    "widening",
    "position",
    "speculation",
    "memory",
}

# What is on the machines they are for: neither typer nor rich, nor the package itself.
_BARE = """
import runpy, sys
sys.modules.update(dict.fromkeys(("typer", "rich", "fastapi", "pydantic")))
sys.argv[0] = "benchmarks.gpu"
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


def run(*arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", _BARE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)


@pytest.mark.parametrize("weights", [pytest.param("bfloat16", marks=pytest.mark.slow), "q8_0"])
def test_some_parts_run_dry(tmp_path, weights):
    path = tmp_path / "gpu.json"
    done = run("--device", "cpu", "--tiny", "--only", "bandwidth,memory", "--json", path, "--weights", weights)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(path.read_text())) == {"bandwidth", "memory", "machine"}


@pytest.mark.slow
def test_every_part_runs_dry(tmp_path):
    path = tmp_path / "gpu.json"
    done = run("--device", "cpu", "--tiny", "--json", path)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert set(found) == PARTS | {"machine"}
    assert all(found[part] for part in PARTS)
    assert found["table4"][0]["votes"]["share"] > 0
    shown = run("--show", path)
    assert shown.stdout.count("\n|---") == 9
    assert "| a layer's prefill, 80 tokens |" in shown.stdout
    # Another part is added to what is there.
    done = run("--device", "cpu", "--tiny", "--only", "bandwidth", "--json", path)
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text())["table5"] == found["table5"]


def test_what_cannot_run_is_said(tmp_path):
    assert "give --tiny, too" in run("--device", "cpu").stdout
    unknown = run("--only", "decode,speed")
    assert unknown.returncode == 2
    assert "unknown part speed; allowed: bandwidth, decode" in unknown.stderr
    if not torch.cuda.is_available():
        assert "There is no CUDA device here" in run().stdout

"""What the interpreter cannot show, from Triton's compiler, which needs no device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import save_checkpoint, save_next_token
from tests.conftest import save_tokenizer

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]
KERNELS = {"_attend", "_merge", "_normalize", "_reduce", "_pool", "_sum_directions", "_differ", "_select", "_gather"}
KERNELS |= {"_commit", "_norm", "_gate", "_rotate", "_multiply", "_add_splits", "_widen", "_recur", "_gate_by"}
KERNELS |= {"_encode", "_rotate_queries", "_rotate_back"}


def compile_only(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.compile_only", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_kernels(capability, *cases):
    kernels = compile_only(capability, *cases)
    assert {kernel["name"] for kernel in kernels} >= KERNELS
    too_large = [kernel for kernel in kernels if kernel["shared"] > kernel["room"]]
    assert not too_large


@pytest.mark.slow
def test_kernels_compile_for_an_h100():
    check_kernels(90, "bfloat16:128", "bfloat16:576", "float32:64:bfloat16", "bfloat16:576:float32", "bfloat16:blocks")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_kernels_compile_for_servers(capability, dtype):
    check_kernels(capability, *(f"{dtype}:{size}" for size in (64, 96, 128, 192, 256, 576, "blocks")))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [86, 89, 120])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_kernels_compile_for_desktops(capability, dtype):
    """Whose processors have less memory of their own, so that latents do not fit."""
    check_kernels(capability, *(f"{dtype}:{size}" for size in (64, 96, 128, 192, 256, "blocks")))


@pytest.mark.parametrize(
    ("family", "speculative", "weights"),
    [
        ("qwen3", "lookup", "q4_0"),
        ("qwen3-windows", "lookup", "auto"),
        ("qwen3.5", "lookup", "auto"),
        pytest.param("gemma4-shared", "lookup", "auto", marks=pytest.mark.slow),
        pytest.param("deepseek-v3", "mtp", "auto", marks=pytest.mark.slow),
        pytest.param("deepseek-v3", "off", "q8_0", marks=pytest.mark.slow),
    ],
)
def test_no_kernel_is_compiled_after_warm_up(tmp_path, family, speculative, weights):
    """Whatever the lengths, budgets, policies and turns; a recompilation would stall everybody for a second."""
    config = save_checkpoint(tmp_path, family).config
    save_tokenizer(tmp_path)
    if speculative == "mtp":
        save_next_token(tmp_path, config)
    ready, at_the_end = compile_only("engine", tmp_path, speculative, weights)
    assert 10 < ready == at_the_end

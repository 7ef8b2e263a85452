"""Threads that wait soon sleep: the setting is made before torch is loaded, and never against the user's."""

import subprocess
import sys

import pytest

from snapstream.threads import SPINS

SHOW = "; import os; print(os.environ.get('GOMP_SPINCOUNT'))"


def setting(code, **environment):
    command = [sys.executable, "-c", code + SHOW]
    return subprocess.check_output(command, env={"PATH": "/usr/bin:/bin", **environment}, text=True).strip()


def test_the_interface_makes_it():
    assert setting("import snapstream; snapstream.LLM") == SPINS


@pytest.mark.parametrize(
    ("code", "environment", "expected"),
    [
        ("import snapstream", {}, "None"),  # importing alone does nothing
        ("import torch; from snapstream import LLM", {}, "None"),  # too late
        ("from snapstream import LLM", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("from snapstream import LLM", {"OMP_WAIT_POLICY": "PASSIVE"}, "None"),
    ],
)
def test_nothing_else_is_touched(code, environment, expected):
    assert setting(code, **environment) == expected


def test_the_command_makes_it():
    code = "import sys; sys.argv = ['snapstream', '--version']; from snapstream import cli"
    code += "\ntry:\n    cli.main()\nexcept SystemExit:\n    pass\nimport os; print(os.environ.get('GOMP_SPINCOUNT'))"
    out = subprocess.check_output([sys.executable, "-c", code], env={"PATH": "/usr/bin:/bin"}, text=True)
    assert out.split()[-1] == SPINS

"""Plans of memory do without torch's compiler: the same numbers, and nothing of it is left behind."""

import importlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from snapstream.kernels.counting import peak_of
from snapstream.kernels.uncompiled import _StandIn, without_compiler

ROOT = Path(__file__).parents[2]
STANDING_IN = ("torch._dynamo", "torch.fx.experimental.symbolic_shapes", "sympy")
# A process of its own: in this one, other tests may have imported anything.
PLAN = """
import sys
from snapstream.assets import TASK_MODEL
from snapstream.config import EngineConfig
{first}
from snapstream.engine.memory.planner import plan_engine
from snapstream.engine.settings import set_up
imported = lambda: [name for name in {names} if name in sys.modules]
for settings in ({{}}, {{"kv_dtype": "int8"}}, {{"dtype": "float32", "prefill_chunk": 64, "speculative": "lookup"}}):
    setup = set_up(str(TASK_MODEL), 256, EngineConfig(**settings))
    before = imported()
    plan = plan_engine(setup, 2**33)
    print(plan.ours.total, plan.ours.workspace, plan.ours.metadata, plan.full.total, plan.most_slots(512))
    assert imported() == before, (before, imported())
"""


def run(first):
    code = PLAN.format(first=first, names=STANDING_IN)
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_plans_are_the_same_and_import_nothing_of_the_compiler():
    without, within = run(""), run("import torch._dynamo")
    assert without == within
    assert len(without) == 15


@pytest.fixture
def missing(monkeypatch):
    """None of the modules is imported."""
    for name in STANDING_IN:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(torch, "_dynamo", raising=False)


def shapes(columns=32):
    left, right = (torch.empty(shape, device="meta") for shape in ((8, 1, 32), (4, columns)))
    return torch.where(left >= right, left + right, torch.arange(32, device="meta").clamp(min=3))


def test_operations_give_the_shapes_that_they_have(missing):
    with without_compiler():
        made = shapes()
        peak = peak_of(shapes)
        assert all(isinstance(sys.modules[name], _StandIn) for name in STANDING_IN)
    assert tuple(made.shape) == (8, 4, 32)
    assert made.dtype == torch.float32
    assert peak >= 8 * 4 * 32 * (4 + 4 + 1)
    assert not any(name in sys.modules for name in STANDING_IN)


def test_nothing_is_left_after_an_error(missing):
    with pytest.raises(RuntimeError, match="broadcast"), without_compiler(), without_compiler():
        shapes(33)
    assert not any(name in sys.modules for name in STANDING_IN)


def test_others_get_the_module_itself(missing):
    with without_compiler():
        import sympy

        assert sympy.Integer(3) + 1 == 4
        assert importlib.import_module("sympy").__file__
        assert not any(isinstance(sys.modules.get(name), _StandIn) for name in STANDING_IN)
    assert "sympy" in sys.modules


def test_other_threads_get_the_module_itself(missing):
    found = []

    def look():
        import sympy

        found.append(sympy.Basic)

    with without_compiler():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found == [importlib.import_module("sympy").Basic]


# A process of its own, because torch marks a function once, and shares its compiler.
COMPILE = """
import sys, threading
import torch
from snapstream.kernels.uncompiled import without_compiler
from tests.kernels.test_uncompiled import shapes
def look():
    import torch.fx.experimental.symbolic_shapes
with without_compiler():
    shapes()
    if {others}:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        shapes()
    elif {inside}:
        torch.compile(lambda x: x + 1, backend="eager", dynamic=True)(torch.ones(3))
        shapes()
assert not hasattr(torch.where, "__dynamo_disable")
function = lambda x, n: torch.where(x > n, x * 2, x[: x.shape[0] // 2].sum())
compiled = torch.compile(function, backend="eager", dynamic=True)
for size in (4, 6, 9):
    x = torch.arange(float(size))
    assert torch.equal(compiled(x, 2), torch.where(x > 2, x * 2, x[: size // 2].sum()))
import sympy, torch._dynamo
assert isinstance(sympy.Integer(2), sympy.Basic)
assert torch.fx.experimental.symbolic_shapes.guard_or_false is not bool
wanted, disable = [], torch._dynamo.disable
torch._dynamo.disable = lambda function, *args, **more: wanted.append(function) or disable(function, *args, **more)
shapes()
assert {others} or {inside} or wanted  # marks were taken back
"""


@pytest.mark.parametrize(("others", "inside"), [(False, False), (True, False), (False, True)])
def test_the_compiler_works_afterwards(others, inside):
    code = COMPILE.format(others=others, inside=inside)
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_is_imported_stays():
    before = importlib.import_module("sympy")
    with without_compiler():
        assert sys.modules["sympy"] is before
    assert sys.modules["sympy"] is before

from pathlib import Path

import pytest

from snapstream.engine.engine import Engine
from tests.integrity import check_integrity
from tests.sampling import sample


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Each case runs an engine: `make test` has a sample of them, `make test-slow` the rest."""
    sample(items, Path(__file__).parent)


@pytest.fixture(autouse=True)
def integrity(monkeypatch):
    """Every step of every engine leaves it as it has to be."""
    step = Engine._run_step

    def checked(self):
        step(self)
        check_integrity(self)

    monkeypatch.setattr(Engine, "_run_step", checked)

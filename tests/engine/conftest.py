import pytest

from snapstream.engine.engine import Engine
from tests.integrity import check_integrity


@pytest.fixture(autouse=True)
def integrity(monkeypatch):
    """Every step of every engine leaves it as it has to be."""
    step = Engine._run_step

    def checked(self):
        step(self)
        check_integrity(self)

    monkeypatch.setattr(Engine, "_run_step", checked)

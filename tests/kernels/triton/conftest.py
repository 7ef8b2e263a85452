"""Triton's kernels in its interpreter, where seconds pass for microseconds on a GPU."""

from pathlib import Path

import pytest

from tests.sampling import sample


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """`make test` runs a sample, `make test-slow` the rest."""
    sample(items, Path(__file__).parent)

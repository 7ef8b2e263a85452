"""Tests in Triton's interpreter, where seconds pass for microseconds on a GPU: `make test` runs a sample of them."""

import zlib
from pathlib import Path

import pytest

EVERY = 3
"""About one case of this many is in the sample, and the first of each test; `make test-slow` has the others."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the others as slow. Which they are depends on their names alone, so it is the same in every process."""
    seen = set()
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        test = item.path, item.originalname
        if test in seen and zlib.crc32(item.name.encode()) % EVERY:
            item.add_marker(pytest.mark.slow)
        seen.add(test)

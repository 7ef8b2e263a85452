"""A sample of tests that have many cases and take long: `make test` runs it, other targets run the rest."""

import zlib

import pytest

EVERY = 5
"""About one case of this many is in the sample, and the first of each test."""


def sample(items, directory, files=frozenset()):
    """Mark the other cases of the tests in a directory as slow.

    Which they are depends on their names alone, so it is the same in every process.

    Args:
        items: All tests.
        directory: Where those are that take long.
        files: Only tests of these modules; of all, if there are none.
    """
    seen = set()
    for item in items:
        if directory not in item.path.parents or (files and item.path.stem not in files):
            continue
        test = item.path, item.originalname
        if test in seen and zlib.crc32(item.name.encode()) % EVERY:
            item.add_marker(pytest.mark.slow)
        seen.add(test)

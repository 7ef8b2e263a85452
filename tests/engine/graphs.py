"""Engines as a GPU has them, on a CPU: compiled graphs, if not captured, and torch's attention."""

import dataclasses
from contextlib import contextmanager
from unittest.mock import patch

from torch._dynamo.utils import counters

from snapstream.attention import SdpaAttention
from snapstream.engine import engine
from snapstream.engine.settings import set_up


@contextmanager
def compiled():
    """Engines that are made meanwhile compile their graphs."""

    def with_graphs(*args, **settings):
        return dataclasses.replace(set_up(*args, **settings), eager=False, backend=SdpaAttention())

    with patch.object(engine, "set_up", with_graphs):
        yield


def graphs_compiled():
    """How many, in this process."""
    return counters["stats"]["unique_graphs"]

"""A real vLLM in this process: its scheduler can be looked at, and an engine starts in seconds."""

import os
from pathlib import Path

import pytest

from tests.sampling import sample

# Read by vLLM when it is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Otherwise vLLM binds every engine to the same core, and the other cores stay idle.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# numba, which n-gram speculation imports, raises the number of threads to that of the cores when it is first used. The
# next engine of stock vLLM in the process then gives wrong tokens (seen with AVX2 only).
os.environ.setdefault("NUMBA_NUM_THREADS", os.environ["OMP_NUM_THREADS"])
os.environ.pop("SNAPSTREAM_BUDGET", None)


START_ENGINES = frozenset(
    f"test_{name}"
    for name in ("connector", "data_parallel", "engine", "parallel", "policies", "router", "server", "speculation")
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the tests that start engines, `make test-vllm` runs a sample, and `make test-vllm-slow` the rest."""
    sample(items, Path(__file__).parent, START_ENGINES)


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A tiny random Llama; vLLM's CPU kernels want heads of 32."""
    return _checkpoint(tmp_path_factory, "llama3-gqa", head_dim=32)


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory):
    """A tiny random DeepSeek-V3."""
    return _checkpoint(tmp_path_factory, "deepseek-v3")


def _checkpoint(tmp_path_factory, family, **changes):
    from tests.checkpoints import save_checkpoint
    from tests.conftest import save_tokenizer

    directory = tmp_path_factory.mktemp(family)
    save_checkpoint(directory, family, **changes)
    save_tokenizer(directory)
    return directory

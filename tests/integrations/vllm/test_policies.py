"""The plugin's part of the matrix of tests/compression/test_policies.py: every policy it allows, in a real vLLM."""

import importlib.metadata

import pytest

from snapstream.config import CacheBudget
from snapstream.config import policy as registry
from snapstream.errors import ConfigurationError
from snapstream.integrations.vllm.settings import check_supported
from tests.checkpoints import prompt
from tests.integrations.vllm.engines import generate, vllm_engine
from tests.integrations.vllm.test_engine import LENGTHS, builtin
from tests.integrations.vllm.test_settings import vllm_config
from tests.policies import OWN


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    points = [
        importlib.metadata.EntryPoint(name, f"tests.policies:{attribute}", registry.ENTRY_POINTS)
        for name, attribute in [("spread", "SpreadVotes"), ("large-values", "LargeValues")]
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.ENTRY_POINTS else [])


@pytest.fixture(scope="module")
def prompts():
    return [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("name", [*OWN, "large-values"])
def test_equals_the_built_in_engine(llama, prompts, name):
    budget = CacheBudget.preset(name, 128)
    with vllm_engine(llama, budget, max_num_batched_tokens=48) as llm:
        assert generate(llm, prompts, 40) == builtin(llama, prompts, budget, 40)


def test_what_looks_at_all_queries_is_refused():
    with pytest.raises(ConfigurationError, match="spread, which needs all queries"):
        check_supported(vllm_config(), CacheBudget.preset("spread", 128))

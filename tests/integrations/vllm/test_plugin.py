"""How the plugin is switched on, and what stops it."""

import dataclasses
import logging

import pytest

from snapstream.config import CacheBudget
from snapstream.errors import ConfigurationError
from snapstream.integrations.vllm import compatibility, plugin
from snapstream.integrations.vllm.step import METADATA_FIELDS, Step
from tests.conftest import save_tokenizer
from tests.integrations.vllm.engines import BUDGET, generate, vllm_engine

vllm = pytest.importorskip("vllm")


def engine_config(checkpoint, **settings):
    from vllm.engine.arg_utils import EngineArgs

    arguments = {"model": str(checkpoint), "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 512}
    return EngineArgs(**(arguments | settings)).create_engine_config()


def test_without_a_budget_vllm_stays_as_it_is(llama):
    config = engine_config(llama)
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert config.scheduler_config.scheduler_cls is None
    assert not config.additional_config


def test_a_budget_names_our_worker_and_scheduler_and_keeps_other_settings(llama, monkeypatch):
    config = engine_config(llama, additional_config={"snapstream": 128, "other": 1})
    assert config.parallel_config.worker_cls == "snapstream.integrations.vllm.worker.SnapStreamWorker"
    assert config.scheduler_config.scheduler_cls.startswith("snapstream.")
    assert config.additional_config == {"snapstream": CacheBudget.of(128).as_dict(), "other": 1}
    monkeypatch.setenv("SNAPSTREAM_BUDGET", "256")
    assert engine_config(llama).additional_config == {"snapstream": CacheBudget.of(256).as_dict()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"additional_config": {"snapstream": {"capacity": 128, "windw": 4}}}, "unknown field windw; allowed"),
        ({"additional_config": {"snapstream": "many"}}, "neither a number"),
        ({"additional_config": {"snapstream": 128}, "kv_cache_dtype": "fp8"}, "use auto"),
        ({"additional_config": {"snapstream": 128}, "worker_cls": "my.Worker"}, "--worker-cls my.Worker"),
        (
            {
                "additional_config": {"snapstream": 128},
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
                "pipeline_parallel_size": 2,
            },
            "speculative decoding with pipeline parallelism",
        ),
    ],
)
def test_what_cannot_work_stops_the_server_at_start(llama, settings, message):
    with pytest.raises(ConfigurationError, match=message):
        engine_config(llama, **settings)


def test_a_drafter_with_a_cache_of_its_own_is_refused(llama):
    drafter = {"method": "draft_model", "model": str(llama), "num_speculative_tokens": 2}
    with pytest.raises(ConfigurationError, match='speculative decoding with draft_model; only "method": "ngram"'):
        engine_config(llama, additional_config={"snapstream": 128}, speculative_config=drafter)


def test_attention_that_depends_on_where_entries_lie_is_refused(tmp_path):
    """Nothing in the configuration says ALiBi; the layers do."""
    from transformers import BloomConfig, BloomForCausalLM

    BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=64, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with (
        pytest.raises(ConfigurationError, match=r"SnapStream plugin cannot serve layer .*ALiBi"),
        vllm_engine(tmp_path, BUDGET, max_model_len=512),
    ):
        pass


@pytest.mark.parametrize(
    ("version", "is_supported"),
    [("0.31.1", False), ("0.32.0", True), ("0.33.2", True), ("0.34.0", False), ("dev", False)],
)
def test_versions(monkeypatch, version, is_supported):
    monkeypatch.setattr(vllm, "__version__", version)
    obstacle = compatibility.unsupported_version()
    assert (obstacle is None) == is_supported
    if obstacle:
        assert version in obstacle
        assert "install vLLM 0.32 or 0.33" in obstacle


def test_another_version_stops_whoever_asked_and_warns_the_others(monkeypatch, caplog):
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="vllm.snapstream"):
        plugin.register()
    assert "SnapStream is installed but disabled: vLLM 0.99.0 is not supported" in caplog.text
    monkeypatch.setenv("SNAPSTREAM_BUDGET", "512")
    with pytest.raises(ConfigurationError, match=r"SNAPSTREAM_BUDGET is set, but vLLM 0.99.0 is not supported"):
        plugin.register()


def test_another_version_also_stops_who_asks_by_additional_config(llama, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    with pytest.raises(ConfigurationError, match=r"vLLM 0.99.0 is not supported"):
        engine_config(llama, additional_config={"snapstream": 128})
    assert engine_config(llama).scheduler_config.scheduler_cls is None


def test_every_hook_is_there_and_a_missing_one_is_named():
    hooks = compatibility.FRONT_HOOKS | compatibility.CORE_HOOKS | compatibility.WORKER_HOOKS
    assert compatibility.missing_hook(hooks | compatibility.RUNNER_V1_HOOKS) is None
    gone = {"vllm.v1.core.kv_cache_manager:KVCacheManager.no_such_function": ("self",)}
    assert "has no vllm.v1.core.kv_cache_manager:KVCacheManager.no_such_function" in compatibility.missing_hook(gone)
    other = {"vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": ("self", "sequence")}
    assert "takes (self, request, " in compatibility.missing_hook(other)


def test_a_field_that_nobody_has_looked_at_stops_the_worker(llama, monkeypatch):
    import vllm.v1.worker.gpu_model_runner  # noqa: F401 (it must have the real one)
    from vllm.v1.attention import backend

    assert compatibility.unknown_field(METADATA_FIELDS) is None
    renamed = dataclasses.make_dataclass("CommonAttentionMetadata", ["seq_lens", "seq_lens_on_host"])
    monkeypatch.setattr(backend, "CommonAttentionMetadata", renamed)
    message = "CommonAttentionMetadata of vLLM .* has seq_lens_on_host, which could hold lengths of full caches"
    with pytest.raises(ConfigurationError, match=message), vllm_engine(llama, BUDGET):
        pass


def test_a_slot_mapping_that_is_a_copy_stops_the_first_step(llama, monkeypatch):
    """Tokens would be written where stock vLLM writes them, and every answer would be wrong without a word."""
    rewrite = Step.rewrite

    def rewrite_a_copy(self, metadata, *sizes):
        return rewrite(self, dataclasses.replace(metadata, slot_mapping=metadata.slot_mapping.clone()), *sizes)

    monkeypatch.setattr(Step, "rewrite", rewrite_a_copy)
    with (
        vllm_engine(llama, BUDGET) as llm,
        pytest.raises(ConfigurationError, match="by a separate slot mapping"),
    ):
        generate(llm, [[5] * 300], 5)


def test_registering_twice_wraps_once():
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    once = EngineArgs.create_engine_config
    plugin.register()
    assert EngineArgs.create_engine_config is once


@pytest.mark.parametrize("is_split", [True, False])
def test_cuda_graphs_leave_attention_outside(is_split, caplog, monkeypatch):
    from types import SimpleNamespace

    from vllm.config import CUDAGraphMode

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="vllm.snapstream")
    for mode in (*CUDAGraphMode, None):
        caplog.clear()
        compilation = SimpleNamespace(cudagraph_mode=mode, is_attention_compiled_piecewise=lambda: is_split)
        plugin._forbid_full_graphs(compilation)
        if mode in (None, CUDAGraphMode.NONE):
            assert compilation.cudagraph_mode == mode
        else:
            want = CUDAGraphMode.PIECEWISE if is_split else CUDAGraphMode.NONE
            assert compilation.cudagraph_mode == want
            assert (f"CUDA graphs are disabled instead of {mode.name}" in caplog.text) == (not is_split)

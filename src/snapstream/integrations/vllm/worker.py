"""vLLM's worker with compressing layers. The configuration names it, so every executor (Ray's too) builds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from snapstream.errors import ConfigurationError
from snapstream.integrations.vllm.blocks import budgeted
from snapstream.integrations.vllm.compatibility import WORKER_HOOKS, missing_hook
from snapstream.integrations.vllm.layers import LayerCompressor, adopt_layers
from snapstream.integrations.vllm.runner import adopt_runner
from snapstream.integrations.vllm.settings import active_budget
from snapstream.integrations.vllm.step import Sequences

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker


class SnapStreamWorker(Worker):
    """The platform's worker, for a configuration that carries a budget."""

    compressors: list[LayerCompressor]
    sequences: Sequences

    def init_device(self) -> None:
        """Build the model runner, and have it report its steps."""
        if obstacle := missing_hook(WORKER_HOOKS):
            raise ConfigurationError(f"SnapStream cannot work here: {obstacle}")
        super().init_device()
        budget = active_budget(self.vllm_config)
        if budget is None:
            raise ConfigurationError("the SnapStream worker was chosen, but the configuration carries no budget")
        self.sequences = Sequences(budget, self.cache_config.block_size)
        adopt_runner(self.model_runner, self.sequences, is_v2=bool(self.use_v2_model_runner))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and give its attention layers their compressors."""
        super().load_model(*args, **kwargs)
        self.compressors = adopt_layers(self.vllm_config, self.sequences)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """What every layer needs of the cache: vLLM's specs, with the budget."""
        return {name: budgeted(name, spec, self.sequences.budget) for name, spec in super().get_kv_cache_spec().items()}

    def initialize_from_config(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Allocate the cache, and find out how its blocks are laid out."""
        super().initialize_from_config(kv_cache_config, *args, **kwargs)
        self.sequences.block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        sizes: dict[str, int] = {}
        for group in self.model_runner.attn_groups[0]:
            if getattr(group, "kernel_block_size", None) is not None:
                raise ConfigurationError("the SnapStream plugin needs one block size for all attention layers")
            sizes |= dict.fromkeys(group.layer_names, group.get_metadata_builder(0).kv_cache_spec.block_size)
        for compressor in self.compressors:
            compressor.bind(sizes[compressor.name])

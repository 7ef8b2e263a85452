"""vLLM's worker with compressing layers. It is named in the configuration, so every executor (also Ray's) builds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from snapstream.compression.scoring import KEY_CHUNK
from snapstream.errors import ConfigurationError
from snapstream.integrations.vllm.blocks import budgeted, is_budgeted
from snapstream.integrations.vllm.compatibility import WORKER_HOOKS, missing_hook, unknown_field
from snapstream.integrations.vllm.layers import LayerCompressor, adopt_layers
from snapstream.integrations.vllm.runner import adopt_runner
from snapstream.integrations.vllm.settings import active_budget, most_drafts
from snapstream.integrations.vllm.step import METADATA_FIELDS, Sequences

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker


class SnapStreamWorker(Worker):
    """The platform's worker, for a configuration that carries a budget."""

    compressors: list[LayerCompressor]
    sequences: Sequences

    def init_device(self) -> None:
        """Build the model runner, and make it report its steps."""
        if obstacle := missing_hook(WORKER_HOOKS) or unknown_field(METADATA_FIELDS):
            raise ConfigurationError(f"SnapStream cannot work here: {obstacle}")
        super().init_device()
        budget = active_budget(self.vllm_config)
        if budget is None:
            raise ConfigurationError("the SnapStream worker was chosen, but the configuration carries no budget")
        caching = bool(self.cache_config.enable_prefix_caching)
        drafts = most_drafts(self.vllm_config)
        self.sequences = Sequences(budget, self.cache_config.block_size, shares=caching, drafts=drafts)
        adopt_runner(self.model_runner, self.sequences, is_v2=bool(self.use_v2_model_runner))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and give its attention layers their compressors."""
        super().load_model(*args, **kwargs)
        self.compressors = adopt_layers(self.vllm_config, self.sequences)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """The cache specs of all layers: vLLM's specs, with the budget added."""
        budget, drafts = self.sequences.budget, self.sequences.drafts
        return {name: budgeted(name, spec, budget, drafts) for name, spec in super().get_kv_cache_spec().items()}

    def determine_available_memory(self) -> int:
        """Bytes for the cache: vLLM's result, minus the temporary memory for compressing the longest prompt.

        vLLM profiles with a dummy batch, in which nothing is compressed. Compression works on one layer at a time: it
        copies the prompt's pages out, copies its keys once more, and scores its window against chunks of them.
        """
        available: int = super().determine_available_memory()
        if self.cache_config.kv_cache_memory_bytes is not None:
            return available  # an explicit setting of the user is not reduced
        names, specs = {each.name for each in self.compressors}, self.get_kv_cache_spec().items()
        sizes = (spec.page_size_bytes // spec.block_size for name, spec in specs if name in names)
        per_token = max(sizes, default=0)  # a rank of a pipeline may have nothing to compress
        heads = max((compressor.layer.num_heads for compressor in self.compressors), default=0)
        logits = heads * self.sequences.budget.queries * min(KEY_CHUNK, self.model_config.max_model_len) * 4
        return available - 2 * per_token * self.model_config.max_model_len - 3 * logits

    def initialize_from_config(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Allocate the cache, and determine the layout of its blocks."""
        super().initialize_from_config(kv_cache_config, *args, **kwargs)
        groups, names = kv_cache_config.kv_cache_groups, {each.name for each in self.compressors}
        ours = [number for number, group in enumerate(groups) if is_budgeted(group.kv_cache_spec)]
        if len(ours) != 1 or set(groups[ours[0]].layer_names) != names:
            made = ", ".join(f"{type(each.kv_cache_spec).__name__} ({len(each.layer_names)} layers)" for each in groups)
            raise ConfigurationError(
                "the SnapStream plugin compresses layers with full attention, which vLLM must put into one KV cache "
                f"group without others, but it has made: {made}. It makes several if another kind of layer is rarer, "
                "and none where all layers have a sliding window or a state: there is nothing to compress"
            )
        self.sequences.block_size = groups[ours[0]].kv_cache_spec.block_size
        sizes: dict[str, int] = {}
        for group in self.model_runner.attn_groups[ours[0]]:
            if getattr(group, "kernel_block_size", None) is not None:
                raise ConfigurationError(
                    f"the SnapStream plugin cannot split blocks of {self.sequences.block_size} tokens, as "
                    f"{group.backend.get_name()} requires: set --block-size {group.kernel_block_size}"
                )
            sizes |= dict.fromkeys(group.layer_names, group.get_metadata_builder(0).kv_cache_spec.block_size)
        for compressor in self.compressors:
            size = sizes[compressor.name]
            compressor.bind(size, kv_cache_config.num_blocks * self.sequences.block_size // size)
        if has_kv_transfer_group():
            get_kv_transfer_group().attach(self.vllm_config, self.compressors, self.sequences.block_size)

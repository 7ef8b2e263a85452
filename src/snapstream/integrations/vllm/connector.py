"""Prefill on one vLLM instance and decoding on another, with the compressed cache transferred between them.

1. The prefill instance gets a prompt with ``max_tokens=1`` and ``kv_transfer_params={"do_remote_decode": true}``. In
   the step that processes the end of the prompt, every layer hands out its compressed cache. The caches are copied to
   the host, and the blocks return to the pool when the request ends.
2. The answer has the first token, and ``kv_transfer_params`` for the decode instance.
3. The decode instance gets the prompt *with the first token*, and these parameters. While other requests decode, it
   fetches the cache into exactly the blocks that the sequence will decode in. It then continues with the second token.

vLLM creates one connector in the scheduler's process, and one in each worker's.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from snapstream.errors import ConfigurationError
from snapstream.integrations.vllm.settings import active_budget, arriving_tokens
from snapstream.integrations.vllm.transfer import transfer_settings
from snapstream.integrations.vllm.transfer_worker import Arrival, Tasks, TransferWorker

if TYPE_CHECKING:
    from snapstream.integrations.vllm.layers import LayerCompressor


class SnapStreamConnector(KVConnectorBase_V1, SupportsHMA):
    """``--kv-transfer-config '{"kv_connector": "SnapStreamConnector", ...}'``; the plugin registers the name."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if active_budget(vllm_config) is None:
            raise ConfigurationError("SnapStreamConnector needs a budget: --additional-config '{\"snapstream\": ...}'")
        self.settings = transfer_settings(vllm_config)
        self._requests: dict[str, Any] = {}
        self._keys: dict[str, str] = {}
        self._tasks = Tasks()
        self.transfer_worker: TransferWorker | None = None

    # -- the scheduler's side -----------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Record a request whose cache is received from, or sent to, another instance."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            self._requests[request.request_id] = request
            self._keys[request.request_id] = secrets.token_hex(16)
        elif arriving_tokens(params) is not None:
            self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All tokens of a prompt that another instance has prefilled; they are loaded asynchronously."""
        length = arriving_tokens(request.kv_transfer_params)
        if length is None:
            return 0, False
        return length - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record the blocks that a cache is to be fetched into."""
        if not num_external_tokens:
            return
        assert self._kv_cache_manager is not None
        params, request_id = request.kv_transfer_params, request.request_id
        layout = self._kv_cache_manager.snapstream.layouts[request_id].prompt
        ids = list(blocks.get_block_ids()[0])
        self._tasks.arrivals.append(Arrival(request_id, params["key"], params["source"], params["ranks"], layout, ids))

    def build_connector_meta(self, scheduler_output: Any) -> Tasks:
        """The tasks of the workers for this step."""
        tasks, self._tasks = self._tasks, Tasks()
        scheduled = scheduler_output.num_scheduled_tokens
        tasks.departures = {request_id: self._keys[request_id] for request_id in scheduled if request_id in self._keys}
        return tasks

    def update_connector_output(self, connector_output: Any) -> None:
        """Give up on caches that could not be fetched; vLLM fails these requests, or prefills their prompts."""
        for request_id in connector_output.failed_recving or ():
            request = self._requests.get(request_id)
            if request is not None:
                request.kv_transfer_params["do_remote_prefill"] = False

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return the parameters for the decode instance. Blocks are freed at once: their contents are on the host."""
        self._requests.pop(request.request_id, None)
        key = self._keys.pop(request.request_id, None)
        if key is None:
            return False, None
        if request.status != RequestStatus.FINISHED_LENGTH_CAPPED or request.num_output_tokens != 1:
            self._tasks.dropped.append(key)
            return False, None
        return False, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "key": key,
            "source": self.settings.source,
            "ranks": self._vllm_config.parallel_config.tensor_parallel_size,
            "for_ranks": self.settings.ranks,
            "length": request.num_prompt_tokens,
        }

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do the same as :meth:`request_finished`; there is only one group."""
        return self.request_finished(request, block_ids[0])

    # -- the workers' side --------------------------------------------------------------------------------------------

    def attach(self, vllm_config: Any, compressors: Sequence[LayerCompressor], block_size: int) -> None:
        """Connect the worker's side to the layers, once these have caches."""
        self.transfer_worker = TransferWorker(self.settings, vllm_config, compressors, block_size)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start fetching caches."""
        tasks = self._get_connector_metadata()
        assert isinstance(tasks, Tasks)
        if self.transfer_worker is not None:
            self.transfer_worker.start(tasks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no fetched cache is used in the running step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: layers hand out their compressed caches themselves."""

    def wait_for_save(self) -> None:
        """Publish the compressed caches of the step's prompts."""
        tasks = self._get_connector_metadata()
        assert isinstance(tasks, Tasks)
        if self.transfer_worker is not None:
            self.transfer_worker.publish(tasks)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose caches have arrived, and those whose caches could not be fetched."""
        if self.transfer_worker is None:
            return KVConnectorTransferResults()
        arrived, failed = self.transfer_worker.store_arrived()
        return KVConnectorTransferResults(finished_recving=arrived | failed, failed_recving=failed)

    def shutdown(self) -> None:
        """Abandon transfers in progress."""
        if self.transfer_worker is not None:
            self.transfer_worker.close()

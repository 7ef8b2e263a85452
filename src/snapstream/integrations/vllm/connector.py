"""Prefill on one instance of vLLM, decoding on another: compressed caches travel between them.

The prefill instance gets a prompt with ``max_tokens=1`` and ``kv_transfer_params={"do_remote_decode": true}``. With
the step that reads the prompt's end, every layer hands out what it has kept of it; the caches go to the host, and the
blocks back to the pool with the request's end. Its answer has a first token and ``kv_transfer_params`` for the decode
instance. That gets the prompt *with the first token*, and these parameters: it fetches the cache into as few blocks as
it will ever hold, while others decode, and goes on with the second token.

vLLM makes one connector in the scheduler's process, and one in each worker's.
"""

from __future__ import annotations

import functools
import logging
import re
import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from snapstream.compression.layout import Layout, lay_out
from snapstream.errors import ConfigurationError
from snapstream.integrations.vllm.parcel import Label, Share, heads_of, pack, shares_for, unpack
from snapstream.integrations.vllm.settings import TRANSFER_KEY, active_budget, arriving_tokens, granted_budget
from snapstream.integrations.vllm.tcp import TcpTransport, parse_address
from snapstream.integrations.vllm.transports import KEEP, LIMIT, DirectoryTransport, Transport, number_of
from snapstream.transfers import to_host

if TYPE_CHECKING:
    from snapstream.integrations.vllm.layers import LayerCompressor

FETCHES = 4
"""Caches that a worker fetches at the same time."""
_SETTINGS = {"directory", "address", "peers", "keep", "limit", "ranks"}

logger = logging.getLogger("vllm.snapstream")


@dataclass
class Arrival:
    """A cache to be fetched.

    Attributes:
        request_id: Whose.
        key: Its name, but for the rank.
        source: Where it is.
        ranks: Tensor-parallel ranks of the instance that sends it.
        layout: Its layout.
        blocks: Block ids of the manager that it goes to.
    """

    request_id: str
    key: str
    source: str
    ranks: int
    layout: Layout
    blocks: list[int]


@dataclass
class Tasks(KVConnectorMetadata):
    """What the scheduler's side tells the workers' in a step.

    Attributes:
        departures: Names of caches that leave when their prompts have been read, by request.
        arrivals: Caches to be fetched.
        dropped: Names of caches that nobody will want.
    """

    departures: dict[str, tuple[str, Layout]] = field(default_factory=dict)
    arrivals: list[Arrival] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


class SnapStreamConnector(KVConnectorBase_V1, SupportsHMA):
    """``--kv-transfer-config '{"kv_connector": "SnapStreamConnector", ...}'``; the plugin registers the name."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        budget = active_budget(vllm_config)
        if budget is None:
            raise ConfigurationError("SnapStreamConnector needs a budget: --additional-config '{\"snapstream\": ...}'")
        self.budget = budget
        self.settings = transfer_settings(vllm_config)
        self._requests: dict[str, Any] = {}
        self._keys: dict[str, str] = {}
        self._tasks = Tasks()
        self.workers: _Worker | None = None

    # -- the scheduler's side -----------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Remember a request that comes from, or goes to, another instance."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            self._requests[request.request_id] = request
            self._keys[request.request_id] = secrets.token_hex(16)
        elif arriving_tokens(params) is not None:
            self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All tokens of a prompt that another instance has read, fetched while others decode."""
        length = arriving_tokens(request.kv_transfer_params)
        if length is None:
            return 0, False
        return length - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note which blocks a cache goes to."""
        if not num_external_tokens:
            return
        params = request.kv_transfer_params
        budget = granted_budget(self.budget, request.sampling_params.extra_args)
        self._tasks.arrivals.append(
            Arrival(
                request.request_id,
                params["key"],
                params["source"],
                params["ranks"],
                lay_out(params["length"], budget),
                list(blocks.get_block_ids()[0]),
            )
        )

    def build_connector_meta(self, scheduler_output: Any) -> Tasks:
        """What the workers are told with a step."""
        tasks, self._tasks = self._tasks, Tasks()
        for request_id in scheduler_output.num_scheduled_tokens:
            key = self._keys.get(request_id)
            if key is not None:
                request = self._requests[request_id]
                budget = granted_budget(self.budget, request.sampling_params.extra_args)
                tasks.departures[request_id] = key, lay_out(request.num_prompt_tokens, budget)
        return tasks

    def update_connector_output(self, connector_output: Any) -> None:
        """A cache that could not be fetched is not asked for again; vLLM fails the request, or reads its prompt."""
        for request_id in connector_output.failed_recving or ():
            request = self._requests.get(request_id)
            if request is not None:
                request.kv_transfer_params["do_remote_prefill"] = False

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Say what the decode instance needs. Blocks are free at once: their contents are on the host."""
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
        """As :meth:`request_finished`; there is one group."""
        return self.request_finished(request, block_ids[0])

    # -- the workers' side --------------------------------------------------------------------------------------------

    def attach(self, vllm_config: Any, compressors: Sequence[LayerCompressor], block_size: int) -> None:
        """Give a worker's side the layers, once they have caches."""
        self.workers = _Worker(self.settings, vllm_config, compressors, block_size)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to fetch."""
        tasks = self._get_connector_metadata()
        assert isinstance(tasks, Tasks)
        if self.workers is not None:
            self.workers.start(tasks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is fetched for a step that runs."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Layers hand out what they have kept by themselves."""

    def wait_for_save(self) -> None:
        """Publish what the step's prompts have left."""
        tasks = self._get_connector_metadata()
        assert isinstance(tasks, Tasks)
        if self.workers is not None:
            self.workers.publish(tasks)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Caches that have arrived, and those that will not."""
        if self.workers is None:
            return KVConnectorTransferResults()
        arrived, failed = self.workers.store_arrived()
        return KVConnectorTransferResults(finished_recving=arrived | failed, failed_recving=failed)

    def shutdown(self) -> None:
        """Give up what is on its way."""
        if self.workers is not None:
            self.workers.close()


@dataclass(frozen=True)
class TransferSettings:
    """``kv_connector_extra_config``.

    Attributes:
        directory: Of one host, for caches on their way.
        address: ``host:port`` where other instances find this one's caches; each rank adds itself to the port.
        peers: Addresses that caches may be fetched from.
        keep: Seconds after which a cache that nobody fetches is forgotten.
        limit: GiB that a rank keeps on the host.
        ranks: Tensor-parallel ranks of decode instances.
    """

    directory: Path | None
    address: str | None
    peers: tuple[str, ...]
    keep: float
    limit: float
    ranks: int

    @property
    def source(self) -> str:
        """What a decode instance is told."""
        return "directory" if self.directory else self.address or ""

    def transport(self, rank: int) -> Transport:
        """Open it, for one rank."""
        if self.directory is not None:
            return DirectoryTransport(self.directory, keep=self.keep, limit=self.limit)
        return TcpTransport(self.address, self.peers, offset=rank, keep=self.keep, limit=self.limit)


def transfer_settings(vllm_config: Any) -> TransferSettings:
    """Read the settings of the connector.

    Raises:
        ConfigurationError: Unknown, bad or missing ones.
    """
    transfer = vllm_config.kv_transfer_config
    given = dict(transfer.kv_connector_extra_config or {})
    if unknown := sorted(set(given) - _SETTINGS):
        raise ConfigurationError(
            f"unknown in kv_connector_extra_config: {', '.join(unknown)}; allowed: {', '.join(sorted(_SETTINGS))}"
        )
    directory, address, peers = given.get("directory"), given.get("address"), given.get("peers", [])
    over_tcp = address is not None or bool(peers)
    if (directory is not None) == over_tcp:
        raise ConfigurationError(
            "kv_connector_extra_config must say how caches travel: either a directory that both instances see, or "
            "TCP, with an address on prefill instances and their addresses as peers on decode instances"
        )
    if not isinstance(peers, list) or not all(isinstance(peer, str) for peer in peers):
        raise ConfigurationError(f"peers in kv_connector_extra_config is {peers!r}; it must be a list of host:port")
    if over_tcp and transfer.is_kv_producer and not address:
        raise ConfigurationError("a prefill instance needs an address in kv_connector_extra_config")
    if over_tcp and transfer.is_kv_consumer and not peers:
        raise ConfigurationError("a decode instance needs peers in kv_connector_extra_config")
    for each in (*peers, *([address] if address else [])):
        parse_address(each)
    return TransferSettings(
        directory=None if directory is None else Path(str(directory)),
        address=address,
        peers=tuple(peers),
        keep=number_of(given, "keep", KEEP),
        limit=number_of(given, "limit", LIMIT),
        ranks=int(number_of(given, "ranks", vllm_config.parallel_config.tensor_parallel_size)),
    )


def check_transfer(params: Any, tokens: int, settings: TransferSettings, config: Any) -> str | None:
    """Why a request cannot be served here, or ``None``.

    Args:
        params: Its sampling parameters.
        tokens: Of its prompt.
        settings: Of this instance.
        config: vLLM's configuration.
    """
    transfer = (params.extra_args or {}).get(TRANSFER_KEY)
    if transfer is None:
        return None
    if not isinstance(transfer, dict):
        return f"{TRANSFER_KEY} must be an object"
    leaves, comes = (bool(transfer.get(name)) for name in ("do_remote_decode", "do_remote_prefill"))
    role, own_ranks = config.kv_transfer_config, config.parallel_config.tensor_parallel_size
    ranks, for_ranks = transfer.get("ranks"), transfer.get("for_ranks")
    length, key, source = (transfer.get(name) for name in ("length", "key", "source"))
    allowed = settings.peers if settings.directory is None else ("directory",)
    is_key = isinstance(key, str) and re.fullmatch("[0-9a-f]{32}", key) is not None
    obstacles = [
        (leaves and comes, f"{TRANSFER_KEY} asks for both, do_remote_decode and do_remote_prefill"),
        (leaves and not role.is_kv_producer, "this instance hands out no caches (kv_role)"),
        (leaves and params.max_tokens != 1, "with do_remote_decode, max_tokens must be 1"),
        (comes and not role.is_kv_consumer, "this instance fetches no caches (kv_role)"),
        (
            comes and (not isinstance(length, int) or isinstance(length, bool) or length != tokens - 1),
            f"length is {length!r}, but the prompt has {tokens} tokens; it must be what was read, and one token",
        ),
        (comes and not is_key, "key is none that a prefill instance gives out"),
        (comes and not (type(ranks) is int and 0 < ranks <= 1024), f"ranks is {ranks!r}; it must be a number of them"),
        (
            comes and for_ranks != own_ranks,
            f"the cache was cut for {for_ranks} tensor-parallel ranks, and this instance has {own_ranks}; set ranks in "
            "kv_connector_extra_config of the prefill instance",
        ),
        (comes and source not in allowed, f"source is {source!r}; this instance fetches from: {', '.join(allowed)}"),
        (comes and params.prompt_logprobs is not None, "prompt_logprobs of a prompt that another instance has read"),
        (
            comes and bool(getattr(params, "skip_reading_prefix_cache", None)),
            "skip_reading_prefix_cache with a cache that comes from another instance",
        ),
        ((leaves or comes) and params.n != 1, "n must be 1 where a cache travels"),
        (
            (leaves or comes) and getattr(params, "structured_outputs", None) is not None,
            "structured outputs, whose state would be lost on the way",
        ),
    ]
    return next((text for is_met, text in obstacles if is_met), None)


class _Worker:
    """One rank's side.

    Args:
        settings: Of the connector.
        vllm_config: vLLM's configuration.
        compressors: Of all layers, in their order.
        block_size: Tokens per block of the manager.
    """

    def __init__(
        self, settings: TransferSettings, vllm_config: Any, compressors: Sequence[LayerCompressor], block_size: int
    ) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        self.rank, self.ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.transport = settings.transport(self.rank)
        self.compressors, self.block_size = compressors, block_size
        config = vllm_config.model_config
        self._model = len(compressors), config.get_hidden_size(), config.get_vocab_size()
        self._collected: dict[str, dict[int, tuple[Tensor, Tensor | None]]] = {}
        self._fetching: dict[str, tuple[Arrival, Future[list[tuple[Tensor, Tensor | None]]]]] = {}
        self._threads = ThreadPoolExecutor(FETCHES, thread_name_prefix="snapstream-fetch")
        self._heads = compressors[0].heads_total
        self._departing = [
            (receiver, share)
            for receiver in range(settings.ranks)
            for share in shares_for(self._heads, self.ranks, settings.ranks, receiver)
            if share.sender == self.rank
        ]
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="snapstream-send")
        for number, compressor in enumerate(compressors):
            compressor.hand_out = functools.partial(self._collect, number)

    def start(self, tasks: Tasks) -> None:
        """Begin to fetch what a step asks for."""
        for arrival in tasks.arrivals:
            self._fetching[arrival.request_id] = arrival, self._threads.submit(self._fetch, arrival)
        for key in tasks.dropped:
            for receiver, share in self._departing:
                self.transport.drop(_name(key, share.sender, receiver))
        self.transport.sweep()

    def publish(self, tasks: Tasks) -> None:
        """Send off what layers have handed out in the step that just ran."""
        collected, self._collected = self._collected, {}
        for request_id, layers in collected.items():
            departure = tasks.departures.get(request_id)
            if departure is None or len(layers) < len(self.compressors):
                continue
            key, layout = departure
            # One copy per layer and kind; the rest is done beside the next step.
            host = to_host([part for number in sorted(layers) for part in layers[number] if part is not None])
            parts = iter(host)
            pairs = [(next(parts), None if layers[n][1] is None else next(parts)) for n in sorted(layers)]
            for receiver, share in self._departing:
                name = _name(key, self.rank, receiver)
                self.transport.announce(name)
                self._sender.submit(self._send, name, self._label(layout, share), self._cut(pairs, share))

    def store_arrived(self) -> tuple[set[str], set[str]]:
        """Store what has come since the last step; returns requests whose caches are there, and that failed."""
        arrived, failed = set(), set()
        for request_id, (arrival, future) in list(self._fetching.items()):
            if not future.done():
                continue
            del self._fetching[request_id]
            try:
                self._store(arrival, future.result())
                arrived.add(request_id)
            except Exception as error:  # whatever it is, it is about this request alone
                logger.error("SnapStream: the cache of request %s did not come: %s", request_id, error)
                failed.add(request_id)
        return arrived, failed

    def close(self) -> None:
        """Stop fetching and serving."""
        for threads in (self._sender, self._threads):
            threads.shutdown(wait=False, cancel_futures=True)
        self.transport.close()

    def _send(self, name: str, label: Label, layers: list[tuple[Tensor, Tensor | None]]) -> None:
        try:
            self.transport.publish(name, pack(label, layers))
        except Exception as error:  # the other side will not find it, and say so
            logger.error("SnapStream: a cache could not be kept for another instance: %s", error)
            self.transport.drop(name)

    def _collect(self, number: int, request_id: str, keys: Tensor, values: Tensor | None) -> None:
        self._collected.setdefault(request_id, {})[number] = keys.contiguous(), values

    def _fetch(self, arrival: Arrival) -> list[tuple[Tensor, Tensor | None]]:
        parts = []
        for share in shares_for(self._heads, arrival.ranks, self.ranks, self.rank):
            label, name = self._label(arrival.layout, share), _name(arrival.key, share.sender, self.rank)
            parts.append(unpack(self.transport.fetch(arrival.source, share.sender, name, label.most_bytes()), label))
        joined = []
        for of_layer in zip(*parts, strict=True):
            values = [value for _, value in of_layer if value is not None]
            joined.append((torch.cat([keys for keys, _ in of_layer]), torch.cat(values) if values else None))
        return joined

    def _cut(self, layers: list[tuple[Tensor, Tensor | None]], share: Share) -> list[tuple[Tensor, Tensor | None]]:
        """Those heads of this rank's that go to another one."""
        first = share.first - heads_of(self._heads, self.ranks, self.rank).start
        own = slice(first, first + share.heads)
        return [(keys[own], None if values is None else values[own]) for keys, values in layers]

    def _store(self, arrival: Arrival, layers: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        device = self.compressors[0].layer.kv_cache.device
        entry = torch.arange(arrival.layout.count)
        blocks = torch.tensor(arrival.blocks)
        slots = (blocks[entry // self.block_size] * self.block_size + entry % self.block_size).to(device)
        for compressor, (keys, values) in zip(self.compressors, layers, strict=True):
            compressor.put(keys.to(device), None if values is None else values.to(device), slots)

    def _label(self, layout: Layout, share: Share) -> Label:
        cache, kv_cache = self.compressors[0].cache, self.compressors[0].layer.kv_cache
        assert cache is not None
        value_size = None if cache.value_shape is None else cache.value_shape[1]
        return Label(
            layout=layout,
            model=self._model,
            first_head=share.first,
            dtype=str(kv_cache.dtype).removeprefix("torch."),
            key_shape=(share.heads, cache.key_shape[1]),
            value_shape=None if value_size is None else (share.heads, value_size),
        )


def _name(key: str, sender: int, receiver: int) -> str:
    """Of what one rank sends to another."""
    return f"{key}-{sender}-{receiver}"

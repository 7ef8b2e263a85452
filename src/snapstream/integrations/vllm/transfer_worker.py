"""The worker's side of KV transfer: sends the caches that its layers hand out, and stores those that arrive."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from snapstream.compression.layout import Layout
from snapstream.integrations.vllm.payload import Label, Share, heads_of, pack, shares_for, unpack
from snapstream.integrations.vllm.transfer import TransferSettings
from snapstream.transfers import to_host

if TYPE_CHECKING:
    from snapstream.integrations.vllm.layers import LayerCompressor
    from snapstream.integrations.vllm.step import Outgoing

FETCHES = 4
"""Number of caches that a worker fetches concurrently."""

logger = logging.getLogger("vllm.snapstream")


@dataclass
class Arrival:
    """A cache to be fetched.

    Attributes:
        request_id: The request it is for.
        key: Its name, without the ranks.
        source: Where to fetch it.
        ranks: Number of tensor-parallel ranks of the sending instance.
        layout: Its layout.
        blocks: The manager's block ids that it is stored in.
    """

    request_id: str
    key: str
    source: str
    ranks: int
    layout: Layout
    blocks: list[int]


@dataclass
class Tasks(KVConnectorMetadata):
    """What the scheduler's side tells the workers in a step.

    Attributes:
        departures: Names of caches to send when their prompts have been prefilled, by request.
        arrivals: Caches to be fetched.
        dropped: Names of caches that are no longer needed.
    """

    departures: dict[str, str] = field(default_factory=dict)
    arrivals: list[Arrival] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


class TransferWorker:
    """Sends and receives the caches of one rank.

    Args:
        settings: Settings of the connector.
        vllm_config: vLLM's configuration.
        compressors: The compressors of all layers, in order.
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
        self._collected: dict[Outgoing, dict[int, tuple[Tensor, Tensor | None]]] = {}
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
        """Start fetching the caches of a step, and drop those that are no longer needed."""
        for arrival in tasks.arrivals:
            self._fetching[arrival.request_id] = arrival, self._threads.submit(self._fetch, arrival)
        for key in tasks.dropped:
            for receiver, share in self._departing:
                self.transport.drop(_name(key, share.sender, receiver))
        self.transport.sweep()

    def publish(self, tasks: Tasks) -> None:
        """Publish the caches that layers have handed out in the step that just ran."""
        collected, self._collected = self._collected, {}
        for one, layers in collected.items():
            key = tasks.departures.get(one.request_id)
            if key is None or len(layers) < len(self.compressors):
                continue
            # One copy per layer for keys and one for values; everything else overlaps with the next step.
            host = to_host([part for number in sorted(layers) for part in layers[number] if part is not None])
            parts = iter(host)
            pairs = [(next(parts), None if layers[n][1] is None else next(parts)) for n in sorted(layers)]
            for receiver, share in self._departing:
                name = _name(key, self.rank, receiver)
                self.transport.announce(name)
                label = self._label(one.layout.prompt, share)
                self._sender.submit(self._send, name, label, self._cut(pairs, share))

    def store_arrived(self) -> tuple[set[str], set[str]]:
        """Store caches that have arrived since the last step.

        Returns:
            Requests whose caches are stored, and requests whose transfer failed.
        """
        arrived, failed = set(), set()
        for request_id, (arrival, future) in list(self._fetching.items()):
            if not future.done():
                continue
            del self._fetching[request_id]
            try:
                self._store(arrival, future.result())
                arrived.add(request_id)
            except Exception as error:  # any error affects this request alone
                logger.error("SnapStream: the cache of request %s could not be fetched: %s", request_id, error)
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
        except Exception as error:  # the receiver will report that it is missing
            logger.error("SnapStream: a cache could not be published for another instance: %s", error)
            self.transport.drop(name)

    def _collect(self, number: int, one: Outgoing, keys: Tensor, values: Tensor | None) -> None:
        self._collected.setdefault(one, {})[number] = keys.contiguous(), values

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
        """Select the heads of this rank that belong to a share."""
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
    """Name of the payload from one rank to another."""
    return f"{key}-{sender}-{receiver}"

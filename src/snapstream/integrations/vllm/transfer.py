"""The settings of KV transfer, and the checks of requests that use it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapstream.errors import ConfigurationError
from snapstream.integrations.vllm.settings import TRANSFER_KEY
from snapstream.integrations.vllm.tcp import TcpTransport, parse_address
from snapstream.integrations.vllm.transports import KEEP, LIMIT, DirectoryTransport, Transport

_SETTINGS = {"directory", "address", "peers", "keep", "limit", "ranks"}


@dataclass(frozen=True)
class TransferSettings:
    """``kv_connector_extra_config``.

    Attributes:
        directory: Directory on a single host, for caches in transfer.
        address: ``host:port`` at which other instances fetch this one's caches; each rank adds its number to the port.
        peers: Addresses that caches may be fetched from.
        keep: Seconds after which a cache that was not fetched is dropped.
        limit: Maximum size of the caches that a rank keeps on the host, in GiB.
        ranks: Number of tensor-parallel ranks of decode instances.
    """

    directory: Path | None
    address: str | None
    peers: tuple[str, ...]
    keep: float
    limit: float
    ranks: int

    @property
    def source(self) -> str:
        """The source that a decode instance is given."""
        return "directory" if self.directory else self.address or ""

    def transport(self, rank: int) -> Transport:
        """Open the transport for one rank."""
        if self.directory is not None:
            return DirectoryTransport(self.directory, keep=self.keep, limit=self.limit)
        return TcpTransport(self.address, self.peers, offset=rank, keep=self.keep, limit=self.limit)


def transfer_settings(vllm_config: Any) -> TransferSettings:
    """Read the settings of the connector.

    Raises:
        ConfigurationError: A setting is unknown, invalid or missing.
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
            "kv_connector_extra_config must say how caches are transferred: either by a directory that both instances "
            "can access, or by TCP, with an address on prefill instances and these addresses as peers on decode "
            "instances"
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
        keep=_number_of(given, "keep", KEEP),
        limit=_number_of(given, "limit", LIMIT),
        ranks=int(_number_of(given, "ranks", vllm_config.parallel_config.tensor_parallel_size)),
    )


def check_transfer(params: Any, tokens: int, config: Any) -> str | None:
    """Why a request cannot be served here, or ``None``.

    Args:
        params: Its sampling parameters.
        tokens: Number of its prompt tokens.
        config: vLLM's configuration.
    """
    transfer = (params.extra_args or {}).get(TRANSFER_KEY)
    if transfer is None:
        return None
    if not isinstance(transfer, dict):
        return f"{TRANSFER_KEY} must be an object"
    settings = transfer_settings(config)
    leaves, comes = (bool(transfer.get(name)) for name in ("do_remote_decode", "do_remote_prefill"))
    role, own_ranks = config.kv_transfer_config, config.parallel_config.tensor_parallel_size
    ranks, for_ranks = transfer.get("ranks"), transfer.get("for_ranks")
    length, key, source = (transfer.get(name) for name in ("length", "key", "source"))
    allowed = settings.peers if settings.directory is None else ("directory",)
    is_key = isinstance(key, str) and re.fullmatch("[0-9a-f]{32}", key) is not None
    obstacles = [
        (leaves and comes, f"{TRANSFER_KEY} sets both do_remote_decode and do_remote_prefill"),
        (leaves and not role.is_kv_producer, "this instance does not send caches (kv_role)"),
        (leaves and params.max_tokens != 1, "with do_remote_decode, max_tokens must be 1"),
        (comes and not role.is_kv_consumer, "this instance does not fetch caches (kv_role)"),
        (
            comes and (not isinstance(length, int) or isinstance(length, bool) or length != tokens - 1),
            f"length is {length!r}, but the prompt has {tokens} tokens; it must be the prefilled prompt and one token",
        ),
        (comes and not is_key, "key is not one that a prefill instance returns"),
        (
            comes and not (type(ranks) is int and 0 < ranks <= 1024),
            f"ranks is {ranks!r}; it must be a number from 1 to 1024",
        ),
        (
            comes and for_ranks != own_ranks,
            f"the cache was split for {for_ranks} tensor-parallel ranks, but this instance has {own_ranks}; set ranks "
            "in kv_connector_extra_config of the prefill instance",
        ),
        (comes and source not in allowed, f"source is {source!r}; this instance fetches from: {', '.join(allowed)}"),
        (
            comes and params.prompt_logprobs is not None,
            "prompt_logprobs of a prompt that another instance has prefilled",
        ),
        (
            comes and bool(getattr(params, "skip_reading_prefix_cache", None)),
            "skip_reading_prefix_cache with a cache that comes from another instance",
        ),
        ((leaves or comes) and params.n != 1, "n must be 1 if a cache is transferred"),
        (
            (leaves or comes) and getattr(params, "structured_outputs", None) is not None,
            "structured outputs, whose state is not transferred",
        ),
    ]
    return next((text for is_met, text in obstacles if is_met), None)


def _number_of(settings: Mapping[str, Any], name: str, default: float) -> float:
    """Read a positive number from the settings of the connector.

    Raises:
        ConfigurationError: The value is not a positive number.
    """
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**40:
        raise ConfigurationError(f"{name} in kv_connector_extra_config is {value!r}; it must be a positive number")
    return float(value)

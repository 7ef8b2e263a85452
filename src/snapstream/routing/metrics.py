"""The router's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from snapstream.routing.instances import Pool

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class RouterMetrics(Collector):
    """Counters of one router, and the state of its instances.

    Args:
        pools: Pools by role, ``prefill`` or ``decode``.
    """

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self.pools = pools
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.requests = Counter(
            "snapstream_router_requests",
            "Requests by how they were served (split, whole) and by outcome.",
            ("way", "outcome"),
            registry=self.registry,
        )
        self.whole = Counter(
            "snapstream_router_whole",
            "Requests that were not split, by reason.",
            ("reason",),
            registry=self.registry,
        )
        self.retries = Counter(
            "snapstream_router_retries",
            "Attempts that failed before the first byte of an answer, by role of the instance.",
            ("does",),
            registry=self.registry,
        )
        self.prompts = Counter(
            "snapstream_router_prompts",
            "Prompts by whether an instance had read their beginning: none (new), one that got the request (followed), "
            "or one that was too busy (left).",
            ("beginning",),
            registry=self.registry,
        )
        self.prefill_seconds = Histogram(
            "snapstream_router_prefill_seconds",
            "Seconds until a prefill instance had prefilled a prompt.",
            buckets=_SECONDS,
            registry=self.registry,
        )

    @override
    def collect(self) -> Iterator[Metric]:
        well = GaugeMetricFamily("snapstream_router_instance_well", "1 if healthy, else 0.", labels=["does", "url"])
        busy = GaugeMetricFamily("snapstream_router_instance_busy", "Requests in progress.", labels=["does", "url"])
        for does, pool in self.pools.items():
            for one in pool.instances:
                well.add_metric([does, one.url], float(one.is_well))
                busy.add_metric([does, one.url], float(one.busy))
        yield well
        yield busy

    def page(self) -> bytes:
        """All metrics, in Prometheus's text format."""
        return generate_latest(self.registry)

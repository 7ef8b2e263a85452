"""What Prometheus is told of a router."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from snapstream.routing.instances import Pool

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class RouterMetrics(Collector):
    """Counters of one router, and what its instances are doing.

    Args:
        pools: By what they do.
    """

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self.pools = pools
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.requests = Counter(
            "snapstream_router_requests",
            "Requests by how they were served (split, whole) and how that ended.",
            ("way", "outcome"),
            registry=self.registry,
        )
        self.whole = Counter(
            "snapstream_router_whole",
            "Requests that were not split, by why.",
            ("reason",),
            registry=self.registry,
        )
        self.retries = Counter(
            "snapstream_router_retries",
            "Attempts that failed before the first byte of an answer, by what the instance does.",
            ("does",),
            registry=self.registry,
        )
        self.prefill_seconds = Histogram(
            "snapstream_router_prefill_seconds",
            "Seconds until a prefill instance had read a prompt.",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def collect(self) -> Iterator[Metric]:
        """Instances as they are now."""
        well = GaugeMetricFamily("snapstream_router_instance_well", "1 if it is.", labels=["does", "url"])
        busy = GaugeMetricFamily("snapstream_router_instance_busy", "Requests that it has.", labels=["does", "url"])
        for does, pool in self.pools.items():
            for one in pool.instances:
                well.add_metric([does, one.url], float(one.is_well))
                busy.add_metric([does, one.url], float(one.busy))
        yield well
        yield busy

    def page(self) -> bytes:
        """All of it, as text."""
        return generate_latest(self.registry)

"""Metrics for Prometheus. Metrics that the vLLM plugin also has mean the same there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from snapstream.serving.generation import Generation

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Gauge(NamedTuple):
    """A current value, or several values by label."""

    name: str
    text: str
    values: Mapping[tuple[str, ...], float]
    labels: tuple[str, ...] = ()


class _NowCollector(Collector):
    """Computes gauges whenever metrics are collected."""

    def __init__(self, gauges: Callable[[], Iterator[Gauge]]) -> None:
        self._gauges = gauges

    @override
    def collect(self) -> Iterator[Metric]:
        for gauge in self._gauges():
            family = GaugeMetricFamily(f"snapstream_{gauge.name}", gauge.text, labels=gauge.labels)
            for labels, value in gauge.values.items():
                family.add_metric(labels, value)
            yield family


class ServerMetrics:
    """Counters and histograms of one server, in their own registry; receives the driver's events."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"snapstream_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"snapstream_{name}", text, registry=self.registry, buckets=buckets)

        self._requests = counter("http_requests", "HTTP requests answered.", "method", "route", "status")
        self._sequences = counter("sequences", "Sequences that ended.", "reason")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of sequences, including those of earlier turns.")
        self._reused_tokens = counter("reused_tokens", "Prompt tokens not prefilled, from sessions and contexts.")
        self._prefixes = counter("prefix_prompts", "Whole prompts, by whether their prefix was cached.", "outcome")
        self._prefix_tokens = counter("prefix_tokens", "Prompt tokens not prefilled, from the prefix cache.")
        self._generation_tokens = counter("generation_tokens", "Tokens generated.")
        self._drafted = counter("drafted_tokens", "Draft tokens of speculative decoding that were verified.")
        self._accepted = counter("accepted_tokens", "Draft tokens that were accepted.")
        self._compressed = counter("prompts_compressed", "Prompts that were compressed.")
        self._kept = counter("tokens_kept", "Prompt tokens kept in caches.")
        self._dropped = counter("tokens_dropped", "Prompt tokens left out of compressed caches.")
        self._failures = counter("engine_failures", "Engine steps that failed.")
        self._first = histogram("time_to_first_token_seconds", "From the request to its first token.")
        self._queue = histogram("queue_seconds", "From the request to the start of its prefill.")
        self._prefill = histogram("prefill_seconds", "From the start of prefill to the first token.")
        self._per_token = histogram(
            "time_per_output_token_seconds", "Mean time between tokens of a sequence.", _TOKEN_SECONDS
        )
        self._whole = histogram("sequence_seconds", "From the request to the end of a sequence.")

    def watch(self, gauges: Callable[[], Iterator[Gauge]]) -> None:
        """Compute these gauges whenever the metrics are read."""
        self.registry.register(_NowCollector(gauges))

    def render(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return bytes(generate_latest(self.registry))

    def answered(self, method: str, route: str, status: int) -> None:
        """Count an answered HTTP request."""
        known = method if method in ("GET", "POST", "DELETE", "OPTIONS", "HEAD") else "other"
        self._requests.labels(known, route, str(status)).inc()

    def first_token(self, generation: Generation) -> None:
        """Record the end of a sequence's prefill: its times, and the tokens of its prompt."""
        assert generation.first_token is not None
        assert generation.started is not None
        if generation.output is not None and generation.output.token_count:
            self._first.observe(generation.first_token - generation.created)
        self._queue.observe(max(generation.started - generation.created, 0))
        self._prefill.observe(generation.first_token - generation.started)
        cache = generation.output.cache if generation.output is not None else None
        if cache is not None:
            self._prompt_tokens.inc(cache.prompt_tokens)
            past = generation.job.past
            self._reused_tokens.inc(0 if past is None else len(past.tokens))
            if past is None and generation.output is not None:
                self._prefixes.labels("known" if generation.output.reused else "new").inc()
                self._prefix_tokens.inc(generation.output.reused)
            self._kept.inc(cache.prompt_tokens - cache.dropped)
            self._dropped.inc(cache.dropped)
            self._compressed.inc(cache.dropped > 0)

    def finished(self, generation: Generation) -> None:
        """Record the end of a sequence: its times, and the tokens it generated."""
        output = generation.output
        self._sequences.labels((output and output.finish_reason) or "error").inc()
        assert generation.ended is not None
        self._whole.observe(generation.ended - generation.created)
        if output is None or generation.first_token is None:
            return
        made = output.token_count
        self._generation_tokens.inc(made)
        self._drafted.inc(output.drafted)
        self._accepted.inc(output.accepted)
        if made > 1:
            self._per_token.observe((generation.ended - generation.first_token) / (made - 1))

    def engine_failed(self) -> None:
        """Count a failed engine step."""
        self._failures.inc()

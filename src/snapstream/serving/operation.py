"""Routes for operators: caches, health, metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from snapstream.engine import LLM
from snapstream.serving.metrics import Gauge
from snapstream.serving.parts import Parts


class State(BaseModel):
    """Answer of ``/health`` and ``/ready``."""

    status: str


class SlotState(BaseModel):
    """State of a slot, now or after its last request; see :class:`snapstream.engine.SlotUse`."""

    slot: int
    busy: bool
    request_id: str | None = None
    seen: int = 0
    generated: int = 0
    held: int = 0
    sink: int = 0
    pinned: int = 0
    limit: int = 0
    next_entry: int = 0
    bytes_held: int = 0
    bytes_full: int = 0
    kept: list[float] = []
    pin: list[list[int]] = []


class Reading(BaseModel):
    """Progress of the prompt that is being prefilled, in tokens; if there are two, the longer one's."""

    read: int
    of: int


class CacheState(BaseModel):
    """Answer of ``/v1/cache``."""

    budget: dict[str, Any]
    capacity: int
    kv_dtype: str
    bytes_per_token: int
    max_model_len: int
    slots: list[SlotState]
    reading: Reading | None
    waiting: int
    sessions: int
    session_limit: int
    session_bytes: int
    contexts: int
    context_bytes: int
    context_limit: int
    prefix_bytes: int
    memory: dict[str, int]


def router(parts: Parts) -> APIRouter:
    """Create the routes of one server."""
    routes = APIRouter(tags=["Operation"])
    llm, driver, sessions, contexts = parts.llm, parts.driver, parts.sessions.store, parts.contexts.store

    @routes.get("/v1/cache")
    async def cache() -> CacheState:
        """The state of every slot after the engine's last step."""
        snapshot = driver.snapshot
        longest = max(snapshot.reading.values(), key=lambda progress: progress[1], default=None)
        return CacheState(
            budget=llm.engine.budget.as_dict(),
            capacity=llm.engine.plan.cache_entries,
            kv_dtype=llm.engine.plan.entry_type,
            bytes_per_token=llm.engine.plan.bytes_per_token,
            max_model_len=llm.engine.max_model_len,
            slots=[
                SlotState(slot=slot, busy=False) if use is None else SlotState.model_validate(asdict(use))
                for slot, use in enumerate(snapshot.slots)
            ],
            reading=None if longest is None else Reading(read=longest[0], of=longest[1]),
            waiting=driver.waiting,
            sessions=sessions.loaded,
            session_limit=sessions.max_bytes,
            session_bytes=sessions.nbytes,
            contexts=len(contexts),
            context_bytes=contexts.nbytes,
            context_limit=contexts.max_bytes,
            prefix_bytes=llm.engine.prefix_bytes,
            memory=_memory(llm),
        )

    @routes.get("/health", response_model=State)
    async def health() -> JSONResponse:
        """Whether the process works; restart it if it does not."""
        began, limit = driver.step_started, parts.settings.stall_timeout
        if not driver.healthy:
            return JSONResponse({"status": "the engine has failed"}, 503)
        if began is not None and time.monotonic() - began > limit:
            return JSONResponse({"status": f"an engine step has taken more than {limit:g} s"}, 503)
        return JSONResponse({"status": "ok"})

    @routes.get("/ready", response_model=State)
    async def ready() -> JSONResponse:
        """Whether the server accepts requests."""
        if driver.draining or not driver.healthy:
            return JSONResponse({"status": "stopping" if driver.draining else "the engine has failed"}, 503)
        return JSONResponse({"status": "ready"})

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Metrics for Prometheus."""
        return Response(parts.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return routes


def gauges(parts: Parts) -> Iterator[Gauge]:
    """Yield the current values of all gauges."""
    driver, sessions, contexts = parts.driver, parts.sessions.store, parts.contexts.store
    uses = [use for use in driver.snapshot.slots if use is not None and use.busy]
    for name, text, value in (
        ("slots", "Maximum number of sequences decoded concurrently.", parts.llm.engine.config.slots),
        ("slots_busy", "Sequences that are being decoded.", len(uses)),
        ("queue_length", "Sequences whose prefill has not started.", driver.waiting),
        ("sequences_unfinished", "Sequences that wait, are prefilled or are decoded.", driver.unfinished),
        ("cache_entries_held", "Entries in use in all slots.", sum(use.held for use in uses)),
        ("cache_bytes_held", "Caches of busy slots.", sum(use.bytes_held for use in uses)),
        ("cache_bytes_full", "What full caches of these sequences would take.", sum(use.bytes_full for use in uses)),
        ("sessions", "Sessions in memory.", sessions.loaded),
        ("session_bytes", "Memory of sessions.", sessions.nbytes),
        ("contexts", "Stored contexts.", len(contexts)),
        ("context_bytes", "Memory of the contexts in memory.", contexts.nbytes),
        ("prefix_bytes", "Memory of the prefix cache.", parts.llm.engine.prefix_bytes),
        ("healthy", "Whether the engine works.", driver.healthy),
    ):
        yield Gauge(name, text, {(): float(value)})
    sizes: dict[tuple[str, ...], float] = {(purpose,): float(size) for purpose, size in _memory(parts.llm).items()}
    yield Gauge("memory_planned_bytes", "Memory by purpose, as planned at the start.", sizes, ("purpose",))


def _memory(llm: LLM) -> dict[str, int]:
    """The engine's memory by purpose, in bytes."""
    parts = "weights slots staging sessions contexts prefixes drafter workspace tokenizing metadata"
    return {part: getattr(llm.engine.plan, part) for part in parts.split()}

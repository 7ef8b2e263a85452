"""The engine's thread, and its interface to the event loop.

The engine runs in one thread, and only this thread uses it. The event loop sends commands through a queue, which the
thread reads between two steps. The outputs of each step come back in one call. Output that a client has not fetched yet
is merged into one piece per sequence, so a slow reader costs no more memory than its own text.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from snapstream.config import SamplingParams
from snapstream.engine import LLM, RequestOutput, SlotUse
from snapstream.engine.core import INTERRUPTED
from snapstream.errors import RequestError
from snapstream.serving.generation import Generation, Job

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Number of failed engine steps, with no sequence finishing normally in between, after which the server gives up. After
as many requests that failed on their own, the engine is tested with a probe request."""

_PROBE = "probe"

T = TypeVar("T")


class QueueFullError(Exception):
    """The queue is full; ``seconds`` says when to retry."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"the queue is full; try again in {seconds} s")
        self.seconds = seconds


class UnavailableError(Exception):
    """The server is stopping, or its engine has failed."""


class EngineError(Exception):
    """The engine failed while it ran a request."""


class Listener(Protocol):
    """Receives events about sequences, on the event loop."""

    def first_token(self, generation: Generation) -> None:
        """Called when prefill has ended."""

    def finished(self, generation: Generation) -> None:
        """Called when a sequence has ended, for whatever reason."""

    def engine_failed(self) -> None:
        """Called when an engine step has raised an exception."""


class Snapshot(NamedTuple):
    """The engine after a step: its slots, and of sequences that are being prefilled, tokens done and tokens in all."""

    slots: Sequence[SlotUse | None]
    reading: Mapping[str, tuple[int, int]]


class _Command(NamedTuple):
    """A command for the engine's thread; ``refuse`` is called instead of ``run`` if the thread has ended."""

    run: Callable[[], None]
    refuse: Callable[[Exception], None]


class Batch:
    """The sequences of one request, submitted together."""

    def __init__(self, driver: EngineDriver, names: Sequence[str], jobs: Sequence[Job]) -> None:
        self._driver, self.wake = driver, asyncio.Event()
        self.generations = [Generation(name, job, self.wake) for name, job in zip(names, jobs, strict=True)]
        self.failure: Exception | None = None
        self.cancelled = False

    def fail(self, error: Exception) -> None:
        """Raise this error in :meth:`changes`."""
        self.failure = self.failure or error
        self.wake.set()

    async def changes(self) -> AsyncIterator[tuple[int, str, RequestOutput]]:
        """Yield the index, new text and newest output of sequences that have changed, until all have ended.

        Raises:
            EngineError: The engine failed.
            UnavailableError: The server is stopping.
        """
        running = set(range(len(self.generations)))
        while running:
            await self.wake.wait()
            self.wake.clear()
            if self.failure is not None:
                raise self.failure
            for index in sorted(running):
                news = self.generations[index].take()
                if news is None:
                    continue
                if news[1].finished:
                    running.discard(index)
                yield index, *news

    def cancel(self) -> None:
        """Abort all sequences that still run; their slots are free before the engine's next step."""
        self._driver.cancel(self)


class EngineDriver:
    """Runs an engine for an event loop."""

    def __init__(self, llm: LLM, *, max_queue: int, listener: Listener, on_death: Callable[[], None]) -> None:
        """Create the driver without starting its thread; see :meth:`start`.

        Args:
            llm: The engine; from now on only this object may use it.
            max_queue: Maximum number of sequences that wait for a slot.
            listener: Receives events, for metrics.
            on_death: Called on the event loop when the engine has failed permanently.
        """
        self.llm, self.engine, self.listener, self.on_death = llm, llm.engine, listener, on_death
        self.capacity = llm.engine.config.slots + max_queue
        self.draining = False
        self.dead = False
        self.step_started: float | None = None
        self.snapshot = Snapshot([None] * llm.engine.config.slots, {})
        self._names = (f"sequence-{number}" for number in itertools.count())
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._closed = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._live: dict[str, tuple[Batch, Generation]] = {}
        self._idle = asyncio.Event()
        # Times between the ends of sequences while there was work; their mean is the pace of the queue.
        self._between_ends: deque[float] = deque([1.0 / llm.engine.config.slots], maxlen=100)
        self._last_end = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- the event loop's side --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; must be called on the event loop that receives its events."""
        self._loop = asyncio.get_running_loop()
        self._idle.set()
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the thread runs and its engine works."""
        return self._thread.is_alive() and not self.dead

    @property
    def waiting(self) -> int:
        """Number of sequences whose prefill has not started."""
        return sum(generation.started is None for _, generation in self._live.values())

    @property
    def unfinished(self) -> int:
        """Number of sequences that wait or run."""
        return len(self._live)

    async def submit(self, jobs: Sequence[Job]) -> Batch:
        """Queue all of these sequences or none.

        Raises:
            QueueFullError: Slots and queue are full.
            UnavailableError: No new work is accepted.
            RequestError: The engine cannot serve one of them, or there are more than slots and queue can ever hold.
        """
        if len(jobs) > self.capacity:
            raise RequestError(f"{len(jobs)} answers in one request; slots and queue together hold {self.capacity}")
        self.check_room(len(jobs))
        names = [next(self._names) for _ in jobs]
        batch = Batch(self, names, jobs)
        for generation in batch.generations:
            self._live[generation.name] = batch, generation
        self._idle.clear()
        try:
            await self.call(lambda: self._add(batch))
        except asyncio.CancelledError:
            self.cancel(batch)  # reaches the engine after the command that adds it
            raise
        except Exception:
            self._drop(names)
            raise
        return batch

    def check_room(self, sequences: int) -> None:
        """Check that this many more sequences would be accepted now.

        Raises:
            QueueFullError: Slots and queue are full.
            UnavailableError: No new work is accepted.
        """
        if self.draining or not self.healthy:
            raise UnavailableError("the server is stopping" if self.draining else "the engine has failed")
        if len(self._live) + sequences > self.capacity:
            raise QueueFullError(self._retry_after())

    def cancel(self, batch: Batch) -> None:
        """Abort a batch. Its sequences count as running until the engine has dropped them."""
        names = [generation.name for generation in batch.generations if generation.name in self._live]
        if batch.cancelled:
            return
        batch.cancelled = True

        def abort() -> None:
            # The next step reports running sequences, but not those that were never added.
            self._tell(self._drop, [name for name in names if not self.engine.abort(name)])

        if names:
            self._put(_Command(abort, lambda error: None))

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread, between two steps.

        Raises:
            UnavailableError: The engine has failed.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def succeed(result: T) -> None:
            if not future.done():
                future.set_result(result)

        def fail(error: Exception) -> None:
            if not future.done():
                future.set_exception(error)

        def run() -> None:
            try:
                result = function()
            except Exception as error:
                self._tell(fail, error)
            else:
                self._tell(succeed, result)

        if not self._put(_Command(run, lambda error: self._tell(fail, error))):
            raise UnavailableError("the engine has failed")
        return await future

    async def drain(self, seconds: float) -> None:
        """Accept no new work, let running requests continue for ``seconds``, then fail the rest."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            self._fail_all(UnavailableError("the server is stopping, and the time for running requests is over"))

    async def stop(self) -> None:
        """End the thread. Nothing may be submitted afterwards."""
        self.draining = True
        self._fail_all(UnavailableError("the server is stopping"))
        if self._put(None):
            await asyncio.to_thread(self._thread.join, 30.0)

    def _deliver(self, outputs: Sequence[RequestOutput], snapshot: Snapshot, now: float) -> None:
        """Distribute the outputs of one step, which began at ``now``."""
        self.snapshot = snapshot
        for name in snapshot.reading:
            if name in self._live:
                generation = self._live[name][1]
                generation.started = generation.started or now
        for output in outputs:
            if output.request_id not in self._live:
                continue
            generation = self._live[output.request_id][1]
            first = output.cache is not None and generation.first_token is None  # prefill has ended
            if first:
                generation.started = generation.started or now
                generation.first_token = time.monotonic()
            if output.saved is not None and generation.job.keep is not None:
                generation.job.keep(output.saved)  # immediately, as clients may fetch outputs late
            generation.put(replace(output, saved=None))
            if first:
                self.listener.first_token(generation)
            if output.finished:
                self._forget(output.request_id)

    def _drop(self, names: Sequence[str]) -> None:
        """Remove sequences that were never added to the engine."""
        for name in names:
            self._live.pop(name, None)
        if not self._live:
            self._idle.set()

    def _forget(self, name: str) -> None:
        """Remove a sequence that has ended."""
        _, generation = self._live.pop(name)
        generation.ended = time.monotonic()
        if generation.started is not None:
            self._between_ends.append(generation.ended - max(generation.started, self._last_end))
            self._last_end = generation.ended
        self.listener.finished(generation)
        if not self._live:
            self._idle.set()

    def _fail_all(self, error: Exception) -> None:
        batches = {id(batch): batch for batch, _ in self._live.values()}
        for batch in batches.values():
            batch.fail(error)
            self.cancel(batch)

    def _retry_after(self) -> int:
        """Estimated seconds until half of the queue is processed, between 1 and 60."""
        return max(1, min(60, round(self.waiting / 2 * statistics.fmean(self._between_ends))))

    def _step_failed(self, error: Exception, outputs: Sequence[RequestOutput], snapshot: Snapshot, now: float) -> None:
        """Fail the sequences that were running in a failed step, which began at ``now``."""
        self.listener.engine_failed()
        for output in outputs:
            if output.error is not None and output.error.startswith(INTERRUPTED):  # others have their own errors
                self._fail(output.request_id, error)
        self._deliver(outputs, snapshot, now)

    def _engine_died(self, error: BaseException) -> None:
        """Fail all sequences after a permanent failure."""
        self.listener.engine_failed()
        for name in list(self._live):
            self._fail(name, error)
        self.snapshot = Snapshot([None] * self.engine.config.slots, {})
        self.dead = True
        self.on_death()

    def _fail(self, name: str, error: BaseException) -> None:
        if name in self._live:
            self._live[name][0].fail(EngineError(f"the engine failed: {type(error).__name__}"))
            self._forget(name)

    def _put(self, command: _Command | None) -> bool:
        """Send a command to the engine's thread; ``False`` if it has ended."""
        with self._closing:
            if not self._closed:
                self._commands.put(command)
            return not self._closed

    # -- the engine's side ------------------------------------------------------------------------------------------

    def _tell(self, function: Callable[..., None], *arguments: Any, **named: Any) -> None:
        """Call a function on the event loop."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(partial(function, *arguments, **named))

    def _add(self, batch: Batch) -> None:
        added: list[str] = []
        try:
            for generation in batch.generations:
                job = generation.job
                self.engine.add_request(
                    job.tokens,
                    job.params,
                    generation.name,
                    past=job.past,
                    keep=job.keep is not None,
                    salt=job.salt,
                )
                added.append(generation.name)
        except Exception:
            self.engine.discard(added)
            raise

    def _look(self) -> Snapshot:
        progress = {name: self.engine.prefill_progress(name) for name in self.engine.reading}
        return Snapshot(self.engine.slots(), progress)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # whatever the error, this thread ends
            logger.critical("the engine has failed permanently", exc_info=error)
            self._tell(self._engine_died, error)
        with self._closing:
            self._closed = True
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command.refuse(UnavailableError("the engine has stopped"))

    def _work(self) -> None:
        """Run the engine until it is told to stop; raises errors after which it cannot continue."""
        failures = own = 0
        probing = False
        while True:
            while not self._commands.empty() or not self.engine.busy:
                command = self._commands.get()
                if command is None:
                    return
                command.run()
            now = self.step_started = time.monotonic()
            try:
                outputs = self.engine.step()
            except Exception as error:
                failures += 1
                if failures == MAX_FAILURES:
                    raise
                logger.exception("the engine failed (%d of %d times)", failures, MAX_FAILURES)
                outputs = self.engine.take_outputs()  # what was running has ended; what waits goes on
                probing = probing and not any(output.request_id == _PROBE for output in outputs)
                self._tell(self._step_failed, error, outputs, self._look(), now)
                continue
            finally:
                self.step_started = None
            self._tell(self._deliver, outputs, self._look(), now)
            if any(output.finish_reason in ("stop", "length") for output in outputs):
                failures = own = 0
            own += sum(output.finish_reason == "error" for output in outputs)
            for output in outputs:
                if output.request_id == _PROBE and output.finished:
                    probing = False
                    if output.finish_reason == "error":
                        raise RuntimeError(f"a probe request failed: {output.error}")
            if own >= MAX_FAILURES and not probing:
                # Several requests have failed on their own: test whether the engine itself is the cause.
                self.engine.add_request([0], SamplingParams(max_tokens=2, ignore_eos=True), _PROBE, first=True)
                own, probing = 0, True

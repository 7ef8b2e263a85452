"""Prefill: layer by layer, in steps of one chunk.

All chunks of the prompt pass through one layer before the first chunk enters the next. After the last chunk, the
layer's cache is compressed directly into the slot where the request will decode, and the staging cache is free for the
next layer. While a prompt of ``L`` tokens is prefilled, memory holds ::

    weights | slots              | staging, one layer  | hidden states | queries      | workspace
            | [B, N, C, D] each  | [1, N, L, D]        | [L, hidden]   | [H, W, D]    | one chunk, or one layer's votes
            |                    |   ^ keys, values    |   ^ in place  |   ^ the last |
            | layers 0..l-1 of   |   | of layer l      |   | layer l-1 |   | of layer |
            | a slot are filled  | --+ gathers what    |   | becomes   |   | l vote   |
            |  <-----------------+     is kept         |   + layer l   |              |

Only one layer's cache and the hidden states of one layer grow with the prompt, whatever the model's depth; where layers
read caches of earlier ones, one of each group. Some attention backends keep a second copy of the layer's values, in the
order in which they multiply them (``packed``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from snapstream.attention import AttentionBackend
from snapstream.attention.operation import with_backend
from snapstream.cache import LayerCache, StateCache, dense_dtype, no_positions, reported_layers
from snapstream.cache.codes import FEWEST_KEYS
from snapstream.compression import choose_entries, kept_attention, layout_tensors
from snapstream.config import WINDOW, LayerPrompt
from snapstream.config.policy import rows_of_queries
from snapstream.engine.prefill.job import PrefillJob, Target
from snapstream.engine.prefill.prefix_cache import Keeping
from snapstream.engine.prefill.result import count_parts
from snapstream.engine.prefill.staging import Staging
from snapstream.engine.requests.output import TokenLogprobs
from snapstream.engine.settings import Setup, Types
from snapstream.inference import in_inference_mode
from snapstream.kernels import cpu
from snapstream.kernels.buffers import BufferView, PromptChunk, Slots, allocate_buffers
from snapstream.kernels.launches import has_loop, loop_operations, reserve
from snapstream.kernels.operations import Attend, Operation
from snapstream.kernels.recurrence import Recur
from snapstream.kernels.stock import StockProgram, program_for_rows
from snapstream.kernels.widened import WidenedLayer, least_tokens, widened_numbers
from snapstream.models import DecoderModel
from snapstream.transfers import to_device, to_host

logger = logging.getLogger(__name__)

ELSEWHERE = ("x", "logits")
"""Buffers that prefill does not keep per chunk: rows are a part of the hidden states, and few have logits."""
ONE_ROW = "last", "last logits"
"""Parts of a prefill that only the last token goes through."""
SCORED_ROWS = 32
"""Number of prompt tokens whose logits are computed together for ``prompt_logprobs``."""


class Layer:
    """The operations of one layer, split after what every token must go through even in the last layer.

    Attributes:
        before: Rotary angles, and all up to queries, and keys and values in the cache; or to the end of a recurrence.
        after: Attention, and what follows.
        others: After the last layer with a cache, layers that read its cache or an earlier one.
        query: Where ``before`` leaves the queries; ``None`` in a layer with a state.
        leaves_queries: Whether they are still there after ``after``.
    """

    def __init__(self, operations: Sequence[Operation], others: Sequence[Operation] = ()) -> None:
        self.others = others
        ((at, mixer),) = ((at, each) for at, each in enumerate(operations) if isinstance(each, Attend | Recur))
        self.query = mixer.query if isinstance(mixer, Attend) else None
        at += self.query is None
        self.before, self.after = operations[:at], operations[at:]
        targets = (getattr(each, "target", None) for each in self.after)
        written = [each.buffer for each in targets if isinstance(each, BufferView)]
        self.leaves_queries = self.query is None or self.query.buffer not in written


class Prefill:
    """Owns what prompts occupy while they are prefilled, and the buffers of a chunk.

    Attributes:
        lanes: Memory of the prompts that are being prefilled: of one of any length, then of a short one.
        layers: The operations of each layer.
        entering: Those before the first layer, and before a next-token module.
        leaving: Those after the last layer.
        widened_from: Tokens of a prompt from which on weights are widened; 0 if they never are.
        takes_rows_alone: Whether a token's entries are the same, to the bit, however its prompt is divided into chunks.
    """

    def __init__(
        self,
        model: DecoderModel,
        backend: AttentionBackend,
        *,
        types: Types,
        queries: int,
        lanes: Sequence[int],
        chunk: int,
        planned_for: torch.device | None = None,
    ) -> None:
        """Allocate the buffers.

        Args:
            model: The model.
            backend: The attention backend.
            types: The engine's dtypes.
            queries: Number of last queries of a prompt to keep, or ALL.
            lanes: Tokens that each lane has room for, the longest first; see :func:`~.staging.lanes`.
            chunk: Prompt tokens per launch.
            planned_for: The device to plan for, if the model is on the meta device.
        """
        spec, device, dtype = model.spec, model.device, types.activations
        self.model, self.backend, self.chunk = model, backend, chunk
        self.device = device
        attends = (
            each for n in range(spec.cached_layers) for each in model.operations_of(n) if isinstance(each, Attend)
        )
        self._softmaxes: dict[int, dict[str, Any]] = {
            each.layer: {"scale": each.scale, "cap": each.cap, "sinks": each.sinks} for each in attends
        }
        self.lanes = [
            Staging(spec, backend, types=types, queries=queries, entries=entries, device=device) for entries in lanes
        ]
        self._last_input = torch.zeros(1, spec.hidden_size, dtype=dtype, device=device)
        self.layers = [Layer(self._operations_of(layer)) for layer in range(spec.cached_layers)]
        self.layers[-1].others = [each for layer in sorted(spec.shared_from) for each in self._operations_of(layer)]
        self._widened: WidenedLayer | None = None
        numbers = max(widened_numbers([*layer.before, *layer.after]) for layer in self.layers)
        self.widened_from = 0
        long = least_tokens(planned_for or device) if numbers else None
        if long is not None and lanes[0] >= long:
            self.widened_from = long
            if device.type != "meta":
                logger.info("Prompts of %d tokens or more: weights are widened to %s, layer by layer.", long, dtype)
            self._widened = WidenedLayer(numbers, dtype, device)
        self._wide: tuple[int, Layer] | None = None  # the layer whose weights are widened now
        self._embed = [*model.embed()]
        self._enter = [] if model.mtp is None else [*model.enter_mtp()]
        self.entering, self.leaving = [*self._embed, *self._enter], [*model.output()]
        every = [*self.entering, *self.leaving]
        for layer in self.layers:
            every += [*layer.before, *layer.after, *layer.others]
        parts = [part for each in every for part in each.parts() if part.buffer not in ELSEWHERE]
        self._copies = {part.buffer: part.copies for part in parts}
        self._buffers = allocate_buffers(parts, chunk, dtype, device=device)
        self._reported = frozenset(reported_layers(spec.groups))
        tokens = torch.zeros(1, chunk, dtype=torch.int64, device=device)
        self._slots = Slots.of_prompt(tokens, max(lanes), len(spec.groups))
        self._scratch = cpu.Scratch()
        self._programs: dict[tuple[str, int, int], StockProgram] = {}
        # Weights that are widened are in memory that layers share.
        self._keeps_programs = has_loop(planned_for or device, dtype) and self._widened is None
        self.takes_rows_alone = False
        if self._keeps_programs:
            whole = self.chunk_at([0] * len(spec.groups), min(chunk, lanes[0]))
            whole.buffers["logits"] = torch.empty(1, spec.vocab_size, device=device).expand(len(whole.buffers["x"]), -1)
            reserve(every, replace(whole, slots=self._slots), self._scratch)
            # The native loop takes rows one by one. Products of libraries may not.
            self.takes_rows_alone = all(fits for fits, _ in loop_operations(every, whole))

    @classmethod
    def of(cls, setup: Setup, model: DecoderModel, lanes: Sequence[int]) -> Prefill:
        """Build the prefill of an engine; ``lanes`` as in the constructor."""
        return cls(
            model,
            setup.backend,
            types=setup.types,
            queries=setup.queries,
            lanes=lanes,
            chunk=setup.chunk,
            planned_for=setup.device,
        )

    @property
    def staging_bytes(self) -> int:
        """Bytes of what prompts occupy while they are prefilled."""
        widened = 0 if self._widened is None else self._widened.nbytes
        return sum(lane.nbytes for lane in self.lanes) + widened + self._last_input.nbytes

    def widens(self, tokens: int) -> bool:
        """Whether a prompt of so many tokens, cached ones included, is read with widened weights."""
        return 0 < self.widened_from <= tokens

    @in_inference_mode
    def advance(self, job: PrefillJob) -> None:
        """Take the next chunk through the current layer; after the last chunk, compress the layer.

        After an error, this prefill must not be continued.
        """
        spec, lane, start, group = self.model.spec, self.lanes[job.lane], job.done, job.group
        has_budget = spec.groups[group].has_budget
        last_layer = job.layer == spec.own_caches - 1
        is_mtp = job.layer == spec.layers
        # Where it matters to the bit, chunks end where they would without a cached prefix.
        end = start + self.chunk if self.takes_rows_alone else (start // self.chunk + 1) * self.chunk
        tokens = job.tokens[start:end]
        used, begins = len(tokens), start == job.skipped
        if begins:
            self._begin_layer(job, lane.caches[group])
        x, layer = lane.hidden[start : start + used], self._layer_of(job)
        first = job.before + start
        chunk = self._chunk_of(job, start, x)
        lane.packed_until.fill_(0 if begins else first)
        operations = layer.before
        if job.layer == 0 or spec.layer_inputs is not None:
            self._slots.token[0, :used] = to_device(tokens, self.device)
        if job.layer == 0:
            operations = [*self._embed, *operations]
        if is_mtp:
            self._slots.token[0, :used] = self._following(job, start, used)
            operations = [*self._enter, *operations]
        at_once = layer.leaves_queries and not (last_layer or is_mtp)
        if at_once:
            self._run("layer", [*operations, *layer.after], chunk, job)
        else:
            self._run("before", operations, chunk, job)
        if has_budget and layer.query is not None and job.has_voters:
            lane.keep_queries(layer.query.of(chunk.buffers), first, job.length)
        if last_layer or is_mtp:
            self._last_input.copy_(x[used - 1 :])
        elif not at_once:
            self._run("after", layer.after, chunk, job)
        if last_layer:
            self._finish_chunk(job, start, x, layer)
        job.done += used
        if job.keeps is not None:
            self._capture(job, job.keeps)
        if job.done == len(job.tokens):
            self._compress(job)
            job.layer += 1
            job.done = job.skipped

    def _run(self, part: str, operations: Sequence[Operation], chunk: PromptChunk, job: PrefillJob) -> None:
        """Run a part of the current layer, or what follows the last one, on a chunk."""
        if not self._keeps_programs:
            program_for_rows(operations, chunk).run()
            return
        key = part, job.layer, job.lane
        if key not in self._programs:
            # Other chunks may have more tokens.
            most = chunk if part in ONE_ROW else replace(chunk, slots=self._slots)
            self._programs[key] = StockProgram(operations, most, self._scratch)
        self._programs[key].rebind(chunk)
        self._programs[key].run()

    def _finish_chunk(self, job: PrefillJob, start: int, x: Tensor, layer: Layer) -> None:
        """What comes after :attr:`Layer.before` in the last layer: often, only the last token's result is needed."""
        if start + len(x) == len(job.tokens):
            job.logits = self._last_logits(job, self.layers[job.layer], len(x) - 1)
        if job.scored is None and self.model.mtp is None:
            return
        chunk = self._chunk_of(job, start, x)
        # Layers of several groups read what is packed.
        first = min(job.entries_at(start)) if layer.others else job.before + start
        self.lanes[job.lane].packed_until.fill_(0 if start == job.skipped else first)
        self._run("after", [*layer.after, *layer.others], chunk, job)
        if job.scored is not None:
            self._score(job, x, start)

    def _begin_layer(self, job: PrefillJob, staging: LayerCache) -> None:
        """Put the entries that exist into the staging cache."""
        if isinstance(staging, StateCache):
            staging.matrices.zero_()
        if job.past is not None:
            staging.put(job.past.layers[job.layer].converted(staging.entry_type), len(job.past.tokens))
        if job.skipped:
            job.prefix.put_into(staging, job.layer, has_state=isinstance(staging, StateCache))

    def _layer_of(self, job: PrefillJob) -> Layer:
        """The current layer; for a long prompt with widened weights, if that pays."""
        layer = self.layers[job.layer]
        if self._widened is None or not self.widens(len(job.tokens)):
            return layer
        if self._wide is None or self._wide[0] != job.layer:  # prompts in both lanes take turns
            self._wide = None
            self._wide = job.layer, Layer(self._widened.widen([*layer.before, *layer.after]), layer.others)
        return self._wide[1]

    def _following(self, job: PrefillJob, start: int, used: int) -> Tensor:
        """The token after each token of a chunk; for the last one, the most likely token stands in."""
        assert job.logits is not None
        following = to_device(job.tokens[start + 1 : start + 1 + used], self.device)
        return following if len(following) == used else torch.cat((following, job.logits.argmax(-1)))

    def _operations_of(self, layer: int) -> list[Operation]:
        """A layer, with its rotary angles; the staging caches of groups stand for those of layers."""
        operations = self.model.operations_of(layer, cache=self.model.spec.group_of(layer))
        return [self.model.rotation_of(layer).operation(), *with_backend([*operations], self.backend)]

    def _chunk_of(self, job: PrefillJob, start: int, x: Tensor, row: int = 0) -> PromptChunk:
        """The chunk of a prompt that begins with its token ``start``; for the rest, see :meth:`chunk_at`."""
        position = job.before + job.dropped_before + start
        return self.chunk_at(job.entries_at(start), len(x), x, position=position, row=row, lane=job.lane)

    def chunk_at(
        self,
        first: Sequence[int],
        rows: int,
        x: Tensor | None = None,
        *,
        position: int | None = None,
        row: int = 0,
        lane: int = 0,
    ) -> PromptChunk:
        """What operations work on for a chunk; it is the current one until the next call.

        Args:
            first: Entry of its first token in each group of layers.
            rows: Its tokens (``T``).
            x: Its hidden states, ``[T, hidden]``; by default those of the tokens at the entries of the first group.
            position: True position of the first token; by default its entry in the first group.
            row: Which rows of the buffers it has: so many after the first.
            lane: Index of the prompt's lane.
        """
        memory = self.lanes[lane]
        for count, entry in zip(self._slots.count, first, strict=True):
            count.fill_(entry)
        self._slots.position.fill_(first[0] if position is None else position)
        x = memory.hidden[first[0] : first[0] + rows] if x is None else x
        buffers = {
            name: buffer[row * self._copies[name] : (row + rows) * self._copies[name]]
            for name, buffer in self._buffers.items()
        }
        slots = replace(self._slots, token=self._slots.token[:, row : row + rows])
        caches = [cache.row(0) for cache in memory.caches]
        return PromptChunk(
            buffers | {"x": x},
            slots,
            caches,
            [],
            dense_dtype(memory.caches[0].entry_type),
            range(len(caches)),
            packed=memory.packed,
            packed_until=memory.packed_until,
            ends=[entry + rows for entry in first],
        )

    def _last_logits(self, job: PrefillJob, layer: Layer, row: int) -> Tensor:
        """Logits of the prompt's last token, the only one that goes through the rest of the last layer.

        Args:
            job: The prompt, whose last chunk has been through :attr:`Layer.before`.
            layer: The last layer.
            row: Row of the last token in that chunk: buffers still hold what the rest of the layer reads. Rows of other
                tokens stay as they are. This row does not if other layers follow, but nothing reads it any more: no
                token of the prompt comes after it, which could be scored.
        """
        # Computed the same way whether or not the prompt is scored.
        x = self._last_input
        self.lanes[job.lane].packed_until.zero_()  # the last layer's values have not been packed yet
        chunk = self._chunk_of(job, len(job.tokens) - 1, x, row)
        self._run("last", [*layer.after, *layer.others], chunk, job)
        return self._logits(x, job, "last logits")

    def _logits(self, x: Tensor, job: PrefillJob, part: str) -> Tensor:
        """Logits, float32 ``[T, vocab]``, of hidden states of the last layer ``[T, hidden]``; a few rows."""
        chunk = self.chunk_at([0] * len(self.model.spec.groups), len(x), x)
        logits = torch.empty(len(x), self.model.spec.vocab_size, dtype=torch.float32, device=self.device)
        chunk.buffers["logits"] = logits
        self._run(part, self.leaving, chunk, job)
        del chunk.buffers["logits"]  # a program that is kept refers to the chunk
        return logits

    def _score(self, job: PrefillJob, x: Tensor, start: int) -> None:
        """Compute log-probabilities of the tokens after each token of a chunk, from its last hidden states."""
        following = list(job.tokens[start + 1 : start + 1 + len(x)])
        # The logits of a whole chunk would take more memory than everything else.
        for at in range(0, len(following), SCORED_ROWS):
            some = following[at : at + SCORED_ROWS]
            logprobs = self._logits(x[at : at + len(some)], job, "logits").log_softmax(-1)
            taken = logprobs.gather(1, to_device(some, self.device)[:, None])[:, 0]
            best = logprobs.topk(job.scored or 0, -1)
            chosen, top, ids = (part.tolist() for part in to_host([taken, *best]))
            job.logprobs += [
                TokenLogprobs(token, value, dict(zip(ids[row], top[row], strict=True)))
                for row, (token, value) in enumerate(zip(some, chosen, strict=True))
            ]
            del logprobs  # before the next ones are made

    def _capture(self, job: PrefillJob, keeps: Keeping) -> None:
        """Copy what is complete of the layer, for the prefix cache; a failure does not affect the request."""
        try:
            keeps.capture(self.lanes[job.lane].caches[job.group], job.layer, job.done)
        except Exception:  # for example, out of memory
            logger.exception("the prefix of a prompt could not be cached")
            job.keeps = None

    def _compress(self, job: PrefillJob) -> None:
        """Compress the finished layer for every target; plain tensor code, once per layer."""
        for target in job.targets:
            if target.error is not None:
                continue
            try:
                self.compress_into(target, job)
            except Exception as error:  # for example, in a third-party policy; the other targets continue
                target.error = error

    def compress_into(self, target: Target, job: PrefillJob) -> None:
        """Compress the finished layer for one target."""
        layout, budget, into = target.layouts[job.group], target.budget, target.layers[job.layer]
        has_budget = self.model.spec.groups[job.group].has_budget
        staging = self.lanes[job.lane].caches[job.group]
        # With the frame that they have, entries that are kept again keep their codes.
        like = None if job.past is None or job.past.entries < FEWEST_KEYS else job.past.layers[job.layer]
        if isinstance(staging, StateCache):
            into.put(staging.converted(into.entry_type), job.total)
            if target.wants_positions:
                target.positions.append(no_positions(self.device))
            return
        if not layout.selects or not has_budget:  # the last tokens, in order
            heads = staging.heads
            positions = torch.arange(layout.dropped, layout.length, device=self.device).expand(heads, -1)
            kept = staging.span(layout.dropped, layout.length)
            into.put(kept.converted(into.entry_type, like))
        else:
            positions = choose_entries(self._shown(job, target), budget)[0, :, : layout.count]
            if into.entry_type == staging.entry_type:
                staging.gather(positions, into)
            else:
                into.put(staging.gathered(positions).converted(into.entry_type, like))
        true = positions if job.past is None else job.past.true_positions(positions, job.layer)
        if layout.count < job.total and job.layer in self._reported:
            counts = count_parts(true, job.total)
            target.parts = counts if target.parts is None else target.parts + counts
            target.counted += len(true)
        if target.wants_positions:
            target.positions.append(true.to(torch.int32))
        is_reported = job.layer in self._reported and job.layer < self.model.spec.layers
        if target.return_kept_tokens and is_reported:
            if not has_budget:  # nothing that these layers attend to is dropped
                target.mass.append(torch.ones((), device=self.device))
                return
            prompt = self._shown(job, target, WINDOW)
            shares = kept_attention(prompt.queries, prompt.keys, positions[None], prompt.layout, **prompt.attention)
            target.mass.append(shares.mean())

    def _pinned(self, job: PrefillJob, target: Target) -> Tensor | None:
        """Levels of the entries of the finished layer, int8 ``[1, N or 1, L]``, if some are pinned."""
        if target.pinned is None:
            return None
        if target.pinned.device.type != self.device.type:  # in the first layer
            target.pinned = to_device(target.pinned, self.device, torch.int8)
        if job.past is None:
            return target.pinned[None, None]
        heads = len(job.past.positions[job.layer])
        entries = torch.arange(job.length, device=self.device).expand(heads, -1)
        return target.pinned[job.past.true_positions(entries, job.layer)][None]

    def _shown(self, job: PrefillJob, target: Target, queries: int | None = None) -> LayerPrompt:
        """The finished layer in the form policies take it, with at most ``queries`` of the last queries."""
        wanted = target.budget.policy.queries if queries is None else queries
        lane = self.lanes[job.lane]
        kept = lane.queries.shape[1]
        rows = min(rows_of_queries(wanted, job.length), kept)
        staged = lane.caches[job.group].row(0, job.length)
        return LayerPrompt(
            queries=lane.queries[None, :, kept - rows :],
            keys=staged.keys,
            values=staged.values if target.budget.policy.needs_values else None,
            layout=layout_tensors([target.layouts[job.group]], self.device),
            sink=target.budget.sink,
            layer=job.layer,
            pinned=self._pinned(job, target) if queries is None else None,
            pins_compete=target.pins_compete,
            **self._softmaxes[job.layer],
        )

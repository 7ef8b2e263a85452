"""Prefill: one prompt at a time, layer by layer.

All chunks of the prompt pass through one layer before the first chunk enters the next. After the last chunk, the
layer's cache is compressed directly into the slot where the request will decode, and the staging cache is free for the
next layer. While a prompt of ``L`` tokens is prefilled, memory holds ::

    weights | slots              | staging, one layer  | hidden states | queries      | workspace
            | [B, N, C, D] each  | [1, N, L, D]        | [L, hidden]   | [H, W, D]    | one chunk, or one layer's votes
            |                    |   ^ keys, values    |   ^ in place  |   ^ the last |
            | layers 0..l-1 of   |   | of layer l      |   | layer l-1 |   | of layer |
            | a slot are filled  | --+ gathers what    |   | becomes   |   | l vote   |
            |  <-----------------+     is kept         |   + layer l   |              |

Only one layer's cache and the hidden states of one layer grow with the prompt, whatever the model's depth. Some
attention backends keep a second copy of the layer's values, in the order in which they multiply them (``packed``).
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from snapstream.attention import AttentionBackend
from snapstream.cache import LayerCache
from snapstream.compression import choose_entries, kept_attention, layout_tensors
from snapstream.config import WINDOW, LayerPrompt
from snapstream.config.policy import rows_of_queries
from snapstream.engine.output import TokenLogprobs
from snapstream.engine.prefixes import Prefix
from snapstream.engine.reading import Reading, Target, count_parts
from snapstream.engine.settings import Setup
from snapstream.models import DecoderModel
from snapstream.models.block import Block
from snapstream.transfers import to_device, to_host

logger = logging.getLogger(__name__)

SCORED_ROWS = 32
"""Number of prompt tokens whose logits are computed together for ``prompt_logprobs``."""


class Prefill:
    """Owns the staging cache of one layer and the hidden states of the one prompt that is being prefilled."""

    def __init__(
        self,
        model: DecoderModel,
        backend: AttentionBackend,
        *,
        queries: int,
        padded: int,
        chunk: int,
    ) -> None:
        """Allocate the buffers for the longest prompt.

        Args:
            model: The model.
            backend: The attention backend.
            queries: Number of last queries of a prompt to keep, or ALL.
            padded: Tokens in the staging cache, see :func:`staging_length`.
            chunk: Prompt tokens per launch.
        """
        spec, weight = model.spec, model.embedding.weight
        device, dtype = weight.device, weight.dtype
        self.model, self.backend, self.chunk = model, backend, chunk
        self._blocks = [*model.layers] if model.ahead is None else [*model.layers, model.ahead.block]
        self.scale, self.device = spec.scale, device
        self.staging = spec.entry.empty(1, padded, dtype=dtype, device=device)
        self._columns = spec.value_size if backend.narrow_values else spec.head_dim
        values = self._values(self.staging.row(0))
        self._packed = torch.zeros(backend.packed_shape(values.shape, dtype), dtype=dtype, device=device)
        self._packed_until = torch.zeros((), dtype=torch.int64, device=device)
        self.hidden = torch.zeros(padded, spec.hidden_size, dtype=dtype, device=device)
        self.queries = torch.zeros(
            spec.heads, rows_of_queries(queries, padded), spec.head_dim, dtype=dtype, device=device
        )
        self._last_input = torch.zeros(1, spec.hidden_size, dtype=dtype, device=device)
        self.start = torch.zeros((), dtype=torch.int64, device=device)
        # Offset of true positions from staging entries: the number of tokens dropped in earlier turns.
        self.ahead = torch.zeros((), dtype=torch.int64, device=device)

    @classmethod
    def of(cls, setup: Setup, model: DecoderModel, *, padded: int) -> Prefill:
        """Build the prefill of an engine; ``padded`` is the number of tokens in the staging cache."""
        return cls(model, setup.backend, queries=setup.queries, padded=padded, chunk=setup.chunk)

    @torch.inference_mode()
    def advance(self, reading: Reading) -> None:
        """Take the next chunk through the current layer; after the last chunk, compress the layer.

        After an error, this prefill must not be continued.
        """
        start, last_layer = reading.done, reading.layer == len(self.model.layers) - 1
        is_ahead = reading.layer == len(self.model.layers)
        tokens = reading.tokens[start : start + self.chunk]
        used, block = len(tokens), self._blocks[reading.layer]
        x = self.hidden[start : start + used]
        begins = start == reading.skipped
        if begins and reading.past is not None:
            self.staging.put(reading.past.layers[reading.layer])
        if begins and reading.prefix is not None:
            self.staging.put_from_host(reading.prefix.layers[reading.layer], start)
        if reading.layer == 0:
            x.copy_(self.model.embedding(to_device(tokens, self.device)))
        if is_ahead:
            self._enter_ahead(reading, x, start)
        self.start.fill_(reading.before + start)
        self._packed_until.fill_(0 if begins else reading.before + start)
        self.ahead.fill_(reading.dropped_before)
        if is_ahead or (last_layer and not self._completes(reading)):
            query = self._store(block, x)  # of the last layer's output, only the last token's is needed
        else:
            if last_layer:  # keep the last token's input to the layer, before it is overwritten in place
                self._last_input.copy_(x[used - 1 : used])
            query = self._read(block, x, reading.before + start + used)
        self._keep_queries(query, reading.before + start, reading.length)
        reading.done += used
        if last_layer and reading.scored is not None:
            self._score(reading, x, start)
        if reading.done == len(reading.tokens):
            if last_layer:
                reading.logits = self._last_logits(reading, block)
            if reading.keeps is not None:
                self._keep_beginning(reading, reading.keeps)
            self._compress(reading)
            reading.layer += 1
            reading.done = reading.skipped

    def _completes(self, reading: Reading) -> bool:
        """Whether all tokens go through the whole last layer."""
        return reading.scored is not None or self.model.ahead is not None

    def _enter_ahead(self, reading: Reading, x: Tensor, start: int) -> None:
        """Replace each token's hidden state in ``x`` by the next-token module's input: the state and the next token.

        The most likely token stands in for the token after the last one.
        """
        assert self.model.ahead is not None
        assert reading.logits is not None
        following = to_device(reading.tokens[start + 1 : start + 1 + len(x)], self.device)
        if len(following) < len(x):
            following = torch.cat((following, reading.logits.argmax(-1)))
        x.copy_(self.model.ahead.enter(self.model.embedding(following), self.model.norm(x)))

    def _store(self, block: Block, x: Tensor) -> Tensor:
        """Store keys and values of a chunk ``[T, hidden]``; returns its queries ``[T, H, D]``."""
        rows = self.start + torch.arange(x.shape[0], device=self.device)
        return block.store(x, *self.model.rope(rows + self.ahead), self.staging, self.start)

    def _read(self, block: Block, x: Tensor, entries: int) -> Tensor:
        """Take a chunk through a layer in place; with it, the staging cache has ``entries`` entries."""
        query = self._store(block, x)
        read = entries if self.backend.reads_all_keys_in_prefill else None
        attended = self._attend(query, self.staging.row(0, read), self.start)
        x.copy_(block.complete(x, attended))
        return query

    def _attend(self, query: Tensor, seen: LayerCache, start: Tensor) -> Tensor:
        return self.backend.prefill(
            query,
            seen.keys[0],
            self._values(seen),
            start,
            self.scale,
            packed=self._packed,
            packed_until=self._packed_until,
        )

    def _values(self, cache: LayerCache) -> Tensor:
        """Values of the staging cache, ``[N, L, V]``; for latents, the columns that serve as values."""
        return cache.values[0][..., : self._columns]

    def _keep_queries(self, query: Tensor, start: int, length: int) -> None:
        """Keep the rows of ``query`` ``[T, H, D]``, the first of entry ``start``, that are among the prompt's last."""
        first = length - self.queries.shape[1]  # the entry of row 0; negative for a short prompt
        skipped = max(0, first - start)
        if skipped < len(query):
            rows = query[skipped:].transpose(0, 1)
            at = start + skipped - first
            self.queries[:, at : at + rows.shape[1]] = rows

    def _last_logits(self, reading: Reading, block: Block) -> Tensor:
        """Logits of the prompt's last token, the only one that goes through the rest of the last layer."""
        # Computed the same way whether or not the prompt is scored.
        last = len(reading.tokens) - 1
        x = self._last_input if self._completes(reading) else self.hidden[last : last + 1]
        query = self.queries[:, -1:].transpose(0, 1)
        start = torch.full((), reading.length - 1, dtype=torch.int64, device=self.device)
        seen = self.staging.row(0, reading.length)
        self._packed_until.zero_()  # the last layer's values have not been packed yet
        attended = self._attend(query, seen, start)
        return self.model.logits(block.complete(x, attended))

    def _score(self, reading: Reading, x: Tensor, start: int) -> None:
        """Compute log-probabilities of the tokens after each token of a chunk, from its last hidden states."""
        following = list(reading.tokens[start + 1 : start + 1 + len(x)])
        # The logits of a whole chunk would take more memory than everything else.
        for at in range(0, len(following), SCORED_ROWS):
            some = following[at : at + SCORED_ROWS]
            logprobs = self.model.logits(x[at : at + len(some)]).log_softmax(-1)
            taken = logprobs.gather(1, to_device(some, self.device)[:, None])[:, 0]
            best = logprobs.topk(reading.scored or 0, -1)
            chosen, top, ids = (part.tolist() for part in to_host([taken, *best]))
            reading.logprobs += [
                TokenLogprobs(token, value, dict(zip(ids[row], top[row], strict=True)))
                for row, (token, value) in enumerate(zip(some, chosen, strict=True))
            ]

    def _keep_beginning(self, reading: Reading, keeps: Prefix) -> None:
        """Copy the layer's first entries to the host, for the prefix cache; a failure does not affect the request."""
        try:
            keeps.layers.append(self.staging.to_host(len(keeps.tokens)))
        except Exception:  # for example, out of memory
            logger.exception("the prefix of a prompt could not be cached")
            reading.keeps = None

    def _compress(self, reading: Reading) -> None:
        """Compress the finished layer for every target; plain tensor code, once per layer."""
        for target in reading.targets:
            if target.error is not None:
                continue
            try:
                self._compress_into(target, reading)
            except Exception as error:  # for example, in a third-party policy; the other targets continue
                target.error = error

    def _compress_into(self, target: Target, reading: Reading) -> None:
        layout, budget = target.layout, target.budget
        if layout.dropped == 0:  # nothing to select: entry i is token i
            heads = self.staging.keys.shape[1]
            positions = torch.arange(layout.count, device=self.device).expand(heads, -1)
            target.layers[reading.layer].put(self.staging.row(0, layout.count))
        else:
            positions = choose_entries(self._shown(reading, target), budget)[0, :, : layout.count]
            self.staging.gather(positions, target.layers[reading.layer])
        true = positions if reading.past is None else reading.past.true_positions(positions, reading.layer)
        total = reading.length + reading.dropped_before
        if layout.count < total:
            counts = count_parts(true, total)
            target.parts = counts if target.parts is None else target.parts + counts
        if target.wants_positions:
            target.positions.append(true.to(torch.int32))
        if target.telemetry and reading.layer < len(self.model.layers):
            prompt = self._shown(reading, target, WINDOW)
            shares = kept_attention(prompt.queries, prompt.keys, positions[None], prompt.layout, scale=self.scale)
            target.mass.append(shares.mean())

    def _shown(self, reading: Reading, target: Target, queries: int | None = None) -> LayerPrompt:
        """The finished layer in the form policies take it, with at most ``queries`` of the last queries."""
        wanted = target.budget.policy.queries if queries is None else queries
        rows = min(rows_of_queries(wanted, reading.length), self.queries.shape[1])
        staged = self.staging.row(0, reading.length)
        return LayerPrompt(
            queries=self.queries[None, :, self.queries.shape[1] - rows :],
            keys=staged.keys,
            values=staged.values if target.budget.policy.needs_values else None,
            layout=layout_tensors([target.layout], self.device),
            sink=target.budget.sink,
            scale=self.scale,
            layer=reading.layer,
        )


def staging_length(max_model_len: int, chunk: int, *, continued: bool) -> int:
    """Tokens in the staging cache, a whole number of chunks.

    Args:
        max_model_len: Maximum sequence length.
        chunk: Prompt tokens per launch.
        continued: Whether a prompt may begin after the entries of a saved cache. Its chunks are then not aligned to
            multiples of ``chunk``, so one more chunk is needed.
    """
    return (-(-max_model_len // chunk) + continued) * chunk

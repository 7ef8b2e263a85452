"""What prefill allocates for a while: counted without contents, on the meta device."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from snapstream.cache import EntryType
from snapstream.compression.keys import plain_differences_of_keys
from snapstream.compression.scoring import KEY_CHUNK, plain_window_attention
from snapstream.config import CacheBudget
from snapstream.engine.prefill.job import PrefillJob
from snapstream.engine.prefill.prefill import SCORED_ROWS, Prefill
from snapstream.kernels.counting import peak_of
from snapstream.kernels.operations import Operation
from snapstream.kernels.products import keeps_blocks
from snapstream.kernels.widened import with_numbers
from snapstream.kernels.workspace import most_workspace

logger = logging.getLogger(__name__)


def prefill_workspace(prefill: Prefill, budgets: Iterable[CacheBudget], cache: EntryType, device: torch.device) -> int:
    """The most bytes of temporaries that a prompt needs: of a chunk, of one layer's choice, or of log-probabilities.

    Args:
        prefill: On the meta device.
        budgets: Budgets that a prompt may be compressed to.
        cache: Dtype of the slots' caches.
        device: Where it will run.
    """
    compressing = max((_choice(prefill, each, cache, device) for each in budgets), default=0)
    return max(_chunk(prefill, device), _scores(prefill, device), compressing)


def _operations(prefill: Prefill) -> list[Operation]:
    """All operations of a chunk."""
    every = [each for layer in prefill.layers for each in (*layer.before, *layer.after, *layer.others)]
    return [*every, *prefill.entering]


def _chunk(prefill: Prefill, device: torch.device) -> int:
    """Of the operations of a chunk, in the longest prompt."""
    lane = prefill.lanes[0]
    every = _operations(prefill)

    def most(operations: Sequence[Operation], rows: int) -> int:
        chunk = prefill.chunk_at([lane.entries - rows] * len(lane.caches), rows)
        return most_workspace(operations, chunk, device)

    if not prefill.widened_from:
        return most(every, prefill.chunk)
    # Weights of longer prompts are widened.
    few = most(every, min(prefill.chunk, prefill.widened_from - 1))
    return max(few, most(with_numbers(every, lane.hidden.dtype), prefill.chunk))


def _scores(prefill: Prefill, device: torch.device) -> int:
    """Of ``prompt_logprobs``: logits, and their logarithms."""
    rows = min(SCORED_ROWS, prefill.chunk)
    chunk = prefill.chunk_at([0] * len(prefill.lanes[0].caches), rows)
    logits = torch.empty(rows, prefill.model.spec.vocab_size, dtype=torch.float32, device="meta")
    chunk.buffers["logits"] = logits
    return 2 * logits.nbytes + most_workspace(prefill.leaving, chunk, device)


def _choice(prefill: Prefill, budget: CacheBudget, cache: EntryType, device: torch.device) -> int:
    """Of the compression of one layer of the longest prompt."""
    spec, lane = prefill.model.spec, prefill.lanes[0]
    job = PrefillJob(spec, [0] * lane.entries)
    layouts = job.layouts(budget)
    groups = [spec.group_of(layer) for layer in range(spec.cached_layers)]
    into = [spec.groups[each].entry.empty(1, layouts[each].count, entry_type=cache, device="meta") for each in groups]
    target = job.add(budget, into)
    most = 0
    for group in spec.groups:
        job.layer = group.layers[0]
        try:
            bytes_needed = peak_of(functools.partial(prefill.compress_into, target, job))
        except Exception as error:  # a policy of another package may not work without contents
            logger.warning("What the policy %s needs for a while is not planned: %s", budget.policy.name, error)
            bytes_needed = into[job.layer].nbytes  # the kept entries, which are gathered before they are copied
        if group.has_budget and not keeps_blocks(device, lane.hidden.dtype):
            bytes_needed += _plain_votes(lane.caches[job.group].keys, lane.queries[None])
        most = max(most, bytes_needed)
    return most


def _plain_votes(keys: Tensor, queries: Tensor) -> int:
    """Of votes without kernels, besides the votes themselves."""
    ends = torch.zeros(1, dtype=torch.int64, device="meta")
    voters = queries.shape[2]
    given = (ends, ends, ends, 1.0, 0, True, voters, voters, KEY_CHUNK)
    of_votes = peak_of(lambda: plain_window_attention(queries, keys, *given))
    return max(of_votes, peak_of(lambda: plain_differences_of_keys(keys, ends, 0, 0, KEY_CHUNK)))

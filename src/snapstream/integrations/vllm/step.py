"""The worker's record of the requests in one step, and the batch metadata that follows from it.

vLLM counts every token that a sequence has seen. A compressed cache has fewer entries, in blocks further along the
sequence's row, and its next token goes into a slot of the ring. So three columns of vLLM's metadata are rewritten: the
length of each sequence, its block table, and the slot of each new token. Stock kernels do the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from snapstream.compression.layout import LayoutTensors, layout_tensors
from snapstream.compression.pins import pinned_levels, pins_compete
from snapstream.config import CacheBudget
from snapstream.integrations.vllm.drafts import Drafts, Moves, Placed, place_tokens
from snapstream.integrations.vllm.pages import PageLayout, blocks_for, lay_out_pages
from snapstream.integrations.vllm.settings import TRANSFER_KEY, arriving_tokens, granted_budget
from snapstream.transfers import to_device

_NEVER = 2**62
_NO_MOVES = Moves(*np.zeros((3, 0), np.int64))
_LENGTHS_ON_HOST = ("seq_lens_cpu_upper_bound", "_seq_lens_cpu")
_REWRITTEN = frozenset(
    {
        *("seq_lens", "max_seq_len", "block_table_tensor", "slot_mapping"),
        *("_num_computed_tokens_cpu", "_num_computed_tokens_cache", "mm_req_doc_ranges"),
        *_LENGTHS_ON_HOST,
    }
)
# Fields about a batch's queries, which compression does not change, or about features that are rejected at startup.
_LEFT_ALONE = frozenset(
    {
        *("query_start_loc", "query_start_loc_cpu", "num_reqs", "num_actual_tokens", "max_query_len", "causal"),
        *("logits_indices_padded", "num_logits_indices", "max_logits_per_req", "positions", "is_prefilling"),
        *("encoder_seq_lens", "encoder_seq_lens_cpu", "req_idx", "rswa_prefix_lens"),
        *("dcp_local_seq_lens", "dcp_local_seq_lens_cpu", "dcp_local_seq_lens_cpu_upper_bound"),
        *("replayssm_decode_base_cpu", "_token_to_req_indices_cache"),
    }
)
METADATA_FIELDS = _REWRITTEN | _LEFT_ALONE
"""Known fields of vLLM's ``CommonAttentionMetadata``; an unknown field could carry lengths that are not rewritten."""


class Window(NamedTuple):
    """The part of one sequence's observation window that this step computes; empty if the cache is not compressed.

    Attributes:
        request_id: The request.
        layout: Its blocks.
        row: Its row in the batch.
        start: First query token of the part, an index into the batch's tokens.
        stop: One past the last query token.
        last: Whether the cache is copied out in this step, after the layer's attention.
    """

    request_id: str
    layout: PageLayout
    row: int
    start: int
    stop: int
    last: bool


class Outgoing(NamedTuple):
    """A prompt whose prefill ends in this step, and that another instance decodes.

    Attributes:
        request_id: The request.
        layout: Its blocks.
        row: Its row in the batch.
    """

    request_id: str
    layout: PageLayout
    row: int


class Target(NamedTuple):
    """Source and destination of one sequence's copy, in the kernel's blocks.

    Attributes:
        blocks: Block ids of the source, int64 ``[blocks]``.
        slots: Slot of every entry of the copy, int64 ``[copied_entries]`` of the layout.
        layout: The layout, as tensors of shape ``[1]``.
        pinned: Levels of the source's tokens, int8 ``[1, 1, L]``; ``None`` if none are pinned.
        pins_compete: Whether there are more of them than fit.
    """

    blocks: Tensor
    slots: Tensor
    layout: LayoutTensors
    pinned: Tensor | None = None
    pins_compete: bool = False


@dataclass
class Step:
    """One step of the batch.

    Attributes:
        rows: Rows of the batch that decode, int64 ``[B]``.
        placed: Where their new tokens go, and the entries in use, new tokens included.
        moves: Entries to move before the step.
        shift: Number of the manager's blocks in front of each row's cache, int64 ``[B]``; 0 until it is copied out.
        longest_other: Length of the longest sequence in rows that do not decode; 0 if there are none.
        windows: Observation windows that this step computes, and caches that it copies out.
        targets: Where those caches are copied to, by request; filled by :meth:`rewrite`.
        outgoing: Caches to be handed out after the layer's attention.
        outgoing_blocks: Block ids of those caches, int64, by request; filled by :meth:`rewrite`.
        tables: Memory for rewritten block tables, by block size; shared by all steps.
        move: Moves entries between slots in all layers with a given block size.
        slot_mapping: The slot mapping that was rewritten in this step; ``None`` if no row decodes.
    """

    rows: Tensor
    placed: Placed
    moves: Moves
    shift: Tensor
    longest_other: int
    windows: list[Window]
    targets: dict[str, Target]
    tables: dict[int, Tensor]
    move: Callable[[int, Tensor, Tensor], None]
    outgoing: list[Outgoing] = field(default_factory=list)
    outgoing_blocks: dict[str, Tensor] = field(default_factory=dict)
    slot_mapping: Tensor | None = None
    _rewritten: dict[tuple[int, ...], dict[str, Any]] = field(default_factory=dict)
    _moved: set[int] = field(default_factory=set)

    def rewrite(self, metadata: Any, block_size: int, manager_block_size: int) -> Any:
        """Rewrite vLLM's ``CommonAttentionMetadata`` for the kernels.

        This never synchronizes with the device: all inputs come from the host, and no shape depends on device data.

        Args:
            metadata: The runner's metadata. Only its slot mapping is changed in place; vLLM recomputes it in every
                step, and the cache writes of all layers use it.
            block_size: Tokens per block of the block table (a kernel's block may be a part of a manager's block).
            manager_block_size: Tokens per block of the manager.

        Returns:
            The metadata for the kernels.
        """
        parts = manager_block_size // block_size
        table = metadata.block_table_tensor
        for window in self.windows:
            if window.last and window.request_id not in self.targets:
                self.targets[window.request_id] = _target(table[window.row], window.layout, block_size, parts)
        for one in self.outgoing:
            front = one.layout.front_blocks * parts if one.layout.compressed else 0
            blocks = table[one.row, front : front + blocks_for(one.layout.prompt.count, block_size)]
            self.outgoing_blocks.setdefault(one.request_id, blocks.to(torch.int64))
        if not len(self.rows):
            return metadata
        # Groups of layers with other kernels request the same rewrite again.
        same = table.data_ptr(), metadata.slot_mapping.data_ptr(), block_size
        if same not in self._rewritten:
            self._rewritten[same] = self._changes(metadata, block_size, parts)
        return replace(metadata, **self._rewritten[same])

    def _changes(self, metadata: Any, block_size: int, parts: int) -> dict[str, Any]:
        table = metadata.block_table_tensor
        device = table.device
        per_row = [self.rows, torch.from_numpy(self.placed.used), self.shift * parts]
        host = [*per_row, *(torch.from_numpy(array) for array in (*self.placed[:3], *self.moves))]
        sent = torch.split(to_device(torch.cat(host), device), [len(one) for one in host])
        rows, used, shift, owners, tokens, entries, movers, sources, targets = sent

        longest = int(self.placed.used.max())
        width = blocks_for(max(longest, int(self.moves.sources.max(initial=-1)) + 1), block_size)
        columns = (shift[:, None] + torch.arange(width, device=device)).clamp(max=table.shape[1] - 1)
        front = table[rows[:, None], columns]
        moved = self._table_like(table, block_size)
        if len(self.rows) < len(table):
            moved.copy_(table)  # otherwise columns past the caches, which are never read, may be from another step
        moved[rows, :width] = front

        def slots(owner: Tensor, entry: Tensor) -> Tensor:
            return front[owner, entry // block_size].to(torch.int64) * block_size + entry % block_size

        if len(movers) and block_size not in self._moved:  # repeating a swap would undo it
            self._moved.add(block_size)
            self.move(block_size, slots(movers, sources), slots(movers, targets))
        metadata.slot_mapping[tokens] = slots(owners, entries).to(metadata.slot_mapping.dtype)
        self.slot_mapping = metadata.slot_mapping

        lengths = metadata.seq_lens.clone()
        lengths[rows] = used.to(lengths.dtype)
        changes: dict[str, Any] = {
            "seq_lens": lengths,
            "block_table_tensor": moved,
            "max_seq_len": max(self.longest_other, longest),
        }
        return changes | self._host_copies(metadata)

    def _table_like(self, table: Tensor, block_size: int) -> Tensor:
        """Memory for a table of this shape; all its elements are valid block ids."""
        kept = self.tables.get(block_size)
        if kept is None or len(kept) < len(table) or kept.shape[1] != table.shape[1]:
            kept = self.tables[block_size] = table.clone()
        return kept[: len(table)]

    def _host_copies(self, metadata: Any) -> dict[str, Any]:
        """Rewrite lengths that some releases of vLLM also keep on the host, and cached values derived from them."""
        changes: dict[str, Any] = {}
        used = torch.from_numpy(self.placed.used)
        for one in fields(metadata):
            value = getattr(metadata, one.name)
            if one.name in _LENGTHS_ON_HOST and value is not None:
                value = value.clone()
                value[self.rows] = used.to(value.dtype)
                changes[one.name] = value
            elif one.name == "_num_computed_tokens_cpu" and value is not None:
                value = value.clone()
                value[self.rows] = (used - torch.from_numpy(self.placed.scheduled)).to(value.dtype)
                changes[one.name] = value
            elif one.name == "_num_computed_tokens_cache":
                changes[one.name] = None
            elif one.name == "mm_req_doc_ranges" and value:
                # Images of prompts, whose tokens see each other; tokens that are decoded do not belong to them.
                decoding = set(self.rows.tolist())
                changes[one.name] = {row: ranges for row, ranges in value.items() if row not in decoding} or None
        return changes


class Sequences:
    """The worker's record of every request, and of the current step.

    Args:
        budget: The server's budget.
        block_size: Tokens per block of the manager.
        shares: Whether prefix caching is enabled.
        drafts: Maximum number of draft tokens per sequence and step.
    """

    def __init__(self, budget: CacheBudget, block_size: int, *, shares: bool, drafts: int = 0) -> None:
        self.budget = budget
        self.block_size = block_size
        self.shares = shares
        self.drafts = drafts
        self.step: Step | None = None
        self.on_forget: list[Callable[[str], None]] = []
        self.on_move: list[Callable[[int, Tensor, Tensor], None]] = []
        self.placing = Drafts()
        self._tables: dict[int, Tensor] = {}
        self._prompts: dict[str, tuple[int, CacheBudget]] = {}
        self._layouts: dict[str, PageLayout] = {}
        self._outgoing: set[str] = set()

    def admit(self, request_id: str, prompt: int, known: int, extra_args: Mapping[str, Any] | None) -> None:
        """Record a request that starts its prefill.

        Args:
            request_id: The request.
            prompt: Number of prompt tokens.
            known: Number of prompt tokens and of tokens generated before a preemption.
            extra_args: ``extra_args`` of its sampling parameters.
        """
        self.pause([request_id])
        self._prompts[request_id] = (prompt, granted_budget(self.budget, extra_args))
        params = (extra_args or {}).get(TRANSFER_KEY)
        if params and params.get("do_remote_decode"):
            self._outgoing.add(request_id)
        arriving = arriving_tokens(params)
        self._lay_out(request_id, arriving or known, arrives=arriving is not None)

    def resume(self, request_id: str, generated: int) -> None:
        """Record a preempted request that starts its prefill again, over its prompt and ``generated`` tokens."""
        self.pause([request_id])
        self._lay_out(request_id, self._prompts[request_id][0] + generated)

    def pause(self, request_ids: Iterable[str]) -> None:
        """Record requests that lose their blocks: their layouts and collected windows are dropped."""
        for request_id in request_ids:
            self._layouts.pop(request_id, None)
            self.placing.forget(request_id)
            for forget in self.on_forget:
                forget(request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop finished requests."""
        for request_id in request_ids:
            self.pause([request_id])
            self._prompts.pop(request_id, None)
            self._outgoing.discard(request_id)

    def begin(self, request_ids: Sequence[str], computed: np.ndarray, scheduled: np.ndarray) -> None:
        """Start a step.

        Args:
            request_ids: Request id of each row of the batch.
            computed: Number of tokens of each row computed before this step.
            scheduled: Number of tokens of each row computed in this step.
        """
        layouts = [self._layouts[request_id] for request_id in request_ids]
        length, base, limit, front, moves_at, voters = np.array(
            [
                (p.prompt.length, p.prompt.base, p.prompt.limit, p.front_blocks, p.moves_at or _NEVER, p.voters)
                for p in layouts
            ],
            dtype=np.int64,
        ).T
        computed, scheduled = computed.astype(np.int64), scheduled.astype(np.int64)
        stops = np.cumsum(scheduled)
        starts = stops - scheduled
        # vLLM may pad the last token of a prompt with placeholder draft tokens; their queries must not vote.
        prompt_stops = starts + np.clip(length - computed, 0, scheduled)
        decoding = computed >= length
        rows = np.flatnonzero(decoding)
        stored = (np.minimum(length, limit) + computed - length)[rows]
        at_end, moves = self.placing.at_end, _NO_MOVES
        if self.drafts:
            decoders = [(request_ids[row], layouts[row].prompt) for row in rows.tolist()]
            moves = self.placing.moves(decoders, stored.tolist())
        self.step = Step(
            rows=torch.from_numpy(rows),
            placed=place_tokens(stored, base[rows], limit[rows], starts[rows], scheduled[rows], at_end=at_end),
            moves=moves,
            shift=torch.from_numpy(np.where(computed >= moves_at, front, 0))[rows],
            longest_other=int((computed + scheduled)[~decoding].max(initial=0)),
            windows=[
                _window(
                    request_ids[row], layouts[row], row, int(starts[row]), int(prompt_stops[row]), int(computed[row])
                )
                for row in np.flatnonzero((computed < moves_at) & (computed + scheduled > moves_at - voters)).tolist()
            ],
            targets={},
            tables=self._tables,
            move=self._move,
            outgoing=[
                Outgoing(request_ids[row], layouts[row], row)
                for row in np.flatnonzero((computed < length) & (computed + scheduled >= length)).tolist()
                if request_ids[row] in self._outgoing
            ],
        )

    def end(self) -> None:
        """End the step; dummy runs between steps see no step."""
        self.step = None

    def _move(self, block_size: int, sources: Tensor, targets: Tensor) -> None:
        for move in self.on_move:
            move(block_size, sources, targets)

    def _lay_out(self, request_id: str, length: int, *, arrives: bool = False) -> None:
        prompt, budget = self._prompts[request_id]
        self._layouts[request_id] = lay_out_pages(
            length,
            budget,
            self.block_size,
            shares=self.shares,
            arrives=arrives,
            drafts=self.drafts,
            generated=0 if arrives else length - prompt,
        )


def _window(request_id: str, layout: PageLayout, row: int, start: int, stop: int, computed: int) -> Window:
    """The window of one row in this step."""
    if not layout.compressed:
        return Window(request_id, layout, row, stop, stop, True)
    ahead = max(0, layout.prompt.length - layout.budget.window - computed)
    return Window(request_id, layout, row, start + ahead, stop, layout.has_moved(computed + stop - start))


def _target(row: Tensor, layout: PageLayout, block_size: int, parts: int) -> Target:
    """Locate a sequence, and the destination of its copy, in its row of the block table."""
    source = row[: blocks_for(layout.source_tokens, block_size)].to(torch.int64)
    entry = torch.arange(layout.copied_entries, device=row.device)
    block = row[layout.front_blocks * parts + entry // block_size].to(torch.int64)
    slots, tensors = block * block_size + entry % block_size, layout_tensors([layout.prompt], row.device)
    if not (layout.compressed and layout.prompt.pinned_end):
        return Target(source, slots, tensors)
    levels = pinned_levels(layout.budget, layout.prompt.length)
    pinned = to_device(levels, row.device, torch.int8)[None, None]
    return Target(source, slots, tensors, pinned, pins_compete(levels))

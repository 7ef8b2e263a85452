"""A baseline for eviction: a full cache in host memory, from which each step fetches the pages that may matter.

Nothing is dropped. A device would hold the minimum and the maximum of every key channel of each page, which bound the
dot product of any query with any of its keys (Quest, arXiv 2406.10774), and as many whole pages as fit into its memory.
Here everything is in one memory, and entries that would have been fetched are counted. It runs inside a model of
``transformers``, to measure what keeping everything is worth, not for serving.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.errors import ConfigurationError

PAGE = 16
"""Entries per page."""
NEWEST = 2
"""Pages at the end that are always read: the one that is being filled, and the one before it."""
ATTENTION = "snapstream_host_pages"
"""Value of ``attn_implementation`` for models of ``transformers``."""


@dataclass
class HostPages:
    """Chooses the pages that the layers of one sequence read, and counts the entries that the device would fetch.

    Attributes:
        entries: Entries per layer and KV head that fit on the device; the bounds of a page take as much as one entry.
        fetched: Entries that the previous step did not leave on the device, over all steps but the first, layers and KV
            heads.
        looked_at: Entries attended to, over all steps, layers and KV heads.
        steps: Layers times decoded tokens.
    """

    entries: int
    fetched: int = 0
    looked_at: int = 0
    steps: int = 0
    _bounds: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _held: dict[int, Tensor] = field(default_factory=dict)

    def choose(self, layer: int, query: Tensor, keys: Tensor) -> Tensor:
        """Choose the pages that a new token reads.

        Args:
            layer: Index of the layer.
            query: Rotated query, ``[H, D]``.
            keys: Rotated keys of all tokens up to the new one, ``[N, L, D]``.

        Returns:
            bool ``[N, pages]``.

        Raises:
            ConfigurationError: The device has no room for the pages that are always read.
        """
        least, greatest = self._updated(layer, keys)
        heads, pages = least.shape[:2]
        room = (self.entries - pages) // PAGE
        if room <= NEWEST:
            raise ConfigurationError(
                f"{self.entries} entries hold the bounds of {pages} pages and {max(room, 0)} whole pages; at least "
                f"{(NEWEST + 1) * PAGE + pages} entries are needed"
            )
        grouped = query.view(heads, -1, 1, query.shape[-1])
        bounds = torch.maximum(grouped * least[:, None], grouped * greatest[:, None]).sum(-1).amax(1)
        bounds[:, 0] = float("inf")  # sinks
        bounds[:, -NEWEST:] = float("inf")
        chosen = bounds.topk(min(room, pages), -1).indices
        return torch.zeros(heads, pages, dtype=torch.bool).scatter_(1, chosen, True)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attention of one new token over the chosen pages, ``[H, D]``; arguments as for :meth:`choose`."""
        pages = self.choose(layer, query, keys)
        length, heads = keys.shape[1], len(keys)
        self._count(layer, pages, length)
        seen = pages.repeat_interleave(PAGE, 1)[:, :length]
        mask = seen.repeat_interleave(len(query) // heads, 0)[:, None]
        mixed = F.scaled_dot_product_attention(
            query[None, :, None], keys[None], values[None], attn_mask=mask[None], scale=scale, enable_gqa=True
        )
        return mixed[0, :, 0]

    def _updated(self, layer: int, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Minimum and maximum of each page's keys, ``[N, pages, D]``; those of the last pages are computed again."""
        known = self._bounds.get(layer)
        begin = 0 if known is None else max(0, known[0].shape[1] - 1)
        new = keys[:, begin * PAGE :]
        missing = -new.shape[1] % PAGE
        blocks = [F.pad(new, (0, 0, 0, missing), value=fill) for fill in (float("inf"), float("-inf"))]
        least = blocks[0].view(len(new), -1, PAGE, new.shape[2]).amin(2)
        greatest = blocks[1].view(len(new), -1, PAGE, new.shape[2]).amax(2)
        if known is not None:
            least = torch.cat((known[0][:, :begin], least), 1)
            greatest = torch.cat((known[1][:, :begin], greatest), 1)
        self._bounds[layer] = least, greatest
        return least, greatest

    def _count(self, layer: int, pages: Tensor, length: int) -> None:
        sizes = torch.full((pages.shape[1],), PAGE)
        sizes[-1] = length - (pages.shape[1] - 1) * PAGE
        held = self._held.get(layer)
        new = torch.zeros_like(pages)  # pages of the first step are on the device since prefill
        if held is not None:  # so are pages created since
            new[:, : held.shape[1]] = pages[:, : held.shape[1]] & ~held
        self.fetched += int((new * sizes).sum())
        self.looked_at += int((pages * sizes).sum())
        self.steps += 1
        self._held[layer] = pages


def register() -> None:
    """Register :data:`ATTENTION` with ``transformers``; call such a model with ``host_pages=HostPages(...)``."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def forward(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        host_pages: HostPages | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        if query.shape[2] > 1 or host_pages is None:
            return sdpa_attention_forward(module, query, key, value, mask, **more)  # type: ignore[no-any-return]
        if len(query) != 1:
            raise ConfigurationError(f"host pages support one sequence at a time, not {len(query)}")
        scale = more.get("scaling") or query.shape[-1] ** -0.5
        return host_pages.attend(module.layer_idx, query[0, :, 0], key[0], value[0], scale)[None, None], None

    AttentionInterface.register(ATTENTION, forward)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)

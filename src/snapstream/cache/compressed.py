"""One sequence's compressed cache outside any slot: between two turns, on its way to a slot, or in a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snapstream.cache.codes import EntryType, dense_dtype, type_name
from snapstream.cache.groups import LayerGroup
from snapstream.cache.layer import LayerCache
from snapstream.cache.state import StateCache
from snapstream.compression import Layout
from snapstream.config import CacheBudget
from snapstream.errors import CacheFileError, ConfigurationError
from snapstream.outputs import replacing

_FORMAT = "snapstream-sequence-2"
_FORMAT_OF_ONE_GROUP = "snapstream-sequence-1"
"""What versions without groups wrote: ``layout`` instead of ``layouts``. It can still be read."""


@dataclass(frozen=True)
class CompressedSequence:
    """What prefill hands to decode, and what a next turn continues from.

    Keys are already rotated, so entries can be placed anywhere. Decoding continues with them unchanged. A next turn
    uses them as the beginning of its prompt, oldest first, and compresses the whole prompt when its prefill ends. ``E``
    is the number of entries.

    Attributes:
        groups: The model's groups of layers.
        layers: Per layer, a cache of one row, ``[1, N, E, D]``; entries beyond its layout's ``count`` are undefined. Or
            its state.
        positions: Per layer, the true position of each entry in the conversation, int32 ``[N, E]``, and nothing for one
            with a state; empty if positions were not requested.
        layouts: Per group, where the ring is, and how many entries are in use.
        tokens: All tokens of the conversation that the cache was built from, kept or dropped.
        logits: Logits of the last token, float32 ``[1, vocab]``, from which the next one is sampled. ``None`` after an
            answer, because its last token has not been processed.
        budget: The budget it was compressed with; ``None`` if unknown.
        answer: Text of the last turn's output, as far as ``tokens`` contains it.
        note: Any text that the caller stores along with the sequence.
    """

    groups: Sequence[LayerGroup]
    layers: Sequence[LayerCache]
    positions: Sequence[Tensor]
    layouts: tuple[Layout, ...]
    tokens: tuple[int, ...]
    logits: Tensor | None = None
    budget: CacheBudget | None = None
    answer: str = ""
    note: str = ""

    @property
    def entries(self) -> int:
        """Entries in use per KV head of the layers with a budget."""
        return self.layouts[0].count

    @property
    def limit(self) -> int:
        """Entries that a slot needs to decode it, in layers with a budget; 0 if there are none."""
        return self.layouts[0].limit if self.groups[0].has_budget else 0

    @property
    def entry_type(self) -> EntryType:
        """The type of its entries."""
        return next(
            (one.entry_type for one in self.layers if not isinstance(one, StateCache)), self.layers[0].entry_type
        )

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        logits = 0 if self.logits is None else self.logits.nbytes
        return sum(one.nbytes for one in self.layers) + sum(one.nbytes for one in self.positions) + logits

    def true_positions(self, positions: Tensor, layer: int) -> Tensor:
        """Convert positions in a prompt that begins with this cache to positions in the conversation.

        Args:
            positions: Positions in one layer, counted from the cache's first entry, int64 ``[N, C]``.
            layer: Index of the layer.

        Returns:
            int64 ``[N, C]``.
        """
        mine = self.positions[layer].to(torch.int64)
        known = mine.shape[1]
        looked_up = mine.gather(1, positions.clamp(0, known - 1))
        return torch.where(positions < known, looked_up, positions - known + len(self.tokens))

    def to(self, device: torch.device | str) -> CompressedSequence:
        """The same sequence on another device."""
        return replace(
            self,
            layers=[one.to(device) for one in self.layers],
            positions=[one.to(device) for one in self.positions],
            logits=None if self.logits is None else self.logits.to(device),
        )

    def check_integrity(self) -> None:
        """Check that the cache matches its layout.

        Raises:
            AssertionError: It does not.
        """
        _require(len(self.positions) in (0, len(self.layers)), "positions of some layers are missing")
        _require(len(self.layers) == sum(len(group.layers) for group in self.groups), "layers are missing")
        for group, layout in zip(self.groups, self.layouts, strict=True):
            _require(0 <= layout.base <= layout.limit and 1 <= layout.count <= layout.limit, "a layout is invalid")
            _require(layout.count <= len(self.tokens), "there are more entries than tokens")
            for layer in group.layers:
                self._check_layer(layer, layout.count, has_state=group.has_state)

    def _check_layer(self, layer: int, count: int, *, has_state: bool) -> None:
        cache = self.layers[layer]
        _require(cache.rows == 1 and cache.entries >= count, "entries are missing")
        numbers = cache.first(count).converted(torch.float32)
        _require(all(bool(torch.isfinite(tensor).all()) for tensor in numbers.tensors), "an entry is not finite")
        if self.positions:
            positions = self.positions[layer]
            if has_state:
                _require(positions.numel() == 0, "a state has positions")
                return
            _require(positions.shape == (cache.heads, count), "positions have another shape")
            in_order = positions.sort(dim=-1).values  # a pinned recent token precedes older ones in the ring
            _require(bool((in_order[:, 1:] > in_order[:, :-1]).all()), "an entry occurs twice")
            _require(int(in_order[:, 0].min()) >= 0, "a position is negative")
            _require(int(in_order[:, -1].max()) < len(self.tokens), "a position is past the end")

    def save(self, path: str | Path, *, model: str) -> None:
        """Write the sequence to a file; an existing file is replaced atomically.

        Args:
            path: The file, in safetensors format.
            model: Fingerprint of the model and tokenizer that created it, see
                :func:`~snapstream.models.fingerprint.fingerprint`.

        Raises:
            CacheFileError: The file could not be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensors = {name: tensor.contiguous().cpu() for name, tensor in self._named()}
        described = {
            "format": _FORMAT,
            "model": model,
            "layouts": [asdict(layout) for layout in self.layouts],
            "budget": None if self.budget is None else self.budget.as_dict(),
            "tokens": len(self.tokens),
            "latent": self.layers[0].stored == 1,
            "kv_dtype": type_name(self.entry_type),
            "answer": self.answer,
            "note": self.note,
        }
        described["digest"] = _digest(tensors, described)
        try:
            with replacing(path) as file:
                save_file(tensors, file, {"snapstream": json.dumps(described)})
        except (OSError, SafetensorError) as error:
            raise CacheFileError(f"{path} could not be written: {getattr(error, 'strerror', None) or error}") from error

    @staticmethod
    def describe(path: str | Path) -> dict[str, Any]:
        """The metadata of a file, without its tensors: ``tokens``, ``layouts``, ``budget``, ``note``, ...

        Unlike :meth:`load`, this does not check the metadata against the tensors.

        Raises:
            CacheFileError: The file is not a saved sequence.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                described = json.loads((file.metadata() or {}).get("snapstream", "{}"))
        except (SafetensorError, OSError, ValueError) as error:
            raise CacheFileError(f"{path} could not be read: {error}") from error
        if not isinstance(described, dict):
            raise CacheFileError(f"{path} is not a compressed sequence of this version of SnapStream")
        return _known_format(Path(path), described)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        model: str,
        groups: Sequence[LayerGroup],
        entry_type: EntryType,
        device: torch.device | str = "cpu",
    ) -> CompressedSequence:
        """Read a sequence that :meth:`save` wrote.

        Args:
            path: The file.
            model: Fingerprint of the model that will continue it.
            groups: Groups of this model's layers.
            entry_type: Type of the entries of this model's caches.
            device: Device to load it to.

        Raises:
            CacheFileError: The file is not a saved sequence, is damaged, or belongs to another model.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                described = json.loads((file.metadata() or {}).get("snapstream", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError, ValueError) as error:
            raise CacheFileError(f"{path} could not be read: {error}") from error
        try:
            sequence = cls._from(Path(path), described, tensors, model, groups, entry_type)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, AssertionError) as error:
            raise CacheFileError(
                f"{path} is damaged, or was written by another version of SnapStream: {error!r}"
            ) from error
        return sequence.to(device)

    @classmethod
    def _from(
        cls,
        path: Path,
        described: dict[str, Any],
        tensors: dict[str, Tensor],
        model: str,
        groups: Sequence[LayerGroup],
        entry_type: EntryType,
    ) -> CompressedSequence:
        # 1. Is it one, whole and of this model?
        known = _known_format(path, described)
        if described.pop("digest") != _digest(tensors, described):
            raise CacheFileError(f"{path} is damaged: its contents changed after it was written")
        described = known
        if described["model"] != model:
            raise CacheFileError(
                f"{path} was created by another model or tokenizer, or with other --weights; process its text with "
                "these instead"
            )
        if len(described["layouts"]) != len(groups):
            raise CacheFileError(
                f"{path} holds {len(described['layouts'])} groups of layers, but this model has {len(groups)} here"
            )
        held = sum(name.startswith("layer.") and name.endswith(".0") for name in tensors)
        layers = sum(len(group.layers) for group in groups)
        if held < layers:
            raise CacheFileError(
                f"{path} holds caches of {held} layers, but {layers} are needed here; a sequence created without "
                "speculative='mtp' can only be continued without it"
            )
        for group in groups:
            first, wanted = f"layer.{group.layers[0]}.", entry_type
            if group.has_state:
                wanted, own = dense_dtype(entry_type), type_name(tensors[first + "1"].dtype)
            else:  # earlier versions did not write their type
                own = described.get("kv_dtype") or type_name(tensors[first + "0"].dtype)
            if own != type_name(wanted):
                option = "dtype" if group.has_state else "kv_dtype"
                raise CacheFileError(
                    f"{path} holds {own}, but caches are {type_name(wanted)} here; run with {option}={own!r}, or "
                    "process its text again"
                )
        # 2. Its entries.
        caches = {}
        entries = {layer: group.entry for group in groups for layer in group.layers}
        for layer, entry in entries.items():
            parts = range(len(entry.tensors(1, 1, entry_type)))
            caches[layer] = entry.of([tensors[f"layer.{layer}.{part}"] for part in parts], entry_type)
        names = [f"positions.{layer}" for layer in range(layers)]
        positions = [tensors[name] for name in names if name in tensors]
        sequence = cls(
            groups,
            [caches[layer] for layer in range(layers)],
            positions,
            tuple(Layout(**layout) for layout in described["layouts"]),
            tuple(tensors["tokens"].tolist()),
            tensors.get("logits"),
            _budget(described["budget"]),
            str(described["answer"]),
            str(described["note"]),
        )
        if len(sequence.tokens) != described["tokens"]:
            raise CacheFileError(f"{path} has {len(sequence.tokens)} tokens, not {described['tokens']}; it is damaged")
        sequence.check_integrity()
        return sequence

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors with their names in a file; unused entries are left out."""
        for group, layout in zip(self.groups, self.layouts, strict=True):
            for layer in group.layers:
                for part, tensor in enumerate(self.layers[layer].first(layout.count).tensors):
                    yield f"layer.{layer}.{part}", tensor
        for layer, positions in enumerate(self.positions):
            yield f"positions.{layer}", positions
        yield "tokens", torch.tensor(self.tokens, dtype=torch.int64)
        if self.logits is not None:
            yield "logits", self.logits


def _known_format(path: Path, described: dict[str, Any]) -> dict[str, Any]:
    """The metadata as this version writes it.

    Raises:
        CacheFileError: It does not describe a saved sequence.
    """
    if described.get("format") == _FORMAT_OF_ONE_GROUP:
        return described | {"layouts": [described.get("layout")]}
    if described.get("format") != _FORMAT:
        raise CacheFileError(f"{path} is not a compressed sequence of this version of SnapStream")
    return described


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise AssertionError(otherwise)


def _budget(described: dict[str, Any] | None) -> CacheBudget | None:
    """The budget; ``None`` if its policy is unknown here, because decoding does not need it."""
    try:
        return None if described is None else CacheBudget.parse(described)
    except ConfigurationError:
        return None


def _digest(tensors: dict[str, Tensor], described: dict[str, Any]) -> str:
    """SHA-256 of everything in the file: safetensors itself would not notice a flipped bit."""
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

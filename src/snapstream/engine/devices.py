"""An analytical model of a decode step on several devices: the bytes that each one holds, reads and sends.

The paper (arXiv 2511.03092) decodes with *data-parallel* attention: a device holds the caches of its own sequences, and
its share of every projection and expert. With *tensor-parallel* attention, a device holds its share of the KV heads of
all sequences. Latents have a single head, so every device then holds every sequence's cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from snapstream.cache import StateShape
from snapstream.errors import ConfigurationError
from snapstream.models.experts import MixtureOfExperts, Router
from snapstream.models.spec import ModelSpec
from snapstream.models.storage import empty_model

SEQUENCES, HEADS = "data-parallel", "tensor-parallel"
"""The two ways of dividing attention among devices: by sequences, or by heads."""


@dataclass(frozen=True)
class DevicePlan:
    """Bytes of one device, assuming that the load is balanced.

    Attributes:
        sequences: Number of sequences that decode together, over all devices.
        weights: Bytes of weights that the device holds.
        caches: Bytes of caches that the device holds.
        read_weights: Bytes of weights that it reads per step; of the experts, only those that at least one token of the
            batch chooses.
        read_caches: Bytes of entries that it reads per step when caches are full.
        sent: Bytes that it sends to other devices per step.
    """

    sequences: int
    weights: int
    caches: int
    read_weights: int
    read_caches: int
    sent: int

    @property
    def read(self) -> int:
        """Bytes that it reads per step."""
        return self.read_weights + self.read_caches


@dataclass(frozen=True)
class Devices:
    """A model on several devices.

    Attributes:
        spec: The model.
        dtype: Type of weights, caches and messages. Matrices of a float8 checkpoint stay float8.
        count: Number of devices.
        attention: :data:`SEQUENCES` or :data:`HEADS`.
    """

    spec: ModelSpec
    dtype: torch.dtype
    count: int
    attention: str

    def __post_init__(self) -> None:
        """Check that the model can be divided.

        Raises:
            ConfigurationError: The heads are not divisible by the devices, or ``attention`` is unknown.
        """
        if self.attention not in (SEQUENCES, HEADS):
            raise ConfigurationError(f"attention is {self.attention!r}; allowed: {SEQUENCES}, {HEADS}")
        if self.count < 1 or self.spec.heads % self.count:
            raise ConfigurationError(
                f"{self.spec.heads} query heads cannot be divided among {self.count} devices; use a divisor of "
                f"{self.spec.heads}"
            )

    @property
    def types(self) -> str:
        """The types of weights and caches, for people."""
        name = f"{self.dtype}".removeprefix("torch.")
        return f"float8 and {name}" if self._is_float8 else name

    def cache_bytes(self, entries: int) -> int:
        """Bytes of one sequence's cache on a device that holds any of it."""
        total = 0
        for group in self.spec.groups:  # of a state, a device holds the matrices of its value heads
            heads = group.entry.heads
            here = heads if self.attention == SEQUENCES else -(-heads // self.count)
            total += group.nbytes(group.entries(entries), self.dtype) // heads * here
        return total

    def most_sequences(self, entries: int, room: int) -> int:
        """Maximum number of sequences whose caches fit into ``room`` bytes per device."""
        return room // self.cache_bytes(entries) * self._owners

    def plan(self, sequences: int, entries: int) -> DevicePlan:
        """Compute what a device holds, reads and sends in a step.

        Args:
            sequences: Number of sequences that decode together.
            entries: Entries of each sequence's cache.
        """
        spec, here = self.spec, -(-sequences // self._owners)
        replicated, split, experts = self._weights
        chosen = 1.0
        if spec.experts is not None:  # expected share of the experts that at least one token chooses
            chosen = 1 - (1 - spec.experts.chosen / spec.experts.count) ** sequences
        looked_up = 0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size
        if spec.layer_inputs is not None:
            looked_up += spec.layer_inputs.vocab_size * spec.layer_inputs.size * spec.layers
        caches = here * self.cache_bytes(entries)
        return DevicePlan(
            sequences=sequences,
            weights=replicated + (split + experts) // self.count,
            caches=caches,
            # Of embeddings, only the batch's rows are read, which are negligible. If one is also the output projection,
            # all of it is read.
            read_weights=replicated + (split - looked_up * self.dtype.itemsize + int(experts * chosen)) // self.count,
            read_caches=caches,
            sent=self._sent(sequences),
        )

    @property
    def _is_float8(self) -> bool:
        return getattr(self.spec.source, "quantization_config", None) is not None

    @property
    def _owners(self) -> int:
        """Number of device groups that hold different sequences."""
        return self.count if self.attention == SEQUENCES else 1

    def _sent(self, sequences: int) -> int:
        """Bytes that a device sends per step.

        Each layer needs two all-reduces of the hidden states, and a ring all-reduce sends twice the share of the other
        devices. Data-parallel attention also sends a token's queries and entry to the device that has its cache, and
        the attention output back, because every device projects its own heads of all tokens.
        """
        spec, others = self.spec, self.count - 1
        numbers = (spec.layers + spec.has_mtp) * 2 * 2 * sequences * spec.hidden_size
        if self.attention == SEQUENCES:
            here = -(-sequences // self.count)
            for group in spec.groups:
                if isinstance(group.entry, StateShape):
                    each = group.entry.size + group.entry.heads * group.entry.value
                else:
                    entry = group.entry.nbytes(self.dtype) // self.dtype.itemsize
                    each = spec.heads * (group.entry.size + spec.values_of(group.entry)) + entry
                numbers += len(group.layers) * here * each
            for layer in spec.shared_from:
                shared = spec.entry_of(layer)
                numbers += here * spec.heads * (shared.size + spec.values_of(shared))
        return numbers * others // self.count * self.dtype.itemsize

    @cached_property
    def _weights(self) -> tuple[int, int, int]:
        """Bytes of replicated weights, of divided weights, and of experts, which are divided as well."""
        model = empty_model(self.spec, self.dtype)
        tables = [model.embedding, model.head.weight]
        if model.layer_inputs is not None:
            tables.append(model.layer_inputs.table)
        wide = {id(part) for matrix in tables for part in matrix.parts}
        routed, routers = set(), set()
        for module in model.modules():
            if isinstance(module, MixtureOfExperts):
                routed |= {id(part) for matrix in (module.gate_up, module.down) for part in matrix.parts}
            if isinstance(module, Router):
                routers.add(id(module.weight))
        block = self.spec.weight_block
        per_scale = None if block is None else block[0] * block[1]  # numbers; None: a whole weight
        replicated = split = experts = 0
        for parameter in model.parameters():
            size = parameter.nbytes
            if parameter.dim() == 1 or id(parameter) in routers:
                replicated += size
                continue
            if self._is_float8 and id(parameter) not in wide:
                size = parameter.numel() + (0 if per_scale is None else parameter.numel() // per_scale * 4)
            if id(parameter) in routed:
                experts += size
            else:
                split += size
        return replicated, split, experts

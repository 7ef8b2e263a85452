"""A decode step of a model that is spread over several devices, by arithmetic: what each holds, reads and sends.

The paper decodes with attention *data-parallel*: a device holds the caches of its own sequences, and of every
projection and expert its share. With *tensor-parallel* attention a device holds its share of the KV heads of all
sequences; latents have one head for all, so every device holds every sequence's cache. (arXiv 2511.03092.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from snapstream.errors import ConfigurationError
from snapstream.models.deepseek import MixtureOfExperts, Router
from snapstream.models.spec import ModelSpec
from snapstream.models.weights import empty_model

SEQUENCES, HEADS = "data-parallel", "tensor-parallel"
"""What attention divides among devices."""


@dataclass(frozen=True)
class DevicePlan:
    """Bytes of one device, where all have the same to do.

    Attributes:
        sequences: That decode together, on all devices.
        weights: What it holds of the model.
        caches: What it holds of caches.
        read_weights: Weights that it reads in a step; of experts those that some token of the batch chooses.
        read_caches: Entries that it reads in a step, where caches are full.
        sent: What it sends to others in a step.
    """

    sequences: int
    weights: int
    caches: int
    read_weights: int
    read_caches: int
    sent: int

    @property
    def read(self) -> int:
        """What it reads in a step."""
        return self.read_weights + self.read_caches


@dataclass(frozen=True)
class Devices:
    """A model on several devices.

    Attributes:
        spec: The model.
        dtype: Of weights, caches and what is sent. Matrices of a float8 checkpoint stay float8.
        count: Devices.
        attention: :data:`SEQUENCES` or :data:`HEADS`.
    """

    spec: ModelSpec
    dtype: torch.dtype
    count: int
    attention: str

    def __post_init__(self) -> None:
        """Check that everything can be divided.

        Raises:
            ConfigurationError: It cannot, or an unknown way to do it.
        """
        if self.attention not in (SEQUENCES, HEADS):
            raise ConfigurationError(f"attention is {self.attention!r}; allowed: {SEQUENCES}, {HEADS}")
        if self.count < 1 or self.spec.heads % self.count:
            raise ConfigurationError(
                f"{self.spec.heads} query heads cannot be divided over {self.count} devices; give a divisor of them"
            )

    @property
    def types(self) -> str:
        """Types of what is held, in words."""
        name = f"{self.dtype}".removeprefix("torch.")
        return f"float8 and {name}" if self._is_float8 else name

    def cache_bytes(self, entries: int) -> int:
        """What one sequence's cache takes on a device that holds any of it."""
        spec = self.spec
        here = spec.kv_heads if self.attention == SEQUENCES else -(-spec.kv_heads // self.count)
        return entries * spec.kv_bytes_per_token(self.dtype) // spec.kv_heads * here

    def most_sequences(self, entries: int, room: int) -> int:
        """Most sequences whose caches fit into so many bytes of each device."""
        return room // self.cache_bytes(entries) * self._owners

    def plan(self, sequences: int, entries: int) -> DevicePlan:
        """What a device does in a step.

        Args:
            sequences: That decode together.
            entries: Of each one's cache.
        """
        spec, here = self.spec, -(-sequences // self._owners)
        replicated, split, experts = self._weights
        chosen = 1.0
        if spec.experts is not None:  # of all, how many at least one token chooses
            chosen = 1 - (1 - spec.experts.chosen / spec.experts.count) ** sequences
        embedding = spec.vocab_size * spec.hidden_size * self.dtype.itemsize
        caches = here * self.cache_bytes(entries)
        return DevicePlan(
            sequences=sequences,
            weights=replicated + (split + experts) // self.count,
            caches=caches,
            # Of the embedding only the rows of the batch; where it is the output projection, too, all of it.
            read_weights=replicated
            + (split - (0 if spec.tied_embeddings else embedding) + int(experts * chosen)) // self.count,
            read_caches=caches,
            sent=self._sent(sequences),
        )

    @property
    def _is_float8(self) -> bool:
        return getattr(self.spec.source, "quantization_config", None) is not None

    @property
    def _owners(self) -> int:
        """Groups of devices that hold different sequences."""
        return self.count if self.attention == SEQUENCES else 1

    def _sent(self, sequences: int) -> int:
        """Bytes that a device sends in a step.

        Two sums of hidden states per layer, each by a ring: twice the share of the other devices. With data-parallel
        attention also queries and entries of a token to the device that has its cache, and back what attention makes
        of them, since every device projects its own heads of all tokens.
        """
        spec, others = self.spec, self.count - 1
        numbers = 2 * 2 * sequences * spec.hidden_size
        if self.attention == SEQUENCES:
            entry = spec.entry.nbytes(self.dtype) // self.dtype.itemsize
            numbers += -(-sequences // self.count) * (spec.heads * (spec.head_dim + spec.value_size) + entry)
        return spec.cached_layers * numbers * others // self.count * self.dtype.itemsize

    @cached_property
    def _weights(self) -> tuple[int, int, int]:
        """Bytes of weights that all devices hold, that are divided, and of experts, which are divided, too."""
        model = empty_model(self.spec, self.dtype)
        wide = {id(model.embedding.weight), id(model.head.weight)}
        routed, routers = set(), set()
        for module in model.modules():
            if isinstance(module, MixtureOfExperts):
                routed |= {id(module.gate_up), id(module.down)}
            if isinstance(module, Router):
                routers.add(id(module.weight))
        rows, columns = self.spec.weight_block
        replicated = split = experts = 0
        for parameter in model.parameters():
            size = parameter.nbytes
            if parameter.dim() == 1 or id(parameter) in routers:
                replicated += size
                continue
            if self._is_float8 and id(parameter) not in wide:
                size = parameter.numel() + parameter.numel() // (rows * columns) * 4
            if id(parameter) in routed:
                experts += size
            else:
                split += size
        return replicated, split, experts

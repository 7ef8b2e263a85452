"""Made-up weights in blocks."""

import torch

from snapstream.kernels.weight import BlockWeight


def random_rows(kind, rows, columns, generator):
    """Rows of a format as GGUF stores them, uint8 ``[rows, row_bytes]``: any bits, and scales that are not huge."""
    raw = torch.randint(0, 256, (rows, columns // kind.columns, kind.nbytes), dtype=torch.uint8, generator=generator)
    size = 0.02 if kind.columns == 32 else 0.001
    return with_factors(kind, raw, lambda: torch.randn(raw.shape[:2], generator=generator) * size)


def equal_rows(kind, rows, columns, byte):
    """Rows that consist of one byte, except for the factors, which are 1/8."""
    raw = torch.full((rows, columns // kind.columns, kind.nbytes), byte, dtype=torch.uint8)
    return with_factors(kind, raw, lambda: torch.full(raw.shape[:2], 0.125))


def with_factors(kind, raw, make):
    """Rows of blocks whose factors, of numbers with a few bits and perhaps of scales with six, are made anew."""
    at = 0
    for count, width in kind.fields:
        if width == 2:
            raw[..., at : at + 2] = make().half()[..., None].view(torch.uint8)
        at += count * width
    return raw.flatten(1)


def random_weight(kind, rows, columns, generator):
    """A matrix in blocks."""
    return BlockWeight(kind.pack(random_rows(kind, rows, columns, generator)), kind, rows)


def rounding_bound(x, weight):
    """How far ``x @ weight.T`` may be off if ``x`` is rounded to 8 bits, in parts of 32 columns: float64 ``[T, out]``.

    A number is off by half a step at most, and a step is a 127th of the largest number of its part.
    """
    parts = x.double().unflatten(-1, (-1, 32)).abs().amax(-1) / 254  # [T, parts]
    return parts @ weight.double().unflatten(-1, (-1, 32)).abs().sum(-1).T

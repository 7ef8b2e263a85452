"""Where kernels are tested: on a GPU if there is one, else in Triton's interpreter (tests/__init__.py)."""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
"""Beside float64, of numbers that are about 1."""
SIZES = (64, 96, 128, 192, 256, 576)
"""Of heads; the last is a latent's, with values of 512."""


def random(*shape, seed, dtype, scale=1.0):
    """Normal numbers on the device; the same for every seed."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, dtype)


def column(values):
    return torch.tensor(list(values), device=DEVICE)

"""Tests; before any of them is imported, how Triton's kernels run here is settled."""

import os

import torch

if not torch.cuda.is_available():
    # Triton looks at it when it is imported, and other packages import it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

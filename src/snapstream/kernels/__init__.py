"""Kernels for what no library provides: :mod:`snapstream.kernels.cpu` and :mod:`snapstream.kernels.triton`."""

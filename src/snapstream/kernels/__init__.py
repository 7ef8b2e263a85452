"""Kernels of our own, for what no library has: :mod:`snapstream.kernels.cpu` and :mod:`snapstream.kernels.triton`."""

"""Kernels of our own, for what no library has: see :mod:`snapstream.kernels.cpu`."""

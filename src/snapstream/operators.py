"""Operators with kernels per device, called directly.

Compiled code sees an operator of torch (``torch.library.custom_op``). Eager code does not call it: the first call of
one imports torch's compiler, which takes longer than torch itself, and every call takes tens of microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class Operator(Generic[P, R]):
    """A function of tensors, without gradients, and the kernel that runs in its place.

    Args:
        name: Its name in compiled code.
        plain: The function in plain torch.
        shape: Its fake (meta) kernel: makes the results without their contents.
        changes: Names of arguments that it writes to (``mutates_args``).
    """

    def __init__(self, name: str, plain: Callable[P, R], shape: Callable[..., R], changes: Sequence[str] = ()) -> None:
        self._kernel: Callable[..., R] = plain
        self._shape = shape
        self._compiled = torch.library.custom_op(f"snapstream::{name}", plain, mutates_args=changes)
        self._compiled.register_fake(shape)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The result, from a kernel if there is one for these arguments."""
        first = args[0][0] if isinstance(args[0], list) else args[0]
        is_subclass = isinstance(first, Tensor) and type(first) not in (Tensor, torch.nn.Parameter)
        if is_subclass or torch.compiler.is_compiling():  # a fake tensor, for example
            result: R = self._compiled(*args, **kwargs)
            return result
        if isinstance(first, Tensor) and first.is_meta:
            return self._shape(*args, **kwargs)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._kernel(*args, **kwargs)
        return self._kernel(*args, **kwargs)

    def register(self, kernel: Callable[..., R]) -> Callable[..., R]:
        """Make a kernel run in place of the plain function, which it may call itself."""
        self._compiled.register_kernel(("cpu", "cuda"))(kernel)
        self._kernel = kernel
        return kernel

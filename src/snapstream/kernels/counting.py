"""Counts the memory of tensors on the meta device, which have shapes but no contents: what a plan is made of."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from snapstream.inference import in_inference_mode


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts the memory of all tensors that are made on the meta device within it.

    Attributes:
        held: Bytes of those that still exist; views of the same memory count once.
        peak: The most that existed at a time.
    """

    held: int
    peak: int

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.peak = 0
        self._known: dict[int, Any] = {}

    @override
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        before = {_address(each) for each in tree_leaves((args, kwargs)) if _counts(each)}
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if _counts(each) and _address(each) not in before:
                self._add(each)
        return made

    def _add(self, tensor: Tensor) -> None:
        memory = tensor.untyped_storage()
        key, size = memory._cdata, memory.nbytes()
        if key not in self._known:
            self.held += size
            self.peak = max(self.peak, self.held)
            self._known[key] = weakref.finalize(memory, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.held -= size
        del self._known[key]


def _counts(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def peak_of(function: Callable[[], object]) -> int:
    """The most bytes that a function makes at a time on the meta device."""
    counted = Counted()
    with counted:
        in_inference_mode(function)()
    return counted.peak

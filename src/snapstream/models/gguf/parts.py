"""Models that ``llama-gguf-split`` has split into several files: ``name-00001-of-00003.gguf``, ...

The first part has the metadata, and each part has some of the tensors. If any part is given, all of them are used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from snapstream.errors import CheckpointError, listing

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE | re.DOTALL)


def part_names(path: Path) -> Sequence[Path]:
    """All parts of a model in order, derived from the name of one; only the file itself if its name is not a part's."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count, suffix = match["stem"], match["count"], match["suffix"]
    return [path.with_name(f"{stem}-{number:05}-of-{count}{suffix}") for number in range(1, int(count) + 1)]


def part_paths(path: Path, count: int) -> Sequence[Path]:
    """All parts of a model, given one of them.

    Args:
        path: The given part.
        count: Number of parts according to its metadata.

    Raises:
        CheckpointError: The names of the other parts cannot be derived, or some are missing; the message names them.
    """
    names = part_names(path)
    if len(names) != count:
        raise CheckpointError(
            f"{path} is one of {count} parts of a model; keep the names they were split into, such as "
            f"model-00001-of-{count:05}.gguf, in one directory, so that the others can be found"
        )
    missing = [name.name for name in names if not name.is_file()]
    if missing:
        raise CheckpointError(
            f"{path} is one of {count} parts of a model; missing in {path.parent}: {listing(missing)}"
        )
    return names

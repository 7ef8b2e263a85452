"""Opens files of questions, in our form or in that of a published benchmark, from a path or the hub."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapstream.errors import ConfigurationError
from snapstream.evaluation.questions.form import parse_line
from snapstream.evaluation.questions.published import FORMS, form_of
from snapstream.evaluation.questions.question import Text

HUB = "hf://datasets/"
MAX_LINE = 2**28
"""Bytes of a line; a longer one is no question."""


@dataclass(frozen=True)
class QuestionFile:
    """Questions that were read from a file.

    Attributes:
        name: Name of the task in reports: the file's name without its endings.
        form: ``snapstream`` for the documented form, or the name of a benchmark.
        sha256: Hash of the file's (uncompressed) content.
        texts: Its texts; neighbours that are equal are one.
    """

    name: str
    form: str
    sha256: str
    texts: tuple[Text, ...]

    @property
    def questions(self) -> int:
        """Number of questions."""
        return sum(len(text.questions) for text in self.texts)


def read_questions(place: str) -> QuestionFile:
    """Read a file of questions.

    Args:
        place: A path (``.jsonl``, ``.json`` or either with ``.gz``), or ``hf://datasets/OWNER/NAME/PATH`` for a file
            of a dataset on the Hugging Face hub. ``FORM:`` before it names the form, if it is not recognized.

    Raises:
        ConfigurationError: There is no such file, it cannot be read, or a line is not a question.
    """
    given, _, rest = place.partition(":")
    form = given if given in (*FORMS, "snapstream") else None
    path = _fetch(rest) if form and rest.startswith(HUB) else _fetch(place) if place.startswith(HUB) else None
    if path is None:
        path = Path(rest if form else place)
    digest = hashlib.sha256()
    lines = list(_lines(path, digest))
    if not lines:
        raise ConfigurationError(f"{path} has no questions")
    name = _name(path)
    number, first = lines[0]
    form = form or form_of(first)
    if form is None:
        raise ConfigurationError(
            f"{path}, line {number}: the fields {', '.join(sorted(first))} are those of no form that is known; see "
            f"docs/evaluation.md for the form of this package. Published forms: {', '.join(FORMS)}"
        )
    texts: list[Text] = []
    for number, fields in lines:
        where = f"{path}, line {number}"
        if form == "snapstream":
            text = parse_line(fields, where, number)
        else:
            try:
                text = FORMS[form].read(fields, name, number)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                told = f"no field {error}" if isinstance(error, KeyError) else str(error)
                raise ConfigurationError(f"{where} is no question of {form}: {told}") from error
        if texts and text.text and texts[-1].text == text.text:
            texts[-1] = Text(text.text, texts[-1].questions + text.questions)
        else:
            texts.append(text)
    made = QuestionFile(name, form, digest.hexdigest(), tuple(texts))
    seen: set[str] = set()
    for question in (question for text in texts for question in text.questions):
        if question.name in seen:
            raise ConfigurationError(f"{path}: two questions are named {question.name!r}; give each an 'id' of its own")
        seen.add(question.name)
    return made


def _lines(path: Path, digest: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbers and objects of all lines; a file that is one JSON array counts as one object a line."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            start = file.peek(1)[:1]
            if start == b"[":
                content = file.read()
                digest.update(content)
                listed = json.loads(content)
            else:
                listed = None
                for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), 1):
                    digest.update(line)
                    if line.strip():
                        yield number, _object(json.loads(line), path, number)
        for number, one in enumerate(listed or [], 1):
            yield number, _object(one, path, number)
    except FileNotFoundError as error:
        raise ConfigurationError(f"questions: {path}: no such file") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigurationError(f"questions: {path} cannot be read: {error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"questions: {path} is not JSON, one object a line: {error}") from error


def _object(value: Any, path: Path, number: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path}, line {number}: {type(value).__name__} instead of a JSON object")
    return value


def _name(path: Path) -> str:
    name = path.name
    for ending in (".gz", ".jsonl", ".json"):
        name = name.removesuffix(ending)
    # RULER writes every task to a file of this name, in a directory of its own.
    return path.resolve().parent.name if name in ("validation", "test", "train") else name


def _fetch(place: str) -> Path:
    """Download a file of a dataset.

    Raises:
        ConfigurationError: The address is incomplete, or the hub does not have the file.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    owner, _, rest = place.removeprefix(HUB).partition("/")
    name, _, file = rest.partition("/")
    if not (owner and name and file):
        raise ConfigurationError(f"questions: {place} is incomplete; give {HUB}OWNER/NAME/FILE.jsonl")
    try:
        return Path(hf_hub_download(f"{owner}/{name}", file, repo_type="dataset"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigurationError(f"questions: {place} could not be downloaded: {error}".splitlines()[0]) from error

"""Opens files of questions, in our form or in that of a published benchmark, from a path or the hub."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from snapstream.errors import ConfigurationError
from snapstream.evaluation.questions.form import parse_line
from snapstream.evaluation.questions.published import FORMS, LeftOutError, form_of
from snapstream.evaluation.questions.question import Text

HUB = "hf://datasets/"
_MARK = b"\xef\xbb\xbf"
"""What some editors put at the beginning of a file in UTF-8."""
MAX_LINE = 2**28
"""Bytes of a line; a longer one is no question."""


@dataclass(frozen=True)
class QuestionFile:
    """Questions that were read from a file.

    Attributes:
        name: Name of the task in reports: the file's name without its endings.
        form: ``snapstream`` for the documented form, or the name of a benchmark.
        texts: Its texts; neighbors that are equal are one.
        left_out: Why lines are not asked, and how many.
    """

    name: str
    form: str
    texts: tuple[Text, ...]
    left_out: tuple[tuple[str, int], ...] = ()

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
    form, where = _split(place)
    path, name = (_fetch(where), where) if where.startswith(HUB) else (Path(where), str(Path(where).absolute()))
    lines = list(_lines(path))
    if not lines:
        raise ConfigurationError(f"{path} has no questions")
    name = _name(PurePosixPath(name.replace("\\", "/")))
    number, first = lines[0]
    form = form or form_of(first)
    if form is None:
        raise ConfigurationError(
            f"{path}, line {number}: the fields {', '.join(sorted(first))} match no known form; see docs/evaluation.md "
            f"for the form of this package. Published forms: {', '.join(FORMS)}"
        )
    texts: list[Text] = []
    left_out: Counter[str] = Counter()
    for number, fields in lines:
        where = f"{path}, line {number}"
        if form == "snapstream":
            text = parse_line(fields, where, number)
        else:
            try:
                text = FORMS[form].read(fields, name, number)
            except LeftOutError as reason:
                left_out[str(reason)] += 1
                continue
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                told = f"no field {error}" if isinstance(error, KeyError) else str(error)
                raise ConfigurationError(f"{where} is not a valid {form} question: {told}") from error
        if texts and text.text and texts[-1].text == text.text:
            texts[-1] = Text(text.text, texts[-1].questions + text.questions)
        else:
            texts.append(text)
    made = QuestionFile(name, form, tuple(texts), tuple(left_out.items()))
    seen: set[str] = set()
    for question in (question for text in texts for question in text.questions):
        if question.name in seen:
            raise ConfigurationError(f"{path}: two questions are named {question.name!r}; give each an 'id' of its own")
        seen.add(question.name)
    return made


def read_all_questions(places: Sequence[str]) -> list[QuestionFile]:
    """Read files of questions.

    Files of one name, such as RULER's of several lengths, are named after the directories in which they differ, too.

    Args:
        places: As in :func:`read_questions`.

    Raises:
        ConfigurationError: As there.
    """
    files = [read_questions(place) for place in places]
    parents = [PurePosixPath(_split(place)[1].replace("\\", "/")).parent.parts for place in places]
    named = []
    for file, own in zip(files, parents, strict=True):
        others = [set(parts) for other, parts in zip(files, parents, strict=True) if other.name == file.name]
        shared = set.intersection(*others)
        named.append(replace(file, name="-".join([file.name, *(part for part in own if part not in shared)])))
    return named


def _split(place: str) -> tuple[str | None, str]:
    """The form that is named before a path or an address, if any, and the path."""
    given, _, rest = place.partition(":")
    return (given, rest) if given in (*FORMS, "snapstream") and rest else (None, place)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbers and objects of all lines; a file that is one JSON array counts as one object a line."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            begin = file.read(64).removeprefix(_MARK).lstrip()[:1]
            file.seek(0)
            if begin == b"[":
                listed = _parsed(file.read(), path, 1)
                if isinstance(listed, list):
                    for number, one in enumerate(listed, 1):
                        yield number, _object(one, path, number)
                return
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), 1):
                if line.strip():
                    yield number, _object(_parsed(line, path, number), path, number)
    except FileNotFoundError as error:
        raise ConfigurationError(f"questions: {path}: no such file") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigurationError(f"questions: {path} cannot be read: {error}") from error


def _parsed(content: bytes, path: Path, number: int) -> Any:
    try:
        value = json.loads(content.removeprefix(_MARK))
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"questions: {path}, line {number}, is not valid JSON: {error}") from error
    return value


def _object(value: Any, path: Path, number: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path}, line {number}: {type(value).__name__} instead of a JSON object")
    return value


def _name(path: PurePosixPath) -> str:
    name = path.name
    for ending in (".gz", ".jsonl", ".json"):
        name = name.removesuffix(ending)
    # RULER writes every task to a file of this name, in a directory of its own.
    return path.parent.name if name in ("validation", "test", "train") else name


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

"""The documented form of a file of questions: what a line of it holds, checked field by field.

A line is a JSON object: a text, and one question about it or several. docs/evaluation.md has an example of every kind.
"""

from __future__ import annotations

from typing import Any

from snapstream.errors import ConfigurationError, missing_extra
from snapstream.evaluation.questions.question import LETTERS, Kind, Question, Scoring, Text, make_question, with_choices

try:
    from pydantic import BaseModel, ConfigDict, Field, ValidationError
except ImportError as error:
    raise missing_extra("files of questions need pydantic", "eval") from error


class QuestionFields(BaseModel):
    """Fields of a question.

    Attributes:
        question: The question, appended to the text.
        answers: A right answer, or a list of them.
        choices: What to choose from. They are listed below the question, with letters; ``answers`` are letters, or
            choices as they stand here. Classes are not listed.
        score: How an output is scored; by default ``choice`` if there are choices, ``code`` if there is a test, and
            else ``contains``.
        opening: Words that the answer begins with.
        max_tokens: Maximum tokens of the answer.
        stop: Strings that end the answer.
        program: Code that the answer continues, if it is code.
        test: Code that tests the answer, if it is code.
        id: Name of the question; by default the number of its line.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    question: str = ""
    answers: str | list[str] = Field(default_factory=list)
    choices: list[str] = Field(default_factory=list, max_length=len(LETTERS))
    score: Kind | None = None
    opening: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop: str | list[str] = Field(default_factory=list)
    program: str = ""
    test: str = ""
    id: str | None = None


class LineFields(QuestionFields):
    """Fields of a line: a text, and the fields of one question, or a list of questions.

    Attributes:
        text: What the questions are about.
        questions: Several questions; then the line itself has none.
    """

    text: str = ""
    questions: list[QuestionFields] | None = Field(default=None, min_length=1)


def parse_line(fields: dict[str, Any], where: str, number: int) -> Text:
    """Read a line of the form above.

    Args:
        fields: The line's JSON object.
        where: File and line, for messages.
        number: Number of the line, which names questions that have no name.

    Raises:
        ConfigurationError: A field is unknown, missing, or has an invalid value.
    """
    try:
        line = LineFields.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        allowed = ", ".join(LineFields.model_fields)
        unknown = first["type"] == "extra_forbidden"
        message = f"unknown field; allowed: {allowed}" if unknown else first["msg"]
        raise ConfigurationError(f"{where}: {place}: {message}") from error
    asked = [line] if line.questions is None else line.questions
    if not line.text.strip() and not all(one.question.strip() for one in asked):
        raise ConfigurationError(f"{where}: there is neither a text nor a question")
    if line.questions is None:
        return Text(line.text, (_question(line, where, str(number)),))
    own = sorted(line.model_fields_set - {"text", "questions"})
    if own:
        raise ConfigurationError(f"{where}: {', '.join(own)} belong to a question; put them into one of the questions")
    names = [f"{number}.{index}" for index in range(1, len(line.questions) + 1)]
    return Text(
        line.text,
        tuple(_question(one, f"{where}: {name}", name) for one, name in zip(line.questions, names, strict=True)),
    )


def _question(fields: QuestionFields, where: str, name: str) -> Question:
    """A question from its fields.

    Raises:
        ConfigurationError: They do not fit together.
    """
    answers = [fields.answers] if isinstance(fields.answers, str) else list(fields.answers)
    kind: Kind = fields.score or ("choice" if fields.choices else "code" if fields.test else "contains")
    if kind == "code" and not fields.test:
        raise ConfigurationError(f"{where}: code is scored by running it, but there is no 'test'")
    if kind != "code" and not (answers and all(answer.strip() for answer in answers)):
        raise ConfigurationError(f"{where}: 'answers' is missing, or one of them is empty")
    stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
    if not all(stop) and fields.stop:
        raise ConfigurationError(f"{where}: a stop string is empty")
    if kind == "choice":
        answers = [_letter(answer, fields.choices, where) for answer in answers]
    if kind == "class" and not set(answers) <= set(fields.choices):
        raise ConfigurationError(f"{where}: 'answers' has a class that is none of the 'choices'")
    return make_question(
        fields.id or name,
        fields.question if kind == "class" else with_choices(fields.question, fields.choices),
        Scoring(kind, tuple(answers), tuple(fields.choices), fields.program, fields.test),
        max_tokens=fields.max_tokens,
        opening=fields.opening,
        stop=tuple(filter(None, stop)),
    )


def _letter(answer: str, choices: list[str], where: str) -> str:
    if answer in choices:
        return LETTERS[choices.index(answer)]
    if len(answer) == 1 and answer in LETTERS[: len(choices) or None]:
        return answer
    raise ConfigurationError(f"{where}: the answer {answer!r} is neither one of the choices nor the letter of one")

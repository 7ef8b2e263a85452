"""Readers of published benchmarks: a line of their files, as they are, becomes a text and its questions.

The wording of instructions is ours; texts, questions, answers and the kind of scoring are the benchmark's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from snapstream.evaluation.questions.question import LETTERS, Kind, Question, Scoring, Text, make_question, with_choices

Fields = dict[str, Any]


class LeftOutError(Exception):
    """A line is of its form, but cannot be asked; the message completes "questions ..."."""


@dataclass(frozen=True)
class Form:
    """The form of a benchmark's files.

    Attributes:
        recognizes: Whether a line's object is of this form.
        read: Reads a line's object, given the name of its file and the number of the line.
    """

    recognizes: Callable[[Fields], bool]
    read: Callable[[Fields, str, int], Text]


def form_of(fields: Fields) -> str | None:
    """The form of a line's object; ``None`` if it is of no form that is known."""
    for name, form in FORMS.items():
        if form.recognizes(fields):
            return name
    own = {"question", "answers", "choices", "questions", "score", "test"}
    return "snapstream" if own & fields.keys() and "context" not in fields else None


def _question(
    ask: str, kind: Kind, answers: Any, name: str | int, *, choices: tuple[str, ...] = (), **options: Any
) -> Question:
    given = answers if isinstance(answers, list | tuple) else [answers]
    if not all(isinstance(answer, str | int | float) and not isinstance(answer, bool) for answer in given):
        raise ValueError("an answer is neither a text nor a number")
    given = [int(answer) if isinstance(answer, float) and answer.is_integer() else answer for answer in given]
    listed = tuple(str(answer).strip() for answer in given)
    if not all(listed) or not listed:
        raise ValueError("an answer is missing")
    if kind == "class" and not set(listed) <= set(choices):
        raise ValueError("an answer is none of its classes")
    if kind == "choice":
        listed = tuple(answer.strip("() .").upper() for answer in listed)
        wrong = [answer for answer in listed if len(answer) != 1 or answer not in LETTERS[: len(choices) or None]]
        if wrong:
            raise ValueError(f"the answer {wrong[0]!r} is not the letter of a choice")
    return make_question(str(name), ask, Scoring(kind, listed, choices), **options)


# -- L-Eval ---------------------------------------------------------------------------------------------------------


_LETTERED = re.compile(r"\(?([A-H]{1,8})(?:\)?$|[.)]\s)")


def _l_eval(fields: Fields, file: str, number: int) -> Text:
    """``instructions`` and ``outputs`` about one ``input``."""
    pairs = list(zip(fields["instructions"], fields["outputs"], strict=True))
    lettered = [_LETTERED.match(answer.strip()) for _, answer in pairs]
    # Also questions with one right choice, which must not be told apart.
    several = any(found and len(found[1]) > 1 for found in lettered)
    tail = "Give the letters of all right choices." if several else "Give the letter of the right choice."
    how: Fields = {"opening": "The right choices are (", "max_tokens": 32} if several else {}
    questions = []
    for index, ((ask, answer), letters) in enumerate(zip(pairs, lettered, strict=True), 1):
        name = f"{number}.{index}"
        if letters and fields.get("evaluation") == "exam":
            questions.append(_question(f"{ask}\n{tail}", "choice", list(letters[1]), name, **how))
        else:
            questions.append(_l_eval_question(fields.get("evaluation", ""), ask, answer, name))
    return Text(fields["input"], tuple(questions))


def _l_eval_question(evaluation: str, ask: str, answer: str, name: str) -> Question:
    if evaluation == "exam" and re.fullmatch(r"-?[\d.,]+", answer.strip()):
        # Examples stand before the question, and models continue with another one.
        return _question(ask, "number", answer, name, stop=("\nQuestion:", "\n\nQuestion"))
    # Of "True [fact: False]", the first part is what the text says.
    told = answer.partition("[fact:")[0].strip().rstrip(".")
    if evaluation == "exam" and told in ("True", "False"):
        choices = ("True", "False")
        letter = LETTERS[choices.index(told)]
        return _question(with_choices(ask, list(choices)), "choice", letter, name, choices=choices)
    if evaluation == "exam":
        return _question(ask, "contains", told, name)
    return _question(ask, "f1" if evaluation == "f1" else "rouge-l", answer, name)


# -- BAMBOO ---------------------------------------------------------------------------------------------------------

_QUESTION_FIRST = re.compile(r"^(.*?)\n+Question:\n(.*?)\n+Document:\n(.*)$", re.DOTALL)
_QUESTION_LAST = re.compile(r"^(.*?)\n+Document:\n(.*)\n+Question:\n(.*)$", re.DOTALL)


def _bamboo(fields: Fields, name: str, number: int) -> Text:
    """Choices about meetings and papers, numbers from articles, and code by its documentation."""
    if "options" in fields:
        choices = _options(fields["options"], fields["answer"].strip())
        ask = with_choices(fields["question"].strip(), list(choices))
        return Text(fields["content"], (_question(ask, "choice", fields["answer"], number, choices=choices),))
    if "canonical_solution" in fields:
        return _private_library(fields, number)
    if set(fields) != {"content", "answer"} or not isinstance(fields["content"], str):
        raise ValueError("only altqa, meetingqa, paperqa and private_eval can be scored here")
    first, last = _QUESTION_FIRST.match(fields["content"]), _QUESTION_LAST.match(fields["content"])
    if first:
        task, ask, text = first.groups()
    elif last:
        task, text, ask = last.groups()
    else:
        raise ValueError("the content has no 'Document:' and 'Question:'")
    return Text(
        f"{task}\n\nDocument:\n{text}", (_question(f"Question: {ask.strip()}", "contains", fields["answer"], number),)
    )


def _options(listed: list[str], answer: str) -> tuple[str, ...]:
    """The texts of ``A. ...``, ``B: ...``; some lines hold sentences of the text instead, or besides."""
    text = "\n".join(listed)
    marks = list(re.finditer(r"(?:^|\n)\s*([A-H])\s*[.:)]", text))
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    found = {mark[1]: text[mark.end() : end] for mark, end in zip(marks, ends, strict=False)}
    letters = "".join(sorted(found))
    if not letters or not LETTERS.startswith(letters) or answer not in letters:
        raise LeftOutError("whose choices are not in the file")
    return tuple(found[letter].strip().split("\n")[0].strip() for letter in letters)


def _private_library(fields: Fields, number: int) -> Text:
    """Code that needs a function whose name is in the documentation alone: libraries are renamed.

    The code cannot be run, because the file does not say how names were changed. So an answer is scored by the share of
    documented names that it uses, of those in the first solution that has any.
    """
    documentation, _, task = fields["prompt"].partition("# [end]")
    documented = set(re.findall(r"^[# ]*(\w+)\(", documentation, re.MULTILINE))
    words = [list(dict.fromkeys(re.findall(r"\w+", solution))) for solution in fields["canonical_solution"]]
    named = [[word for word in each if word in documented] for each in words]
    names = next(filter(None, named), None)
    if names is None:
        raise LeftOutError("whose solutions use nothing that is documented")
    ask = f"Complete this code. Write the missing lines and nothing else.\n\n```python\n{task.strip()}\n```"
    return Text(f"{documentation}# [end]", (_question(ask, "contains-all", names, number, max_tokens=128),))


# -- Lost in the Middle ---------------------------------------------------------------------------------------------


def _lost_in_the_middle(fields: Fields, name: str, number: int) -> Text:
    """A value of a JSON object of random ids, or a question whose answer is in one of several documents."""
    if "ctxs" in fields:
        documents = [
            f"Document [{at}] (Title: {one['title']}) {one['text']}" for at, one in enumerate(fields["ctxs"], 1)
        ]
        ask = f"Question: {fields['question']}\nAnswer with a name, a number or a phrase from these documents."
        return Text("\n\n".join(documents), (_question(ask, "phrase", fields["answers"], number),))
    pairs = [(str(key), str(value)) for key, value in fields["ordered_kv_records"]]
    wanted = (fields["key"], fields["value"])
    if wanted not in pairs:
        raise ValueError("its key and value are not among its pairs")
    listed = ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in pairs)
    text = f"A JSON object with random keys and values:\n\n{{{listed}}}"
    ask = f"Which value does this object have for the key {json.dumps(wanted[0])}? Answer with the value alone."
    return Text(text, (_question(ask, "contains", wanted[1], number),))


# -- LongBench ------------------------------------------------------------------------------------------------------

_SUMMARIES = ("gov_report", "qmsum", "multi_news", "vcsum", "dureader")
_EXAMPLES: dict[str, Kind] = {"trec": "contains", "lsht": "contains", "triviaqa": "f1", "samsum": "rouge-l"}
"""Tasks with examples before the question, which models continue with another one: the first line is the answer."""
_PARAGRAPHS = {
    "passage_retrieval_en": ("Which paragraph is this a summary of?", "Paragraph"),
    "passage_retrieval_zh": ("这是哪个段落的摘要\uff1f", "段落"),
}
"""The question about a summary, and how the answer begins."""


def _long_bench(fields: Fields, name: str, number: int) -> Text:
    """``input`` is the question about ``context``; ``dataset`` says which task it is."""
    dataset = str(fields["dataset"]).removesuffix("_e")
    text, ask, answers = fields["context"], fields["input"].strip(), fields["answers"]
    if dataset in ("lcc", "repobench-p"):
        ask = f"{ask}\n\nWrite the next line of this code and nothing else.".strip()
        return Text(text, (_question(ask, "similarity", answers, number),))
    if dataset in _SUMMARIES:
        ask = ask or "Summarize this text."
        return Text(text, (_question(ask, "rouge-l", answers, number, max_tokens=512),))
    if dataset in _EXAMPLES:
        kind, classes = _EXAMPLES[dataset], tuple(fields.get("all_classes") or ())
        kind = "class" if classes else kind
        how: Fields = {"max_tokens": 128, "stop": ("\n",), "choices": classes}
        return Text(text, (_question(ask, kind, answers, number, **how),))
    if dataset in _PARAGRAPHS:
        what, opening = _PARAGRAPHS[dataset]
        return Text(text, (_question(f"{what}\n{ask}", "number", answers, number, max_tokens=8, opening=opening),))
    if dataset == "passage_count":
        ask = "How many different paragraphs does this text have, if equal ones count once? Answer with the number."
        return Text(text, (_question(ask, "number", answers, number, max_tokens=32),))
    ask = f"Question: {ask}\nAnswer in a few words." if fields.get("language", "en") == "en" else ask
    return Text(text, (_question(ask, "f1", answers, number),))


def _long_bench_2(fields: Fields, name: str, number: int) -> Text:
    """Four choices about a ``context``."""
    choices = [fields[f"choice_{letter}"] for letter in "ABCD"]
    ask = with_choices(fields["question"].strip(), choices)
    return Text(fields["context"], (_question(ask, "choice", fields["answer"], number, choices=tuple(choices)),))


# -- InfiniteBench --------------------------------------------------------------------------------------------------


def _infinite_bench(fields: Fields, name: str, number: int) -> Text:
    """``input`` is the question about ``context``; the file's name says which task it is."""
    text, ask = fields["context"], fields["input"].strip()
    answers = fields["answer"] if isinstance(fields["answer"], list) else [fields["answer"]]
    if "math_calc" in name or (len(answers) > 1 and all(isinstance(answer, int) for answer in answers)):
        raise LeftOutError("of math_calc, which is scored by the number of right steps")
    if fields.get("options"):
        choices = tuple(str(option) for option in fields["options"])
        # An answer is a choice, its letter, or both.
        stripped = [choice.strip() for choice in choices]
        named = [str(answer).strip() for answer in answers]
        right = [LETTERS[stripped.index(answer)] for answer in named if answer in stripped] or named[-1:]
        return Text(text, (_question(with_choices(ask, list(choices)), "choice", right, number, choices=choices),))
    if "sum" in name:
        return Text(text, (_question(ask or "Summarize this text.", "rouge-l", answers, number, max_tokens=512),))
    if "code_run" in name or "return value of" in ask:
        return Text(text, (_question(ask, "number", answers, number),))
    if "qa" in name and "dialogue" not in name:
        return Text(text, (_question(f"{ask}\nAnswer in a few words.", "f1", answers, number),))
    return Text(text, (_question(ask, "contains", answers, number),))


# -- RULER, HumanEval -----------------------------------------------------------------------------------------------


_RULER_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
"""RULER's maximum tokens of an answer, by how the task's name begins; 128 for needles, and if a name does not say."""


def _ruler(fields: Fields, name: str, number: int) -> Text:
    """What RULER's generators write: ``input`` ends with the question, and asks for all of ``outputs``.

    The beginning of the answer is part of the input, or in ``answer_prefix``.
    """
    given = fields["input"].rstrip()
    text, _, ask = given.rpartition("\n")
    # The question-answering tasks accept any of several answers; all others need all of theirs.
    is_any = name.startswith("qa") or "based on the given documents" in given
    kind: Kind = "contains" if is_any else "contains-all"
    most = next((most for begin, most in _RULER_TOKENS.items() if name.startswith(begin)), 128)
    opening = str(fields.get("answer_prefix") or "").strip()
    return Text(text, (_question(ask.strip(), kind, fields["outputs"], number, max_tokens=most, opening=opening),))


def _human_eval(fields: Fields, name: str, number: int) -> Text:
    """The head of a function, and a test that calls it."""
    head = fields["prompt"]
    ask = f"Complete this function. Write all of it, in one code block.\n\n```python\n{head.rstrip()}\n```"
    test = f"{fields['test']}\ncheck({fields['entry_point']})"
    return Text("", (make_question(str(fields["task_id"]), ask, Scoring("code", (), (), head, test)),))


FORMS: dict[str, Form] = {
    "l-eval": Form(lambda one: {"instructions", "outputs", "input"} <= one.keys(), _l_eval),
    "bamboo": Form(
        lambda one: (
            {"content", "answer"} <= one.keys()
            or ({"prompt", "canonical_solution"} <= one.keys() and isinstance(one["canonical_solution"], list))
        ),
        _bamboo,
    ),
    "lost-in-the-middle": Form(
        lambda one: (
            {"ordered_kv_records", "key", "value"} <= one.keys() or {"question", "answers", "ctxs"} <= one.keys()
        ),
        _lost_in_the_middle,
    ),
    "longbench": Form(lambda one: {"input", "context", "answers", "dataset"} <= one.keys(), _long_bench),
    "longbench-v2": Form(lambda one: {"context", "question", "choice_A", "answer"} <= one.keys(), _long_bench_2),
    "infinitebench": Form(lambda one: {"context", "input", "answer"} <= one.keys(), _infinite_bench),
    "humaneval": Form(lambda one: {"prompt", "entry_point", "test"} <= one.keys(), _human_eval),
    "ruler": Form(lambda one: {"input", "outputs"} <= one.keys(), _ruler),
}
"""Forms by name; a line is of the first one that recognizes it."""
